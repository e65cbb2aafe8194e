"""The numbers of one division: how each layer can run in its roles, and what moving each value takes.

    replicated         on a rank's own examples, or alike on all ranks of a group; gradients all-reduced
    late multiply      its inputs and output errors are gathered, and every rank multiplies those of all
    columns, rows      divided over a group: by output features, or by input features with a sum after it

What `runtime/collectives/layouts.py` moves is priced as it says there; of microbatches each transfer once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from splitc.ir.graph import tensor_spec
from splitc.ir.program import Program
from splitc.passes.bucket_gradients import BucketGradients
from splitc.passes.planner.cuts import Crossing, CutRules
from splitc.passes.planner.dividing import Divisible, rows_of
from splitc.passes.planner.divisions import Division, Role
from splitc.passes.planner.moves import Lines, Moves
from splitc.passes.planner.problem import Option, Place, Problem, Value, places
from splitc.passes.planner.request import Request

_IN_GROUPS = (("reads", frozenset({"replicate", "divided", "features"})),)
"""What tells groups on the ranks of the reader from that role alone."""


@dataclass(frozen=True)
class Space:
    """What a strategy allows: options of a layer, moves of values, and what some layer must have (see `Problem`)."""

    allows: Callable[[Division, str, Option], bool]
    moves: Callable[[Place, Place], bool] = lambda start, end: True
    wanted: tuple[tuple[str, frozenset[str]], ...] = ()


def make_problem(request: Request, rules: CutRules, division: Division, space: Space) -> Problem:
    """The numbers of a division, of what `space` allows."""
    program, count = request.program, len(division.roles)
    known = [role_options(request, rules, division, role) for role in range(count)]
    options = {
        layer.name: tuple(
            option for each in known for option in each[layer.name] if space.allows(division, layer.name, option)
        )
        for layer in program.layers
    }
    lines = Lines(request, division)
    own = len(set(division.classes)) == count
    hybrid = count == 2 and len(division.roles[1].ranks) < len(division.roles[0].ranks) and not own
    return Problem(
        options=options,
        values=tuple(_value(request, lines, options, value, space) for value in rules.crossings),
        parameters=frozenset(name for name, held in request.held.items() if any(h.parameter for h in held)),
        order=rules.order,
        together=tuple(rules.together) if count > 1 else (),
        tied=tuple(pair for pair in rules.together if _share(program, pair)) if not own else (),
        ranks=division.classes,
        memory=request.memory_of(division.busy),
        filled=frozenset(range(count)) if count > 1 and (own or hybrid) else frozenset(),
        wanted=space.wanted or (_IN_GROUPS if division.roles[-1].group > 1 and not own else ()),
        microbatches=division.microbatches,
    )


def _share(program: Program, pair: tuple[str, str]) -> bool:
    first, second = (set(program.layer(layer).tensors) for layer in pair)
    return not first.isdisjoint(second)


# -- layers ------------------------------------------------------------------------------------------------------------


def role_options(request: Request, rules: CutRules, division: Division, role: int) -> dict[str, tuple[Option, ...]]:
    """Layer -> the ways to run it in a role; kept, since many divisions have the same role."""
    key = role, division.roles[role], len(division.roles), division.microbatches, division.schedule, division.busy
    if key not in request.options:
        request.options[key] = {
            layer.name: tuple(_options(request, rules, division, role, layer.name)) for layer in request.program.layers
        }
    return request.options[key]


def _options(request: Request, rules: CutRules, division: Division, role: int, layer: str) -> Iterator[Option]:
    """Yield the ways to run a layer in a role."""
    if role and layer in rules.reader_only:
        return
    r, trains = division.roles[role], request.gradient_of(layer) > 0
    n, k = len(r.ranks), r.group
    gradient = request.gradient(layer)
    own = _times(request, division, role, layer, r.batch)
    summed = trains and n > 1

    def memory(batch: int, shards: int = 1, summed: bool = True) -> float:
        return request.layer_memory(layer, division.live(role, batch), summed) / shards

    yield Option(
        role, "replicated", None, "batch" if k > 1 else None, "all_reduce" if summed else "none",
        "batch", "batch", "batch", None, *own,
        syncing=_sync_seconds(request, gradient, r.ranks),
        memory=memory(r.batch, 1, summed),
    )  # fmt: skip
    if k == 1:
        if summed and layer in request.linears and (role == 0 or division.microbatches == 1):
            yield _late(request, r, role, layer, own, memory(r.batch, 1, False))
        return
    of_group = k * r.batch
    alike = _times(request, division, role, layer, of_group)
    copies = len(r.groups) > 1
    synced = "all_reduce" if trains and copies else "none"
    syncing = _sync_seconds(request, gradient, *r.replicas)
    yield Option(
        role, "replicated", None, None, synced, "replicate", "replicate", "replicate", None, *alike,
        syncing=syncing, memory=memory(of_group, 1, copies),
    )  # fmt: skip
    kind = request.dividing.get(layer)
    if kind is None or not trains or layer == request.program.in_batch:
        return
    part = alike[0] / k, alike[1] / k
    syncing = _sync_seconds(request, gradient / k, *r.replicas)
    for split, (dim, reads) in kind.splits.items():
        for state, joins, makes, there, back in _results(request, division, role, kind, split):
            yield Option(
                role, "sharded", split, state, synced, reads, joins, makes, dim, *part, there, back,
                syncing=syncing, memory=memory(of_group, k, copies),
            )  # fmt: skip


def _sync_seconds(request: Request, nbytes: float, *groups: tuple[int, ...]) -> float:
    """All-reducing a gradient over each of `groups`, in a bucket with others whose latency it shares."""
    if len(groups[0]) == 1 or not nbytes:
        return 0.0
    latency = request.all_reduce_seconds(0.0, *groups)
    return request.all_reduce_seconds(nbytes, *groups) - latency * max(0.0, 1 - nbytes / BucketGradients.nbytes)


def _late(request: Request, r: Role, role: int, layer: str, own: tuple[float, float], memory: float) -> Option:
    """Late multiply: inputs X and errors E are gathered, and each rank computes W' = E^T X of all (Lessons 2.1)."""
    n = len(r.ranks)
    uses = request.linears[layer]
    gathered = sum(spec.nbytes(r.batch) for use in uses for spec in (tensor_spec(use.value), tensor_spec(use.node)))
    return Option(
        role, sync="late_multiply", forward=own[0], backward=own[1] + (n - 1) / 3 * sum(own),
        syncing=request.accumulate * request.all_gather_seconds(n * gathered, r.ranks), memory=memory + n * gathered,
    )  # fmt: skip


