"""A stage's parameters and buffers, filled from whole-model weights under the model's own names."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import LaunchError
from .generators import seeded_generators
from .memory_format import dense
from .spec import Shard


class Tree(nn.Module):
    """Submodules by name, also by the names of `nn.ModuleDict`'s own methods (`keys`, `values`, ...)."""

    def __init__(self, modules: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        for name, module in (modules or {}).items():
            self.add_module(name, module)

    def __getitem__(self, name: str) -> nn.Module:
        return self.get_submodule(name)


def part_of(tensor: Tensor, shard: Shard | None) -> Tensor:
    """A shard of a tensor, as a view; the whole for None.  A scalar counts as one row."""
    if shard is None or (tensor.dim() == 0 and shard.first < shard.last):
        return tensor
    return (tensor if tensor.dim() else tensor.reshape(1)).narrow(shard.dim, shard.first, shard.last - shard.first)


def build(
    stage_class: Any, weights: Mapping[str, Tensor], device: torch.device, shards: Mapping[str, Shard] | None = None
) -> nn.Module:
    """Construct a stage on `device` with copies of its `weights`, in their dtypes; tied parameters stay tied.

    shards: weight -> the part of it that the stage gets, if `weights` do not have that alone; the whole of all others.
    The stage is constructed on the meta device first, so that no weight is initialised before it is copied.  A module
    of which `weights` have nothing initialises itself, by its name alike on all ranks.
    Raises LaunchError that lists the weights that are missing or have another shape.
    """
    with torch.device("meta"):
        stage: nn.Module = stage_class()
    needed, shards = named_tensors(stage), shards or {}
    weights = {**weights, **_initialised(stage, needed, weights)}
    if problems := _misfits(needed, weights, shards):
        raise LaunchError("\n".join(["the weights do not fit this stage:", *(f"  - {p}" for p in problems)]))
    made: dict[Tensor, Tensor] = {}
    for name, empty in needed.items():
        if empty not in made:
            given = weights[name].detach()
            value = part_of(given, shards.get(name)) if given.shape == empty.shape else given
            value = dense(value.to(device, copy=True))
            made[empty] = nn.Parameter(value, empty.requires_grad) if isinstance(empty, nn.Parameter) else value
        path, _, attribute = name.rpartition(".")
        setattr(stage.get_submodule(path), attribute, made[empty])  # no shortcut: recurrent layers watch this
    return stage.train()


def _misfits(needed: Mapping[str, Tensor], weights: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> list[str]:
    """A line for each needed tensor that `weights` lacks, or has neither whole nor its shard; tied ones once."""
    problems: dict[Tensor, str] = {}
    for name, tensor in needed.items():
        value = weights.get(name)
        if value is None or value.shape not in (tensor.shape, part_of(tensor, shards.get(name)).shape):
            has = "missing" if value is None else f"has {tuple(value.shape)}"
            problems.setdefault(tensor, f"{name}: needs shape {tuple(tensor.shape)}, {has}")
    return list(problems.values())


def _initialised(stage: nn.Module, needed: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of modules that have a `reset_parameters`, and of whose tensors `weights` have none."""
    given = {tensor: name for name, tensor in needed.items() if name in weights}
    made = {name: weights[given[t]] for name, t in needed.items() if t in given and name not in weights}
    for path, module in stage.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        reset = "reset_parameters" if hasattr(module, "reset_parameters") else "_reset_parameters"  # of attention
        if not own or not given.keys().isdisjoint(own) or not hasattr(module, reset):
            continue
        with seeded_generators(path):
            fresh = copy.deepcopy(module).to_empty(device="cpu")
            getattr(fresh, reset)()
        made |= {f"{path}.{name}": tensor.detach() for name, tensor in named_tensors(fresh).items() if "." not in name}
    return made


def first_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Key -> the first key whose tensor has the same memory; tied tensors have one first key."""
    seen: dict[tuple[object, ...], str] = {}
    return {
        key: seen.setdefault((value.data_ptr(), value.shape, value.stride()) if value.numel() else (key,), key)
        for key, value in state.items()
    }


def named_tensors(stage: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, under each of their names."""
    return dict([*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False)])
