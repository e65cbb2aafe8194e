"""A stage's parameters and buffers, filled from whole-model weights under the model's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import LaunchError


class Tree(nn.Module):
    """Submodules by name, for names that `nn.ModuleDict` keeps for itself (`keys`, `values`, ...)."""

    def __init__(self, modules: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        for name, module in (modules or {}).items():
            self.add_module(name, module)

    def __getitem__(self, name: str) -> nn.Module:
        return self.get_submodule(name)


def part_of(tensor: Tensor, share: tuple[int, int, int] | None) -> Tensor:
    """The part of a tensor along (dim, first, one past the last); the whole for None.  A scalar is its only row."""
    if share is None or (tensor.dim() == 0 and share[1] < share[2]):
        return tensor
    return (tensor if tensor.dim() else tensor.reshape(1)).narrow(share[0], share[1], share[2] - share[1])


def build(
    stage_class: Any,
    weights: Mapping[str, Tensor],
    device: torch.device,
    shares: Mapping[str, tuple[int, int, int]] | None = None,
) -> nn.Module:
    """A stage on `device` with its own copies of its `weights`, in their dtypes; tied parameters stay tied.

    shares: which part of a weight the stage gets, (dim, first, one past the last); the whole of all others.
    The stage is made without memory first, so each weight is copied once and nothing is initialised in vain.
    Raises LaunchError that lists the weights that are missing or have another shape.
    """
    with torch.device("meta"):
        stage: nn.Module = stage_class()
    needed = _tensors(stage)
    if problems := misfits(needed, weights):
        raise LaunchError("\n".join(["the weights do not fit this stage:", *(f"  - {p}" for p in problems)]))
    made: dict[Tensor, Tensor] = {}
    for name, empty in needed.items():
        if empty not in made:
            value = part_of(weights[name].detach(), (shares or {}).get(name)).to(device, copy=True).contiguous()
            made[empty] = nn.Parameter(value, empty.requires_grad) if isinstance(empty, nn.Parameter) else value
        path, _, attribute = name.rpartition(".")
        setattr(stage.get_submodule(path), attribute, made[empty])  # no shortcut: recurrent layers watch this
    return stage.train()


def misfits(needed: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[str]:
    """What `weights` lacks of the needed tensors, or has in another shape, one line each; tied ones once."""
    problems: dict[Tensor, str] = {}
    for name, tensor in needed.items():
        value = weights.get(name)
        if value is None or value.shape != tensor.shape:
            has = "missing" if value is None else f"has {tuple(value.shape)}"
            problems.setdefault(tensor, f"{name}: needs shape {tuple(tensor.shape)}, {has}")
    return list(problems.values())


def first_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Key -> the first key with the same memory: the model's keys, and which of them are one tensor."""
    seen: dict[tuple[object, ...], str] = {}
    return {
        key: seen.setdefault((value.data_ptr(), value.shape, value.stride()) if value.numel() else (key,), key)
        for key, value in state.items()
    }


def _tensors(stage: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, under each of their names."""
    named = (*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False))
    return dict(named)
