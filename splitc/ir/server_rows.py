"""Which parameters servers can hold, and which rows each one does: every bucket is spread evenly over them, by size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import fx

from splitc.ir.graph import tensors_of_node
from splitc.ir.layers import StateTensor
from splitc.ir.program import Program
from splitc.runtime.collectives import parameter_server


@dataclass(frozen=True)
class Piece(parameter_server.Piece):
    """Rows `first` to `last` of a parameter, along its first dim, which `server` holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def pushable(program: Program) -> frozenset[str]:
    """The parameters whose gradients can go to servers: with elements, and reached by the loss.

    The loss reaches a parameter along values that require a gradient.  In one process `.grad` of another one stays None
    and the optimizer passes it over, with its weight decay too.  A server cannot tell that from gradients of zero; so
    such a parameter stays with the workers, where it never changes.
    """
    return frozenset(name for name, tensor in program.tensors.items() if tensor.trainable and tensor.numel)


def read_by(program: Program, node: fx.Node) -> frozenset[str]:
    """First names of the parameters and buffers of a module that a node calls, and of all that is an argument of it."""
    held = [n for n in node.all_input_nodes if n.op == "get_attr"] + [node] * (node.op == "call_module")
    return frozenset(name for each in held for name in tensors_of_node(program, each))


def pieces(program: Program, bucket: Sequence[str], servers: Sequence[int]) -> list[Piece]:
    """The pieces of a bucket, in its order.

    The bucket's bytes, one parameter after the other, are cut into as many equal ranges as there are servers; a row
    belongs to the range that its middle lies in.
    """
    return list(_pieces(tuple(program.tensors[name] for name in bucket), tuple(servers)))


@lru_cache(maxsize=1024)
def _pieces(holdings: tuple[StateTensor, ...], servers: tuple[int, ...]) -> tuple[Piece, ...]:
    total, parts = sum(holding.nbytes for holding in holdings), len(servers)
    found: list[Piece] = []
    before = 0
    for holding in holdings:
        rows = holding.shape[0] if holding.shape else 1
        row = max(holding.nbytes // max(rows, 1), 1)
        # Row k's middle lies in range s or a later one from the first k on for which
        # before + (k + 1/2) row >= total s / parts
        starts = [-((-2 * total * s + (2 * before + row) * parts) // (2 * row * parts)) for s in range(parts)]
        bounds = [0, *(min(max(start, 0), rows) for start in starts[1:]), rows]
        for server, (first, last) in zip(servers, pairwise(bounds), strict=True):
            if first < last:
                shape = (last - first, *holding.shape[1:]) if holding.shape else ()
                nbytes = math.prod(shape) * holding.dtype.itemsize
                found.append(Piece(holding.name, server, first, last, nbytes, shape, holding.dtype))
        before += holding.nbytes
    return tuple(found)
