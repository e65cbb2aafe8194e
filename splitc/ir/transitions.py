"""The nodes that bring a value from one state to another inside a group of ranks, each defined once.

`splitc.runtime.collectives.layouts` has the states and what moves between them; here are the nodes, under the names
that the papers gave to some.  Printer, wire, prices, checks and codegen read this table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from splitc.runtime.collectives.layouts import Extents, Move, State, Transition
from splitc.runtime.transport.collective import Collective as Collective


def modulo(value: torch.Tensor, *, partial: bool = True, dim: int = 0, rows: int = 1) -> torch.Tensor:
    """Gather the examples of every rank of the group (SplitBrain 3, L_M).

    partial: the readers compute parts of what follows, so the ranks' gradients are terms of a sum and backward is a
    reduce-scatter; else all ranks have the same gradient and slice it.
    dim, rows: the batch dimension, and how many rows of it one example has.
    """
    return value


def slice_batch(value: torch.Tensor, *, partial: bool = False, dim: int = 0, rows: int = 1) -> torch.Tensor:
    """Slice this rank's examples out of those of its group; backward gathers the gradients of the group.

    partial: the value's gradient is a sum of terms, so backward pads this rank's with zeros.
    """
    return value


def shard(value: torch.Tensor, *, features: int, partial: bool = True) -> torch.Tensor:
    """Gather the ranks' slices of the last dim, `features` in all, over the group (SplitBrain 3, L_S).

    partial: as of `modulo`.
    """
    return value


def slice_features(value: torch.Tensor, *, features: int, partial: bool = False) -> torch.Tensor:
    """Slice this rank's features out of the last dim, which all ranks of the group have; partial: as `slice_batch`."""
    return value


def copy_to_group(value: torch.Tensor) -> torch.Tensor:
    """Return `value`; backward all-reduces the gradients of its divided readers over the group."""
    return value


def reduce_from_group(value: torch.Tensor, *, partial: bool = False) -> torch.Tensor:
    """All-reduce the ranks' terms over the group; backward is the identity, or an all-reduce too if `partial`."""
    return value


def reduce_scatter(value: torch.Tensor, *, to: str, features: int = 0, dim: int = 0, rows: int = 1) -> torch.Tensor:
    """Sum the ranks' terms; a rank keeps its examples (to="batch") or features of the sum.  Backward gathers."""
    return value


def all_to_all(value: torch.Tensor, *, to: str, features: int, dim: int = 0, rows: int = 1) -> torch.Tensor:
    """Turn own examples into own features of all the group's examples (to="features"), or back; so does backward."""
    return value


_B, _F, _R, _D, _P = State
_NODES: dict[tuple[State, State], Callable[..., torch.Tensor]] = {
    (_B, _R): modulo,
    (_B, _D): modulo,
    (_F, _R): shard,
    (_F, _D): shard,
    (_R, _D): copy_to_group,
    (_R, _B): slice_batch,
    (_D, _B): slice_batch,
    (_R, _F): slice_features,
    (_D, _F): slice_features,
    (_B, _F): all_to_all,
    (_F, _B): all_to_all,
    (_P, _R): reduce_from_group,
    (_P, _D): reduce_from_group,
    (_P, _B): reduce_scatter,
    (_P, _F): reduce_scatter,
}
"""(from, to) -> its node (LAYOUTS 2)."""

TRANSITIONS = {node: Transition(*ends).move.collective for ends, node in _NODES.items()}
"""The nodes, and what each does on the wire in forward."""

_DEFAULT_PARTIAL = {modulo: True, shard: True, slice_batch: False, slice_features: False, reduce_from_group: False}


def name_of(transition: Transition) -> str:
    """Return the name of a transition's node."""
    return _NODES[transition].__name__


def transition_of(node: fx.Node) -> Transition | None:
    """Return the transition that a node is; None for other nodes."""
    target: Any = node.target
    if target not in TRANSITIONS:
        return None
    partial = node.kwargs.get("partial", _DEFAULT_PARTIAL.get(target))
    for transition in (Transition(*ends) for ends, function in _NODES.items() if function is target):
        if node.kwargs.get("to") in (None, transition.target) and partial in (None, State.DIVIDED in transition):
            return transition
    raise AssertionError(f"{node.name} is no transition: {node.kwargs}")


def options_of(
    transition: Transition, features: int, dim: int, rows: int
) -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
    """Return the node of a transition and its keyword arguments, those that are not defaults."""
    function = _NODES[transition]
    options: dict[str, Any] = {}
    if function in (reduce_scatter, all_to_all):
        options["to"] = str(transition.target)
    if State.FEATURES in transition:
        options["features"] = features
    if function in _DEFAULT_PARTIAL and (partial := State.DIVIDED in transition) != _DEFAULT_PARTIAL[function]:
        options["partial"] = partial
    if State.BATCH in transition:
        options |= ({"dim": dim} if dim else {}) | ({"rows": rows} if rows != 1 else {})
    return function, options


def nbytes_sent(transition: Transition, nbytes: float, extents: Extents, index: int) -> float:
    """Return the payload bytes that a rank sends of a value of `nbytes` in all (LAYOUTS 2)."""
    _, sizes = extents.sizes(transition.by_examples)
    own = nbytes * sizes[index] / max(sum(sizes), 1) if sizes else nbytes
    if transition.move is Move.EXCHANGE:
        _, others = extents.sizes(not transition.by_examples)
        return own - own * others[index] / max(sum(others), 1)
    return transition.move.collective.sent(nbytes, own, max(len(extents.rows), len(extents.widths)))


def numbers_sent(transition: Transition, numel: int, extents: Extents, index: int) -> list[int]:
    """Return how many numbers each message has that a rank sends of a value of `numel` in all, but for a sum."""
    _, sizes = extents.sizes(transition.by_examples)
    others = extents.sizes(not transition.by_examples)[1] if transition.move is Move.EXCHANGE else sizes
    own = numel * sizes[index] // max(sum(sizes), 1)
    if transition.move is Move.GATHER:
        return [own] * (len(sizes) - 1)
    whole = own if transition.move is Move.EXCHANGE else numel
    return [whole * part // max(sum(others), 1) for k, part in enumerate(others) if k != index]
