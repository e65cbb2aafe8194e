"""Find the loss in what a model or a loss function returns: a tensor, a tuple, a dict or an object with a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

from torch import Tensor, nn

from splitc.errors import CaptureError
from splitc.runtime.nested import parts


class SummedLosses(nn.Module):
    """Several losses of the same output and targets, summed."""

    def __init__(self, losses: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self._losses = list(losses)
        self.modules_of_losses = nn.ModuleList(each for each in losses if isinstance(each, nn.Module))

    def forward(self, output: Any, *targets: Any) -> Any:
        values = (losses_in(loss(output, *targets), f"loss {k}") for k, loss in enumerate(self._losses))
        return {f"loss{k}": total(found) for k, found in enumerate(values)}


def losses_in(returned: Any, by: str) -> dict[str, Any]:
    """The losses in what `by` returned: a tensor, its "loss", its one 0-d tensor, or several if there is nothing else.

    Raises CaptureError.
    """
    if isinstance(returned, Tensor):
        return {"loss": returned}
    found = parts(returned) or getattr(returned, "__dict__", {})
    own = found.get("loss", getattr(returned, "loss", None))
    if isinstance(own, Tensor):
        return {"loss": own}
    tensors = {name: each for name, each in found.items() if isinstance(each, Tensor)}
    scalars = {name: each for name, each in tensors.items() if each.dim() == 0 and each.dtype.is_floating_point}
    if len(scalars) == 1 or (scalars and len(scalars) == len(found)):
        return scalars
    what = f"a {type(returned).__name__}" + (f" of {', '.join(found)}" if found else "")
    several = f"{len(scalars)} of them 0-d" if scalars else "no 0-d tensor in it"
    raise CaptureError(
        f"{by} returns {what}, {several}, so the loss is not known; let it return the loss or something with .loss "
        f"(transformers: give labels= among the inputs), or give loss=... and target=..., for example "
        f"loss=torch.nn.functional.cross_entropy"
    )


def total(losses: Mapping[str, Any]) -> Any:
    """The sum of losses."""
    return reduce(add, losses.values())
