"""The optimizers of a rank, and what is done to gradients before they step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .errors import LaunchError
from .transport.base import Transport

OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Called with named parameters."""

STEP = ""
"""Stands for a role where parameters are updated once a step."""


def make_optimizers(
    factory: OptimizerFactory,
    named: Sequence[tuple[str, nn.Parameter]],
    every_microbatch: Mapping[str, Sequence[str]],
    divided: Sequence[str],
) -> dict[str, torch.optim.Optimizer]:
    """Role -> the optimizer that updates its parameters after every microbatch; `STEP` -> that of all others.

    every_microbatch: role -> those parameters.  divided: the parameters of which this rank updates a part only.
    Where nothing is trained there is no optimizer.  Raises LaunchError for optimizers that need the whole tensors.
    """
    role_of = {name: role for role, names in every_microbatch.items() for name in names}
    optimizers = {}
    for role in (STEP, *every_microbatch):
        parameters = [(name, parameter) for name, parameter in named if role_of.get(name, STEP) == role]
        if any(parameter.requires_grad for _, parameter in parameters):
            optimizers[role] = _checked(factory(parameters), divided)
    return optimizers


def _checked(optimizer: torch.optim.Optimizer, divided: Sequence[str]) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise LaunchError(
            "LBFGS evaluates the loss several times a step and over all parameters at once; use another optimizer"
        )
    name = type(optimizer).__name__
    if name in ("Adafactor", "Muon") and divided:
        raise LaunchError(
            f"{name} looks at whole tensors, and this rank has a part of {', '.join(divided[:3])}"
            f"{', ...' if len(divided) > 3 else ''}; use an optimizer that works element by element, "
            f"or a plan without sharded layers and servers"
        )
    return optimizer


def clip(transport: Transport, gradients: Sequence[Tensor], counted: Iterable[Tensor], limit: float) -> None:
    """Scale `gradients` so that the global norm is at most `limit`.  Collective.

    counted: those that this rank adds to the norm; each parameter counts on one rank only.
    """
    square = torch.zeros((), dtype=torch.float64, device=transport.device)
    for gradient in counted:
        square += gradient.double().square().sum()
    transport.all_reduce(square, tuple(range(transport.world))).wait()
    scale = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