def _times(request: Request, division: Division, role: int, layer: str, batch: int) -> tuple[float, float]:
    """Forward and backward seconds of a step of `batch` examples, in pieces."""
    pieces = min(division.pieces(role), max(batch, 1))
    forward, backward = request.times(layer, -(-batch // pieces), division.busy)
    return forward * batch / -(-batch // pieces), backward * batch / -(-batch // pieces)


def _results(
    request: Request, division: Division, role: int, kind: Divisible, split: str
) -> Iterator[tuple[str | None, str, str, float, float]]:
    """Yield (state of the placement, of what joins, that it makes, seconds there, and back) of a divided layer."""
    moves = Moves(request, division, role)
    nbytes = sum(spec.nbytes(division.roles[role].group * division.roles[role].batch) for spec in kind.outputs)
    summing = sum(moves.all_reduce(3 * 4 * rows_of(spec) * moves.examples) for spec in kind.outputs)
    if split == "columns" or next(iter(kind.splits.values()))[1] == "features":
        if kind.features:
            yield None, "features", "features", summing if kind.classes else 0.0, 0.0
        else:
            yield None, "replicate", "replicate", moves.gather(nbytes), 0.0
        if next(iter(kind.splits.values()))[1] != "features":
            yield "replicate", "replicate", "replicate", moves.gather(nbytes), 0.0
            yield "batch", "batch", "batch", moves.swap(nbytes), moves.swap(nbytes)
        return
    yield None, "replicate", "replicate", moves.all_reduce(nbytes), 0.0
    yield "batch", "batch", "batch", moves.scatter(nbytes), moves.gather(nbytes)
    if kind.features:
        more = summing if kind.classes else 0.0
        yield "features", "features", "features", moves.scatter(nbytes) + more, moves.gather(nbytes)


# -- values ------------------------------------------------------------------------------------------------------------


def _value(
    request: Request, lines: Lines, options: Mapping[str, tuple[Option, ...]], value: Crossing, space: Space
) -> Value:
    made = ((0, "batch"),) if value.layer is None else places(options[value.layer])
    readers = tuple((reader, _how(request, reader, value)) for reader in value.readers)
    needs = {need: None for reader, how in readers for need in places(options[reader], how)}
    moves = {(s, t): lines.move(value, s, t) for s in made for t in needs if s[0] <= t[0] and space.moves(s, t)}
    return Value(value.name, value.layer, readers, moves)


def _how(request: Request, reader: str, value: Crossing) -> str:
    """How a layer reads a value, see `Value`."""
    kind = request.dividing.get(reader)
    if kind is None or value.name in kind.mains:
        return "reads"
    return "joins" if value.spec.dtype.is_floating_point and len(value.spec.shape) > 1 else "whole"
