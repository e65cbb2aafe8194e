"""The numbers of one division: how each layer can run in its roles, and what moving each value takes.

    replicated         on a rank's own examples, or alike on all ranks of a group; gradients all-reduced
    late multiply      its inputs and output errors are gathered, and every rank multiplies those of all
    columns, rows      divided over a group: by output features, or by input features with a sum after it

What `runtime/collectives/layouts.py` moves is priced as it says there; of microbatches each transfer once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from splitc.cost_models.simulation.prices import UPDATE
from splitc.ir.program import Program
from splitc.ir.transitions import Collective
from splitc.passes.bucket_gradients import BucketGradients
from splitc.passes.planner.cuts import Crossing, CutRules
from splitc.passes.planner.dividing import Divisible, rows_of
from splitc.passes.planner.divisions import Busiest, Division, busiest
from splitc.passes.planner.moves import Lines, Moves
from splitc.passes.planner.problem import Option, Place, Problem, Value, places
from splitc.passes.planner.request import Request
from splitc.passes.planner.syncs import syncs

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
    options, same = dict[str, tuple[Option, ...]](), dict[tuple[int, ...], tuple[Option, ...]]()
    for name in (layer.name for layer in program.layers):
        allowed = tuple(o for each in known for o in each[name] if space.allows(division, name, o))
        options[name] = same.setdefault(tuple(map(id, allowed)), allowed)
    lines = Lines(request, division)
    own = len(set(division.classes)) == count
    hybrid = count == 2 and len(division.roles[1].ranks) < len(division.roles[0].ranks) and not own
    return Problem(
        options=options,
        values=tuple(_value(request, lines, options, value, space) for value in rules.crossings),
        parameters=frozenset(name for name, held in request.held.items() if any(h.parameter for h in held)),
        order=rules.order,
        together=tuple(rules.together) if count > 1 else (),
        tied=tuple(pair for pair in rules.together if _share(program, pair)) if not own or count == 1 else (),
        ranks=division.classes,
        memory=request.memory_of(division.busy),
        filled=frozenset(range(count)) if count > 1 and (own or hybrid) else frozenset(),
        wanted=space.wanted or (_IN_GROUPS if division.roles[-1].group > 1 and not own else ()),
        pieces=division.order.pieces,
        accumulate=request.accumulate,
    )


def _share(program: Program, pair: tuple[str, str]) -> bool:
    first, second = (set(program.layer(layer).tensors) for layer in pair)
    return not first.isdisjoint(second)


# -- layers ------------------------------------------------------------------------------------------------------------


def role_options(request: Request, rules: CutRules, division: Division, role: int) -> dict[str, tuple[Option, ...]]:
    """Layer -> the ways to run it in a role; kept, since many divisions have the same role."""
    key = role, division.roles[role], len(division.roles), division.order, division.busy
    if key not in request.options:
        kinds, alike = busiest(request, division.roles[role], division.busy), request.alike
        firsts = dict.fromkeys(alike.values())
        known = {layer: tuple(_options(request, division, role, layer, kinds)) for layer in firsts}
        elsewhere = rules.reader_only if role else ()
        request.options[key] = {layer: () if layer in elsewhere else known[alike[layer]] for layer in alike}
    return request.options[key]


def _options(
    request: Request, division: Division, role: int, layer: str, kinds: tuple[Busiest, ...]
) -> Iterator[Option]:
    """Yield the ways to run a layer in a role, whose ranks are of these kinds."""
    r, trains = division.roles[role], request.gradient_of(layer) > 0
    n, k = len(r.ranks), r.group
    gradient = request.gradient(layer)
    rates = (each.device.memory_bandwidth * each.device.efficiency_of("memory") for each in kinds)
    by_rows = trains and layer in request.sparse and (n > 1 or (request.shares(layer) and len(division.roles) > 1))
    updated = min(gradient, request.rows_nbytes(layer, r.bounds[-1])) if layer in request.sparse else gradient
    updating = UPDATE * updated / min(rates) if not division.classes[role] else 0.0  # under the backward of role 0
    own = slowest_of(times_of(request, division, role, layer, kinds))
    summed = trains and n > 1

    def memory(members: int, shards: int = 1, summed: bool = True, more: float = 0.0) -> float:
        lives = ((each.scale, division.live(role, members * each.batch)) for each in kinds)
        return max(scale * (request.layer_memory(layer, live, summed) / shards + more) for scale, live in lives)

    if not by_rows:
        yield Option(
            role, "replicated", None, "batch" if k > 1 else None, "all_reduce" if summed else "none",
            "batch", "batch", "batch", None, *own,
            syncing=_sync_seconds(request, gradient, r.ranks),
            updating=updating, memory=memory(1, 1, summed),
        )  # fmt: skip
    if k == 1 or by_rows:
        for sync in syncs() if summed and k == 1 else ():
            for option in sync.options(request, division, role, layer, partial(memory, 1, 1, False)):
                yield replace(option, updating=updating)
        return
    alike = slowest_of(times_of(request, division, role, layer, kinds, k))
    copies = len(r.groups) > 1
    synced = "all_reduce" if trains and copies else "none"
    syncing = _sync_seconds(request, gradient, *r.replicas)
    yield Option(
        role, "replicated", None, None, synced, "replicate", "replicate", "replicate", -1, *alike,
        syncing=syncing, updating=updating, memory=memory(k, 1, copies),
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
                syncing=syncing, updating=updating / k, memory=memory(k, k, copies),
            )  # fmt: skip


def _sync_seconds(request: Request, nbytes: float, *groups: tuple[int, ...]) -> float:
    """All-reducing a gradient over each of `groups`, in a bucket with others whose latency it shares."""
    if len(groups[0]) == 1 or not nbytes:
        return 0.0
    latency = request.all_reduce_seconds(0.0, *groups)
    return request.all_reduce_seconds(nbytes, *groups) - latency * max(0.0, 1 - nbytes / BucketGradients.nbytes)


def times_of(
    request: Request, division: Division, role: int, layer: str, kinds: tuple[Busiest, ...], members: int = 1
) -> list[tuple[float, float]]:
    """Forward and backward seconds of a step on each kind, in pieces.  members: whose examples a rank computes."""
    found = []
    for each in kinds:
        batch = members * each.batch
        piece = -(-batch // min(division.pieces(role), max(batch, 1)))
        forward, backward = request.times_on(each.device, layer, piece)
        found.append((forward * batch / piece, backward * batch / piece))
    return found


def slowest_of(times: list[tuple[float, float]]) -> tuple[float, float]:
    return max(forward for forward, _ in times), max(backward for _, backward in times)


def _results(
    request: Request, division: Division, role: int, kind: Divisible, split: str
) -> Iterator[tuple[str | None, str, str, float, float]]:
    """Yield (state of the placement, of what joins, that it makes, seconds there, and back) of a divided layer."""
    moves, reads = Moves(request, division, role, kind.outputs[0].dtype), next(iter(kind.splits.values()))[1]
    nbytes = sum(spec.nbytes(division.roles[role].group * division.roles[role].batch) for spec in kind.outputs)
    numbers = (4 * kind.sums * rows_of(spec) * moves.examples for spec in kind.outputs)
    summing = sum(moves.price(Collective.ALL_REDUCE, each) for each in numbers) if kind.sums else 0.0
    by_features = split == "columns" or reads == "features"

    def kept(state: str | None, makes: str, more: float = 0.0) -> tuple[str | None, str, str, float, float]:
        there, back = moves.seconds(nbytes, True, "features" if by_features else "partial", makes)
        return state, makes, makes, there + more, back

    if by_features:
        yield kept(None, "features", summing) if kind.features else kept(None, "replicate")
        if reads != "features" and not kind.is_loss:
            yield from (kept(state, state) for state in ("replicate", "batch"))
        return
    yield from (kept(None, "replicate"), kept("batch", "batch"))
    if kind.features:
        yield kept("features", "features", summing)


# -- values ------------------------------------------------------------------------------------------------------------


def _value(
    request: Request, lines: Lines, options: Mapping[str, tuple[Option, ...]], value: Crossing, space: Space
) -> Value:
    maker = None if value.layer is None else options[value.layer]
    readers = tuple((reader, _how(request, reader, value)) for reader in value.readers)
    like = id(maker), tuple((id(options[reader]), how) for reader, how in readers), value.spec, value.gradient
    if like not in lines.known:
        made = ((0, "batch"),) if maker is None else places(maker)
        needs = {need: None for reader, how in readers for need in places(options[reader], how)}
        pairs = tuple((s, t) for s in made for t in needs if s[0] <= t[0] and space.moves(s, t))
        lines.known[like] = lines.moves(value, pairs)
    return Value(value.name, value.layer, readers, lines.known[like])


def _how(request: Request, reader: str, value: Crossing) -> str:
    """How a layer reads a value, see `Value`."""
    kind = request.dividing.get(reader)
    if kind is None or value.name in kind.mains:
        return "reads"
    return "joins" if value.spec.dtype.is_floating_point and len(value.spec.shape) > 1 else "whole"
