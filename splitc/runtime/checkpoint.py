"""A whole model's state across ranks: gather it from the ranks that hold its parts, broadcast it, scatter it.

Tensors travel one by one, so a rank needs memory for what it sends or receives and for one more tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .errors import LaunchError
from .spec import Shard
from .transport.base import Transport
from .weights import misfits, part_of

Holders = dict[str, dict[Shard | None, tuple[int, ...]]]
"""Tensor -> shard, or None for the whole -> the ranks that hold it, the lowest first."""


def gather_holders(transport: Transport, held: Mapping[str, Shard | None]) -> Holders:
    """The holders of all tensors, of which this rank holds those in `held`.  Collective."""
    tables = transport.gather_objects(dict(held))
    found: Holders = {}
    for rank, table in enumerate(tables or ()):
        for name, shard in table.items():
            ranks = found.setdefault(name, {})
            ranks[shard] = (*ranks.get(shard, ()), rank)
    holders: Holders = transport.broadcast_object(found)
    return holders


def gather_state(
    transport: Transport, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard] | None = None
) -> dict[str, Tensor] | None:
    """Gather all ranks' `tensors` by name, as copies on rank 0's CPU; returns None on the others.  Collective.

    shards: tensor -> the part of it that this rank contributes; parts are concatenated.  Where several ranks contribute
    the same, the lowest one's is taken.
    """
    described = {} if transport.rank == 0 else _shapes(tensors)
    contributions = transport.gather_objects((described, {n: s for n, s in (shards or {}).items() if n in tensors}))
    if contributions is None:
        _send(transport, tensors, 0)
        return None
    whole: dict[str, Tensor] = {}
    parts: dict[str, dict[Shard, Tensor]] = {}
    for rank, (shapes, rank_shards) in enumerate(contributions):
        local = ((name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors.items())
        for name, tensor in local if rank == transport.rank else _received(transport, shapes, rank):
            if name in rank_shards:
                parts.setdefault(name, {}).setdefault(rank_shards[name], tensor)
            else:
                whole.setdefault(name, tensor)
    return {**whole, **{name: _concatenated(pieces) for name, pieces in parts.items()}}


def _concatenated(pieces: Mapping[Shard, Tensor]) -> Tensor:
    ordered = sorted(pieces, key=lambda shard: shard[1:])
    return torch.cat([pieces[shard] for shard in ordered], dim=ordered[0][0])


def broadcast_state(
    transport: Transport,
    stage: nn.Module,
    state: Mapping[str, Tensor] | None,
    keys: Iterable[str],
    shards: Mapping[str, Shard] | None = None,
) -> dict[str, Tensor]:
    """Overwrite every rank's parameters and persistent buffers with rank 0's `state`; others' is ignored.  Collective.

    keys: on rank 0, those that the state must have, no more and no fewer.  shards: tensor -> the part of it that this
    rank holds.
    Returns, on rank 0, copies of the tensors that no rank holds.  Raises LaunchError, on every rank alike and before
    anything is changed, when the state does not fit.
    """
    own, shards = stage.state_dict(keep_vars=True), shards or {}
    if transport.rank != 0:
        state = None
    shapes: dict[str, Tensor] | None = transport.broadcast_object(None if state is None else _shapes(state))
    if shapes is None:
        raise LaunchError("load_state_dict: rank 0 must give the state")
    problems = misfits({n: t for n, t in own.items() if n in shapes and n not in shards}, shapes)
    if state is not None:
        problems += [f"{key}: missing" for key in keys if key not in state]
        problems += [f"{key}: the model has no such key" for key in state if key not in set(keys)]
    parts = {name: (shard, tuple(own[name].shape)) for name, shard in shards.items() if name in shapes}
    all_held = _check_fits(transport, problems, list(own), parts, shapes)
    with torch.no_grad():
        for name, like in shapes.items():
            tensor = (
                torch.empty(like.shape, dtype=like.dtype, device=transport.device) if state is None else state[name]
            )
            transport.broadcast(tensor, 0, tuple(range(transport.world))).wait()
            if name in own:
                own[name].copy_(part_of(tensor, shards.get(name)))
    if state is None:
        return {}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items() if name not in all_held}


Parts = Mapping[str, tuple[Shard, tuple[int, ...]]]
"""Tensor -> the shard of it that a rank holds, and that shard's shape."""


def _check_fits(
    transport: Transport, problems: list[str], names: list[str], parts: Parts, shapes: Mapping[str, Tensor]
) -> set[str]:
    """Raise LaunchError on all ranks when one of them has problems; returns, on rank 0, the names that ranks hold."""
    reports = transport.gather_objects((problems, names, parts))
    if reports is not None:
        problems = list(dict.fromkeys(problem for found, _, _ in reports for problem in found))
        problems += _wrong_shapes([held for _, _, held in reports], shapes)
    if problems := transport.broadcast_object(problems):
        text = "the state_dict does not fit the model, and nothing was loaded:"
        raise LaunchError("\n".join([text, *(f"  - {problem}" for problem in problems)]))
    return {name for _, held, _ in reports or () for name in held}


def scatter_state(transport: Transport, parts: Sequence[Mapping[str, Tensor]] | None) -> dict[str, Tensor]:
    """Return to every rank its own of rank 0's `parts`, tensors by name; the others pass None.  Collective."""
    shapes = transport.scatter_objects(None if parts is None else [_shapes(part) for part in parts])
    if parts is None:
        return dict(_received(transport, shapes, 0))
    for rank, part in enumerate(parts):
        if rank != transport.rank:
            _send(transport, part, rank)
    return dict(parts[transport.rank])


def _wrong_shapes(all_parts: Iterable[Parts], shapes: Mapping[str, Tensor]) -> list[str]:
    """A line for each tensor whose shape differs from that which the ranks' shards make up."""
    needed: dict[str, tuple[int, ...]] = {}
    for parts in all_parts:
        for name, (shard, shape) in parts.items():
            known = needed[name][shard.dim] if name in needed else 0
            needed[name] = (*shape[: shard.dim], max(shard.last, known), *shape[shard.dim + 1 :])
    return [
        f"{name}: needs shape {shape}, has {tuple(shapes[name].shape)}"
        for name, shape in needed.items()
        if tuple(shapes[name].shape) != shape
    ]


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Meta tensors of the same shapes and dtypes."""
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}


def _send(transport: Transport, tensors: Mapping[str, Tensor], dst: int) -> None:
    for tensor in tensors.values():
        transport.isend(tensor, dst).wait()


def _received(transport: Transport, shapes: Mapping[str, Tensor], src: int) -> Iterator[tuple[str, Tensor]]:
    for name, like in shapes.items():
        tensor = torch.empty(like.shape, dtype=like.dtype)
        transport.irecv(tensor, src).wait()
        yield name, tensor
