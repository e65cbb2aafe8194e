"""What travels in short formats, and what is asked for of them: a plan's `wire` as options give it, and in a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace

from splitc.errors import PlacementError
from splitc.ir.names import near_name
from splitc.ir.plan import Plan
from splitc.ir.transitions import Collective
from splitc.ir.wire_op import What, WireOp
from splitc.runtime.transport.collective import are_unequal, sum_parts
from splitc.runtime.transport.formats import EXACT, FORMATS, Wire, rounding, sum_format

KINDS = {
    **dict.fromkeys((What.CUT, What.ENTRY, What.NODE), "activations"),
    **dict.fromkeys((What.CUT_GRADIENT, What.ENTRY_GRADIENT, What.NODE_GRADIENT), "errors"),
    **dict.fromkeys((What.BUCKET, What.TIED, What.PUSH), "gradients"),
    What.LATE: "factors",
    What.AVERAGE: "averages",
}
"""What travels -> its kind in a `Wire`; other payloads travel as they are."""


_NAMES = [each.name for each in fields(Wire)]
Given = str | Mapping[str, str] | Wire | None


def parse_wire(given: Given) -> Wire:
    """The formats that `wire=` asks for: "bf16", or by kind, {"errors": "bf16"} or "activations=bf16,gradients=int8".

    Raises PlacementError with all that is wrong.
    """
    asked, problems = _by_kind(given), list[str]()
    for kind, name in asked.items():
        if kind not in _NAMES:
            problems.append(f"there is no kind {kind!r}; {near_name(kind, _NAMES)}there are {', '.join(_NAMES)}")
        if name not in (EXACT, *FORMATS):
            problems.append(f"there is no format {name!r}; there are {EXACT}, {', '.join(FORMATS)}")
    if problems:
        raise PlacementError(f"wire: {'; '.join(dict.fromkeys(problems))}")
    return Wire(**asked)


def free_kinds(error: float | None, given: Given) -> tuple[str, ...]:
    """The kinds whose formats `wire_error=` may choose, which `wire=` leaves out.  Raises PlacementError."""
    if error is None:
        return ()
    if not isinstance(error, int | float) or not 0 < error < 1:
        raise PlacementError(f"wire_error is {error!r}; give the largest relative error of a gradient, such as 1e-2")
    kinds = tuple(kind for kind in _NAMES if kind not in ("averages", *_by_kind(given)))  # exact plans average nothing
    if not kinds:
        raise PlacementError("wire_error: wire gives every kind a format; leave out one of the two, or name kinds")
    return kinds


def _by_kind(given: Given) -> Mapping[str, str]:
    if not (given is None or isinstance(given, str | Mapping | Wire)):
        raise PlacementError(f"wire is {given!r:.60}; give a format, or a table of formats by kind")
    if isinstance(given, str):
        pairs = (part.partition("=") for part in given.split(","))
        return {k.strip(): name.strip() for k, _, name in pairs} if "=" in given else dict.fromkeys(_NAMES, given)
    return asdict(given) if isinstance(given, Wire) else given or {}


def wire_text(wire: Wire) -> str:
    """The formats that are not exact: `bf16`, or `activations in bf16, gradients in int8`."""
    by_kind = {each.name: getattr(wire, each.name) for each in fields(Wire)}
    (first, *more) = dict.fromkeys(by_kind.values())
    if not more:
        return "" if first == EXACT else f"all in {first}"
    return ", ".join(f"{kind} in {name}" for kind, name in by_kind.items() if name != EXACT)


def bound(ops: Iterable[WireOp]) -> float:
    """Return the relative error (L2) of a gradient that these messages explain; 0 where nothing is rounded.

    What rounds gradients, or errors, is of them; what rounds activations flips some ReLUs, in proportion to it, and the
    error goes with the root of how many.
    """
    forms = {(KINDS[op.payload.what], op.form) for op in ops if op.form}
    errors = (4 * rounding(form) ** 0.5 if kind == "activations" else 10 * rounding(form) for kind, form in forms)
    return max(errors, default=0.0)


def carried(plan: Plan, op: WireOp, index: int, sends: Sequence[int] = ()) -> Iterator[WireOp]:
    """Yield a message or collective as a plan lets it travel.

    In a short format a sum has two halves, which in unequal parts are under way together.

    index: of the rank among the op's.  sends: how many numbers each of its messages has, but for a sum.
    """
    numel, is_sum = math.prod(op.shape), op.algorithm == Collective.ALL_REDUCE
    name = EXACT if plan.wire.is_exact else getattr(plan.wire, KINDS[op.payload.what])
    shares = plan.sum_shares if KINDS.get(op.payload.what) == "gradients" else ()
    unequal = is_sum and are_unequal(op.ranks, shares)
    if (form := sum_format(name, op.dtype, numel, unequal)) is None:
        yield op
        return
    if is_sum:
        pieces = sum_parts(numel, op.ranks, shares)
        parts = [sum(map(form.nbytes, part)) for part in zip(*pieces, strict=True)]
        halves = sum(parts) - parts[index], (len(parts) - 1) * parts[index]
        if unequal:
            yield replace(op, form=name.replace(EXACT, ""), sent=sum(halves), shares=shares)
            return
        yield replace(op, algorithm=Collective.REDUCE_SCATTER, form=name, sent=halves[0])
        yield replace(op, algorithm=Collective.ALL_GATHER, form=name, sent=halves[1])
        return
    alone = op.kind != "collective" or op.algorithm == Collective.ALL_TO_ALL  # each message by itself
    nbytes = (form.nbytes(n) if not alone or form.shortens(op.dtype, n) else n * op.dtype.itemsize for n in sends)
    yield replace(op, form=name, sent=sum(nbytes))
