"""A whole model's state across ranks: gathered from those that hold its parts, and handed out to them.

Tensors travel one by one: no rank needs memory for more than what it gives or gets, besides one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .errors import LaunchError
from .transport import Transport
from .weights import misfits


def gather_state(transport: Transport, own: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The tensors that the ranks give, by name, as copies on rank 0's CPU; None on the others.  Collective.

    Where several ranks give one name, the lowest one's counts.
    """
    offers = transport.gather_objects({} if transport.rank == 0 else _shapes(own))
    if offers is None:
        _send(transport, own, 0)
        return None
    whole = {name: tensor.detach().to("cpu", copy=True) for name, tensor in own.items()}
    for rank, offer in enumerate(offers):
        for name, tensor in _received(transport, offer, rank):
            whole.setdefault(name, tensor)
    return whole


def spread_state(
    transport: Transport, stage: nn.Module, state: Mapping[str, Tensor] | None, keys: Iterable[str]
) -> dict[str, Tensor]:
    """Overwrite every rank's parameters and persistent buffers by rank 0's `state`; others' is ignored.  Collective.

    keys: on rank 0, those that the state must have, no more and no fewer.
    Returns, on rank 0, copies of what no rank holds.  Raises LaunchError, on every rank alike and before anything is
    changed, when the state does not fit.
    """
    own = stage.state_dict(keep_vars=True)
    if transport.rank != 0:
        state = None
    given: dict[str, Tensor] | None = transport.broadcast_object(None if state is None else _shapes(state))
    if given is None:
        raise LaunchError("load_state_dict: rank 0 must give the state")
    problems = misfits({name: tensor for name, tensor in own.items() if name in given}, given)
    if state is not None:
        problems += [f"{key}: missing" for key in keys if key not in state]
        problems += [f"{key}: the model has no such key" for key in state if key not in set(keys)]
    everyones = transport.gather_objects((problems, list(own)))
    if everyones is not None:
        problems = list(dict.fromkeys(problem for found, _ in everyones for problem in found))
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
                own[name].copy_(tensor)
    if state is None or everyones is None:
        return {}
    held = {name for _, names in everyones for name in names}
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
