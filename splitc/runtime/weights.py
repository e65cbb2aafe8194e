"""A stage's parameters and buffers: filled from whole-model weights, and given back under the model's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .transport import LaunchError


class Tree(nn.Module):
    """Submodules by name, for names that `nn.ModuleDict` keeps for itself (`keys`, `values`, ...)."""

    def __init__(self, modules: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        for name, module in (modules or {}).items():
            self.add_module(name, module)

    def __getitem__(self, name: str) -> nn.Module:
        return self.get_submodule(name)


def build(stage_class: Any, weights: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """A stage on `device` with copies of its `weights`; tied parameters stay tied.

    Raises LaunchError that lists the weights that are missing or have another shape.
    """
    with torch.device("meta"):
        stage: nn.Module = stage_class()
    problems: list[str] = []
    made: dict[int, Tensor] = {}

    def real(name: str, empty: Tensor) -> Tensor:
        if id(empty) in made:
            return made[id(empty)]
        value = weights.get(name)
        if value is None or value.shape != empty.shape:
            problems.append(f"{name}: needs shape {tuple(empty.shape)}, " + (
                "missing" if value is None else f"has {tuple(value.shape)}"))
            return empty
        copied = value.detach().to(device, copy=True).contiguous()
        made[id(empty)] = nn.Parameter(copied, empty.requires_grad) if isinstance(empty, nn.Parameter) else copied
        return made[id(empty)]

    for path, module in stage.named_modules():
        for group in (module._parameters, module._buffers):
            for name, tensor in list(group.items()):
                if tensor is not None:
                    group[name] = real(f"{path}.{name}" if path else name, tensor)  # type: ignore[index]
    if problems:
        raise LaunchError("\n".join(["the weights do not fit this stage:", *(f"  - {p}" for p in problems)]))
    return stage.train()


def copy_into(stage: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Overwrite the stage's parameters and persistent buffers from a whole state_dict.  Raises LaunchError as `build`."""
    own = stage.state_dict(keep_vars=True)
    bad = [f"{k}: needs shape {tuple(v.shape)}, " + ("missing" if k not in state else f"has {tuple(state[k].shape)}")
           for k, v in own.items() if k not in state or state[k].shape != v.shape]
    if bad:
        raise LaunchError("\n".join(["the state_dict does not fit this stage:", *(f"  - {p}" for p in bad)]))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])
