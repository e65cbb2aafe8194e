"""A whole model's state across ranks: gathered from those that hold its parts, and handed out to them.

Tensors travel one by one: no rank needs memory for more than what it gives or gets, besides one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .errors import LaunchError
from .transport.base import Transport
from .weights import misfits, part_of

Share = tuple[int, int, int]
"""The part of a tensor that a rank holds: dim, first, one past the last."""


def agree(transport: Transport, own: Mapping[str, Share | None]) -> dict[str, dict[Share | None, tuple[int, ...]]]:
    """Tell all ranks which tensors this one holds, and which parts of them (None: the whole).  Collective.

    Returns tensor -> part -> the ranks that hold it, the lowest first.
    """
    everyones = transport.gather_objects(dict(own))
    found: dict[str, dict[Share | None, tuple[int, ...]]] = {}
    for rank, held in enumerate(everyones or ()):
        for name, share in held.items():
            parts = found.setdefault(name, {})
            parts[share] = (*parts.get(share, ()), rank)
    table: dict[str, dict[Share | None, tuple[int, ...]]] = transport.broadcast_object(found)
    return table


def gather_state(
    transport: Transport, own: Mapping[str, Tensor], shares: Mapping[str, Share] | None = None
) -> dict[str, Tensor] | None:
    """The tensors that the ranks give, by name, as copies on rank 0's CPU; None on the others.  Collective.

    shares: of which tensors this rank gives a part only; the parts are put together.  Where several ranks give one
    name, the lowest one's counts.
    """
    mine = {name: share for name, share in (shares or {}).items() if name in own}
    offers = transport.gather_objects(({} if transport.rank == 0 else _shapes(own), mine))
    if offers is None:
        _send(transport, own, 0)
        return None
    whole: dict[str, Tensor] = {}
    parts: dict[str, dict[Share, Tensor]] = {}
    for rank, (offer, theirs) in enumerate(offers):
        here = ((n, t.detach().to("cpu", copy=True)) for n, t in own.items())
        for name, tensor in here if rank == transport.rank else _received(transport, offer, rank):
            if name in theirs:
                parts.setdefault(name, {}).setdefault(theirs[name], tensor)
            else:
                whole.setdefault(name, tensor)
    return {**whole, **{name: _joined(pieces) for name, pieces in parts.items()}}


def _joined(pieces: Mapping[Share, Tensor]) -> Tensor:
    """A tensor of its parts along one dim."""
    ordered = sorted(pieces, key=lambda share: share[1:])
    return torch.cat([pieces[share] for share in ordered], dim=ordered[0][0])


def spread_state(
    transport: Transport,
    stage: nn.Module,
    state: Mapping[str, Tensor] | None,
    keys: Iterable[str],
    shares: Mapping[str, Share] | None = None,
) -> dict[str, Tensor]:
    """Overwrite every rank's parameters and persistent buffers by rank 0's `state`; others' is ignored.  Collective.

    keys: on rank 0, those that the state must have, no more and no fewer.  shares: of which tensors this rank holds a
    part only.
    Returns, on rank 0, copies of what no rank holds.  Raises LaunchError, on every rank alike and before anything is
    changed, when the state does not fit.
    """
    own, shares = stage.state_dict(keep_vars=True), shares or {}
    if transport.rank != 0:
        state = None
    given: dict[str, Tensor] | None = transport.broadcast_object(None if state is None else _shapes(state))
    if given is None:
        raise LaunchError("load_state_dict: rank 0 must give the state")
    problems = misfits({n: t for n, t in own.items() if n in given and n not in shares}, given)
    if state is not None:
        problems += [f"{key}: missing" for key in keys if key not in state]
        problems += [f"{key}: the model has no such key" for key in state if key not in set(keys)]
    parts = {name: (share, tuple(own[name].shape)) for name, share in shares.items() if name in given}
    everyones = transport.gather_objects((problems, list(own), parts))
    if everyones is not None:
        problems = list(dict.fromkeys(problem for found, _, _ in everyones for problem in found))
        problems += _unlike([held for _, _, held in everyones], given)
    if problems := transport.broadcast_object(problems):
        text = "the state_dict does not fit the model, and nothing was loaded:"
        raise LaunchError("\n".join([text, *(f"  - {problem}" for problem in problems)]))
    with torch.no_grad():
        for name, like in given.items():
            tensor = (
                torch.empty(like.shape, dtype=like.dtype, device=transport.device) if state is None else state[name]
            )
            transport.broadcast(tensor, 0, tuple(range(transport.world))).wait()
            if name in own:
                own[name].copy_(part_of(tensor, shares.get(name)))
    if state is None or everyones is None:
        return {}
    held = {name for _, names, _ in everyones for name in names}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items() if name not in held}


def hand_out(transport: Transport, parts: Sequence[Mapping[str, Tensor]] | None) -> dict[str, Tensor]:
    """Give every rank its own of rank 0's `parts`, tensors by name; the others pass None.  Collective."""
    offer = transport.scatter_objects(None if parts is None else [_shapes(part) for part in parts])
    if parts is None:
        return dict(_received(transport, offer, 0))
    for rank, part in enumerate(parts):
        if rank != transport.rank:
            _send(transport, part, rank)
    return dict(parts[transport.rank])


def _unlike(everyones: Iterable[Mapping[str, tuple[Share, tuple[int, ...]]]], given: Mapping[str, Tensor]) -> list[str]:
    """A line for each tensor that has another shape than that which the ranks' parts, share and shape, make up."""
    needed: dict[str, tuple[int, ...]] = {}
    for parts in everyones:
        for name, ((dim, _, last), shape) in parts.items():
            known = needed[name][dim] if name in needed else 0
            needed[name] = (*shape[:dim], max(last, known), *shape[dim + 1 :])
    return [
        f"{name}: needs shape {shape}, has {tuple(given[name].shape)}"
        for name, shape in needed.items()
        if tuple(given[name].shape) != shape
    ]


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without their values."""
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}


def _send(transport: Transport, tensors: Mapping[str, Tensor], dst: int) -> None:
    for tensor in tensors.values():
        transport.isend(tensor, dst).wait()


def _received(transport: Transport, offer: Mapping[str, Tensor], src: int) -> Iterator[tuple[str, Tensor]]:
    for name, like in offer.items():
        tensor = torch.empty(like.shape, dtype=like.dtype)
        transport.irecv(tensor, src).wait()
        yield name, tensor
