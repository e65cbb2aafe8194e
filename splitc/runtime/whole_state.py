"""A whole model's state across ranks: gather it from the ranks that hold its parts, broadcast it, scatter it.

Tensors travel one by one, so a rank needs memory for what it sends or receives and for one more tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .errors import LaunchError, bullets
from .memory_format import shaped
from .spec import Shard
from .transport.base import Transport
from .weights import part_of

Result = TypeVar("Result")

Holders = dict[str, dict[Shard | None, tuple[int, ...]]]
"""Tensor -> shard, or None for the whole -> the ranks that hold it, the lowest first."""


Room = Callable[[dict[str, Tensor]], Any]
Parts = Mapping[str, tuple[Tensor, Shard | None]]
"""The tensors that a rank holds, as meta tensors, and of which part of the whole each is."""


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


def in_memory(likes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without values on the CPU; what is one tensor in `likes` stays one."""
    made = {like: torch.empty_like(like, device="cpu") for like in likes.values()}
    return {name: made[like] for name, like in likes.items()}


def gather_state(transport: Transport, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard], room: Room) -> Any:
    """Gather all ranks' `tensors` by name, as copies on rank 0's CPU; returns None on the others.  Collective.

    shards: tensor -> the part of it that this rank contributes.  Where several ranks contribute the same, the lowest
    one's is taken.  room: gives, for meta tensors of the wholes, those to copy the parts into.
    Raises LaunchError, on every rank, where that fails.
    """
    likes = {name: (like, shards.get(name)) for name, like in _shapes(tensors).items()}
    tables: list[Parts] = transport.gather_objects(likes) or []
    made: Any = attempted(transport, "the state was not gathered", lambda: room(wholes(tables)) if tables else None)
    for rank, table in reversed(list(enumerate(tables))):
        received = _received(transport, {name: like for name, (like, _) in table.items()}, rank)
        for name, tensor in tensors.items() if rank == transport.rank else received:
            part_of(made[name], table[name][1]).copy_(tensor.detach())
    if not tables:
        _send(transport, tensors, 0)
    return made


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
    own, shards, state = stage.state_dict(keep_vars=True), shards or {}, None if transport.rank else state
    likes = {name: (like, shards.get(name)) for name, like in _shapes(own).items()}
    held = wholes(transport.gather_objects(likes) or ())

    def misfits() -> Iterator[str]:
        if state is None:
            raise LaunchError("rank 0 must give the state")
        for name, whole in held.items():
            if name in state and state[name].shape != whole.shape:
                yield f"{name}: needs shape {tuple(whole.shape)}, has {tuple(state[name].shape)}"
        yield from (f"{key}: missing" for key in keys if key not in state)
        yield from (f"{key}: the model has no such key" for key in state if key not in set(keys))

    title = "the state_dict does not fit the model, and nothing was loaded"
    attempt(transport, title, lambda: None if transport.rank else misfits())
    shapes = transport.broadcast_object(None if state is None else _shapes(state))
    with torch.no_grad():
        for name, like in shapes.items():
            tensor = torch.empty_like(like, device=transport.device) if state is None else state[name]
            transport.broadcast(tensor, 0, tuple(range(transport.world))).wait()
            if name in own:
                own[name].copy_(part_of(tensor, shards.get(name)))
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in (state or {}).items() if name not in held}


def attempt(transport: Transport, title: str | Callable[[], str], call: Callable[[], Iterable[str] | None]) -> None:
    """Call `call`, and raise LaunchError on every rank if it raises on one, or returns problems.  Collective."""
    try:
        problems = list(call() or ())
    except Exception as error:
        problems = [f"rank {transport.rank}: {type(error).__name__}: {error}"]
    if lines := [line for own in transport.all_gather_objects(problems) for line in own]:
        raise LaunchError(bullets(f"{title if isinstance(title, str) else title()}:", lines))


def attempted(transport: Transport, title: str | Callable[[], str], call: Callable[[], Result]) -> Result:
    """What `call` returns; raises LaunchError on every rank if it raises on one.  Collective."""
    made: list[Result] = []
    attempt(transport, title, lambda: made.append(call()))
    return made[0]


def scatter_state(transport: Transport, parts: Sequence[Mapping[str, Tensor]] | None) -> dict[str, Tensor]:
    """Return to every rank its own of rank 0's `parts`, tensors by name; the others pass None.  Collective."""
    shapes = transport.broadcast_object(None if parts is None else [_shapes(part) for part in parts])
    if parts is None:
        return dict(_received(transport, shapes[transport.rank], 0))
    for rank, part in enumerate(parts):
        if rank != transport.rank:
            _send(transport, part, rank)
    return dict(parts[transport.rank])


def wholes(tables: Iterable[Parts]) -> dict[str, Tensor]:
    """The tensors that the parts of all ranks make up, as meta tensors."""
    found: dict[str, Tensor] = {}
    for name, (like, shard) in (each for table in tables for each in table.items()):
        known = found.get(name)
        if shard is None or not like.dim():
            found[name] = like
        elif known is None or (known.dim() and known.size(shard.dim) < shard.last):
            shape = [*like.shape[: shard.dim], shard.last, *like.shape[shard.dim + 1 :]]
            found[name] = shaped(like.new_empty(math.prod(shape)), like, shape).requires_grad_(like.requires_grad)
    return found


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Meta tensors of the same shapes, dtypes and memory formats."""
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}


def _send(transport: Transport, tensors: Mapping[str, Tensor], dst: int) -> None:
    for tensor in tensors.values():
        transport.isend(tensor, dst).wait()


def _received(transport: Transport, shapes: Mapping[str, Tensor], src: int) -> Iterator[tuple[str, Tensor]]:
    for name, like in shapes.items():
        tensor = torch.empty_like(like, device="cpu")
        transport.irecv(tensor, src).wait()
        yield name, tensor
