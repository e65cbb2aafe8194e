"""Find the loss in what a model or a loss function returns: a tensor, a tuple, a dict or an object with a loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

from torch import Tensor, nn

from splitc.errors import CaptureError
from splitc.runtime.nested import parts, tensors


class SummedLosses(nn.Module):
    """Several losses of the same output and targets, summed."""

    def __init__(self, losses: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self._losses = list(losses)
        self.modules_of_losses = nn.ModuleList(each for each in losses if isinstance(each, nn.Module))

    def forward(self, output: Any, *targets: Any) -> Any:
        values = (losses_in(loss(output, *targets), f"loss {k}") for k, loss in enumerate(self._losses))
        return {f"loss{k}": total(found) for k, found in enumerate(values)}


def takes(function: Any, count: int) -> bool:
    """Whether a function, a module, or each of several losses takes so many tensors by position.

    A parameter with a default takes one where that is None: `beta=1.0` is no target.
    """
    if isinstance(function, (SummedLosses, Sequence)):
        losses: Any = getattr(function, "_losses", function)
        return all(takes(each, count) for each in losses)
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(called, follow_wrapped=False)
        given = signature.bind(*range(count)).arguments
    except TypeError:
        return False
    except ValueError:  # it has none, as some builtin functions: it may
        return True
    return all(signature.parameters[name].default in (None, inspect.Parameter.empty) for name in given)


def losses_in(returned: Any, by: str) -> dict[str, Any]:
    """The losses in what `by` returned: a tensor, its "loss", its one 0-d tensor, or several if there is nothing else.

    Metrics, which have no gradient, do not count.  Raises CaptureError.
    """
    if isinstance(returned, Tensor):
        return {"loss": returned}
    found = parts(returned) or getattr(returned, "__dict__", {})
    own = found.get("loss", getattr(returned, "loss", None))
    if isinstance(own, Tensor):
        return {"loss": own}
    held = {name: each for name, each in found.items() if any(tensors(each))}
    scalars = {name: each for name, each in held.items() if isinstance(each, Tensor) and each.dim() == 0}
    losses = {name: each for name, each in scalars.items() if each.requires_grad} or scalars  # the others are metrics
    if len(losses) == 1 or (losses and len(scalars) == len(held)):
        return losses
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
