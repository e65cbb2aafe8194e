"""How a rank, of the same plan or of another one, takes over what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..features import FEATURES
from ..generators import set_random_state
from ..optimizers import device_of_state, load_by_name, set_options
from ..parameter_groups import Groups
from ..transport.base import describe
from ..weights import named_tensors
from .contents import Contents, schedule_of
from .piece import Piece
from .storage import Saved

_TOLD = 4  # tensors of a rank


def problems(own: Contents, saved: Saved, run: Mapping[str, Any]) -> Iterator[str]:
    """Why training cannot go on from a checkpoint."""
    settings, accumulate = run["settings"], run["settings"]["accumulate"]
    for name, was in settings.items():
        if name != "the plan" and was != own.settings.get(name):
            yield f"{name}: the checkpoint has {was}, this run {own.settings.get(name)}"
    for feature in FEATURES if not same_plan(own, run) else ():
        if feature.own_plan and (run.get(feature.name) or feature.concerns(own.rank.spec)):
            yield feature.own_plan
    if not same_plan(own, run) and run["steps"] % accumulate:
        yield (
            f"it was saved after {run['steps']} batches, of which {accumulate} make an update; another plan goes on "
            f"between updates only"
        )
    if own.kinds and run["kinds"] and own.kinds != tuple(run["kinds"]):
        yield f"optimizer: the checkpoint has {', '.join(run['kinds'])}, this run {', '.join(own.kinds)}"
    before, after = _by_name(run["groups"]), _by_name(own.groups)
    for name in [name for name, group in after.items() if before.get(name, group) != group][:1]:
        yield f"optimizer: the checkpoint has {name} in {before[name]}, this run in {after[name]}"
    for name in own.objects.keys() & run["schedules"].keys():
        if (kind := run["schedules"][name]) != schedule_of(own.objects[name]):
            yield f"{name}: the checkpoint has {kind}, this run {schedule_of(own.objects[name]) or 'something else'}"
    if unlike := list(_unlike(own, saved)):
        yield "it is not of the same model:"
        yield from unlike[:_TOLD]
        if len(unlike) > _TOLD:
            yield f"and {len(unlike) - _TOLD} more tensors of rank {own.rank.index}"


def _unlike(own: Contents, saved: Saved) -> Iterator[str]:
    """The tensors of the model that a checkpoint has otherwise."""
    for name, piece in _stage_pieces(own).items():
        was, now = saved.like(name), torch.empty(piece.whole, dtype=piece.tensor.dtype, device="meta")
        if was is None and not name.startswith("model."):
            continue  # a constant, which this run's graph has
        if was is None or describe(was) != describe(now):
            has = "none" if was is None else describe(was)
            yield f"{name.partition('.')[2]}: the checkpoint has {has}, this run {describe(now)}"
    kept = {f"model.{name}" for name in own.state.first_names.values()}
    for full in (each for each in saved.metadata.state_dict_metadata if each.startswith("model.") and each not in kept):
        yield f"{full.partition('.')[2]}: the checkpoint has it, this run has none of its own"


def _by_name(groups: Groups) -> dict[str, str]:
    return {name: f"group {k} of {len(groups)}" for k, names in enumerate(groups, 1) for name in names}


def same_plan(own: Contents, run: Mapping[str, Any]) -> bool:
    """Whether a run had this one's plan."""
    return bool(run["settings"]["the plan"] == own.settings["the plan"])


def restore(own: Contents, saved: Saved, run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Go on where a run was; returns the states of its registered objects."""
    state, alone = own.state, saved.unpacked(f"ranks.{own.rank.index}") if same_plan(own, run) else None
    state.unheld = {name: tensor.clone() for name, tensor in state.unheld.items()}
    averages, trained = own.averages(), dict(state.trained)
    pieces = {f"averages.{state.first_name(name)}": own.piece(name, tensor) for name, tensor in averages.items()}
    pieces |= _stage_pieces(own)
    saved.read({name: piece for name, piece in pieces.items() if saved.like(name) is not None})
    for name, tensor in averages.items():
        if saved.like(f"averages.{state.first_name(name)}") is None:  # they begin here
            tensor.copy_(trained[name].detach())
    for tensor in named_tensors(state.stage).values():
        tensor.grad = None
    for optimizer in own.optimizers.values():
        optimizer.state.clear()
    for each in {*own.optimizers.values(), own.scheduled} if run["options"] else ():
        for group, options in zip(each.param_groups, run["options"], strict=True) if each else ():
            set_options(group, options)
    for optimizer, options, name, parameter in list(own.optimized()):
        if kept := run["numbers"].get(state.first_name(name)):
            optimizer.state[parameter] = dict(_optimizer_state(own, saved, name, parameter, kept, options))
    if alone is None:
        return dict(run["objects"])
    _restore_alone(own, alone, run["numbers"])
    return dict(alone["objects"])


def _stage_pieces(own: Contents) -> dict[str, Piece]:
    """The pieces that fill this rank's stage, by full names."""
    state = own.state
    found = {f"{own.section(name)}.{name}": Piece(tensor) for name, tensor in state.unheld.items()}
    for name, tensor in named_tensors(state.stage).items():
        found[f"{own.section(name)}.{state.first_name(name)}"] = Piece(tensor, *state.part(name, built=True))
    return {name: piece for name, piece in found.items() if piece.tensor.numel()}


def _optimizer_state(
    own: Contents, saved: Saved, name: str, parameter: nn.Parameter, kept: Mapping[str, Any], group: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The state of a parameter of a group; kept: its numbers, and where its tensors were.

    What has the shape of the whole parameter is divided as that is; anything else is whole on every rank.
    """
    whole = own.piece(name, parameter).whole
    for key, value in kept.items():
        if not isinstance(value, str):
            yield key, value[0]
            continue
        full = f"optimizer.{own.state.first_name(name)}.{key}"
        if (like := saved.like(full)) is None:  # without elements
            yield key, torch.zeros_like(parameter)
            continue
        divided = like.shape == whole and parameter.dim() > 0
        device = device_of_state(group, parameter, key, like.dim(), value)
        tensor = torch.empty_like(parameter if divided else like, dtype=like.dtype, device=device)
        if tensor.numel():
            saved.read({full: own.piece(name, tensor) if divided else Piece(tensor)})
        yield key, tensor


def _restore_alone(own: Contents, alone: Mapping[str, Any], numbers: Mapping[str, Mapping[str, Any]]) -> None:
    """Take over what only this rank of the same plan needs.  numbers: also where the optimizers' tensors were."""
    tensors, trained = named_tensors(own.state.stage), own.state.trained
    kinds = {name: numbers.get(own.state.first_name(name), {}) for name, _ in trained}
    with torch.no_grad():
        for name, value in alone["tensors"].items():
            tensors[name].copy_(value)
    for name, value in alone["gradients"].items():
        tensors[name].grad = value.to(tensors[name].device)
    for role, optimizer in own.optimizers.items():
        if role in alone["optimizers"]:
            load_by_name(optimizer, trained, alone["optimizers"][role], kinds)
        for group, options in zip(optimizer.param_groups, alone["groups"][role], strict=True):
            set_options(group, options)
    for feature in (each for each in own.features if each.item):
        feature.load_state_dict(alone[feature.item])
    set_random_state(alone["random"])
