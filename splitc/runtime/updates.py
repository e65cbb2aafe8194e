"""What happens to a rank's gradients between the last backward and the optimizer: unscale, average, check, clip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .errors import LaunchError, NonFiniteError
from .stage_state import StageState
from .transport.base import Ranks, Transport

DYNAMIC, SKIP = "dynamic", "skip"


class LossScale:
    """What the loss is multiplied by before backward, so that gradients in float16 do not become zero.

    given: a number, or "dynamic": as torch.amp.GradScaler, half as much after an overflow, twice as much after 2,000
    updates without one.  Ranks know of each other's overflows, so all have the same.
    """

    def __init__(self, given: float | str) -> None:
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if given != DYNAMIC and not (is_number and 0 < float(given) < math.inf):
            raise LaunchError(f'loss_scale={given!r}: give "dynamic" or a number above 0')
        self.is_dynamic = given == DYNAMIC
        self.value = 65536.0 if given == DYNAMIC else float(given)
        self._updates = 0

    def count(self, overflow: bool) -> None:
        """Count an update."""
        if not self.is_dynamic:
            return
        self._updates = 0 if overflow else self._updates + 1
        self.value *= 0.5 if overflow else 2.0 if self._updates == 2000 else 1.0
        self._updates %= 2000

    def state_dict(self) -> dict[str, Any]:
        """The scale, and the updates since it changed."""
        return {"value": self.value, "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the scale of another run."""
        self.value, self._updates = state["value"], state["updates"]


@dataclass
class Updates:
    """The gradients of a rank's updates.

    clip_norm: None leaves them.  check_finite: raise for what is not finite, or "skip" it.  scale: of programs in
    float16.
    total: their norm before they were clipped, where it is known.  overflow: whether some, or a loss that is checked,
    are not finite on any rank, where that is checked or the loss is scaled.
    """

    state: StageState
    accumulate: int
    clip_norm: float | None
    check_finite: bool | str
    scale: LossScale | None
    total: Tensor | None = None
    overflow: bool = False
    _is_spoilt: bool = False  # a batch of this update
    _kept: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.check_finite not in (False, True, SKIP):
            raise LaunchError(f'check_finite={self.check_finite!r}: give True, or "skip" to leave such updates out')

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scale is None else self.scale.value

    def begin(self) -> None:
        """Keep the buffers, in which nothing of a step is to remain that is not finite."""
        buffers = [*self.state.stage.buffers()] if self.check_finite else []
        self._kept = self._kept or [each.clone() for each in buffers]
        _copy(self._kept, buffers)

    def undo(self) -> None:
        """Give the buffers what they had when the step began."""
        _copy([*self.state.stage.buffers()], self._kept)

    def finish(self, loss: Tensor, is_last: bool) -> bool:
        """Make of the gradients of accumulated batches, after the last one, those of the update.  Collective.

        Returns whether the step has an `error`.  An overflow that a dynamic scale answers is none.
        """
        for _, parameter in self.state.trained if is_last else ():
            if (gradient := parameter.grad) is not None and (gradient.is_conj() or gradient.is_neg()):
                parameter.grad = gradient.resolve_conj().resolve_neg()  # for which foreach has no ops in place
            elif gradient is not None and gradient.is_sparse:
                parameter.grad = gradient.coalesce()  # so that each row counts once
        gradients = [gradient for _, gradient in self.state.trained_gradients()] if is_last else []
        for divisor in (self.accumulate, self.loss_scale):
            for group in _by_dtype(gradients) if divisor != 1 else ():
                torch._foreach_div_(group, divisor)
        self.total, wrong = None, False
        if self.check_finite or (self.scale and is_last):
            flags = torch.stack([~loss.isfinite().to(self.state.transport.device), self._overflows(gradients)]).float()
            self.state.transport.all_reduce(flags, self.state.everyone, maximum=True).wait()
            loss_overflows, self.overflow = flags.bool().tolist()
            answered = self.scale is not None and self.scale.is_dynamic
            wrong = bool(self.check_finite) and (loss_overflows or (self.overflow and not answered))
            self._is_spoilt = self._is_spoilt or wrong
            self.overflow, self._is_spoilt = self.overflow or self._is_spoilt, self._is_spoilt and not is_last
        if is_last and self.scale is not None:
            self.scale.count(self.overflow)
        if is_last and self.clip_norm is not None:
            clip(gradients, self.norm(), self.clip_norm)
        return wrong

    def _overflows(self, gradients: list[Tensor]) -> Tensor:
        parts = [torch.view_as_real(each) if each.is_complex() else each for each in gradients if each.numel()]
        found = [largest for group in _by_dtype(parts) for largest in torch._foreach_norm(group, math.inf)]
        every = torch.stack(found) if found else torch.zeros(1, device=self.state.transport.device)
        return ~every.isfinite().all()

    def norm(self) -> Tensor:
        """The norm of the last update's gradients, before they were clipped.  Collective where it is not known."""
        if self.total is None:
            own = self.state.trained_gradients()
            counted = [gradient for name, gradient in own if self.state.is_first_holder(name, self.state.together)]
            self.total = norm(self.state.transport, counted, self.state.together)
        return self.total

    def error(self, step: int, loss: Tensor) -> NonFiniteError:
        """What is not finite, by the name of its first layer in the model and a rank that has it.  Collective."""
        found = [name for name, gradient in self.state.trained_gradients() if not gradient.isfinite().all()]
        every = self.state.transport.all_gather_objects(found)
        layers: dict[str, int] = {}
        for rank, names in enumerate(every):
            for name in names:
                layers.setdefault(self.state.first_name(name).rpartition(".")[0] or name, rank)
        order = [name.rpartition(".")[0] or name for name in self.state.first_names.values()]
        first = min(layers, key=lambda layer: order.index(layer) if layer in order else len(order), default="")
        more = f" and of {len(layers) - 1} more layer{'s' * (len(layers) > 2)}" if len(layers) > 1 else ""
        gradients = f", the gradients of {first} on rank {layers[first]}{more} are not finite" if layers else ""
        return NonFiniteError(
            f"step {step}: the loss is {loss.item():g}{gradients}; no parameter was updated; look at this batch, lower "
            f"the learning rate, or give clip_norm="
        )


def _copy(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    for to, what in zip(_by_dtype(tensors), _by_dtype(others), strict=True):
        torch._foreach_copy_(to, what)


def norm(transport: Transport, counted: Iterable[Tensor], ranks: Ranks) -> Tensor:
    """The norm of gradients over `ranks`, in float64.  Collective.

    counted: those that this rank adds to the norm; each parameter counts on one rank only.
    """
    norms = [own for group in _by_dtype(counted) for own in torch._foreach_norm(_slices(group), 2, _double(group[0]))]
    every = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=transport.device)
    square = every.dot(every)
    transport.all_reduce(square, ranks).wait()
    return square.sqrt()


def clip(gradients: Sequence[Tensor], total: Tensor, limit: float) -> None:
    """Scale gradients, whose norm is `total`, so that it is at most `limit`."""
    scale = (limit / (total + 1e-6)).clamp(max=1.0)
    for group in _by_dtype(gradients):
        torch._foreach_mul_(group, scale.to(group[0].dtype))


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those of each dtype, which a GPU computes in one launch."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _slices(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors; on the CPU, where a norm in float64 makes a copy, slices of rows of about a million numbers."""
    if tensors[0].device.type != "cpu":
        return tensors
    rows = {each: max(1, len(each) * 2**20 // each.numel()) for each in tensors if each.numel() > 2**20}
    return [part for each in tensors for part in (each.split(rows[each]) if each in rows else [each])]
