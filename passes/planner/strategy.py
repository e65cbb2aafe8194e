"""What all strategies have in common: their options, their text form, and what the planner asks each of them.

A strategy is a family of plans.  Options left out (None) are chosen by the planner.  The integer program searches its
divisions of the world, in the space of what it allows; a strategy may propose plans of its own beside that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import Field, asdict, dataclass, fields, replace
from importlib import import_module
from typing import Annotated, Any, ClassVar

from splitc.errors import PlacementError
from splitc.ir.decode import Count as Count
from splitc.ir.decode import decode, hints_of, one_of
from splitc.ir.names import near_name
from splitc.ir.placements import ALL_REDUCES, SCHEDULES
from splitc.ir.plan import Plan
from splitc.passes.planner.divisions import Division, all_ranks, group_sizes
from splitc.passes.planner.options import Space
from splitc.passes.planner.order import Order
from splitc.passes.planner.pin_checks import PinWords, contradictions, unmet_in_groups
from splitc.passes.planner.pins import UNPINNED, Pin
from splitc.passes.planner.priced_plan import PricedPlan
from splitc.passes.planner.problem import Option
from splitc.passes.planner.registry import STRATEGIES, name_and_options
from splitc.passes.planner.request import Request

Flag = Annotated[bool, one_of(True, False)]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Base of all strategies.  name: how users write it.  exact: whether it is the same training as in one process.

    is_alone: all is on one rank.
    compared: whether `auto` prices it.  compares: it is the fastest of those.  spans: its space is the whole one, of
    which those of all others are parts.  pins: the words that it knows in pins.
    all_reduce: the algorithm that sums gradients, the "backend"'s own or "recursive_doubling" (Stanza 4.1.2).
    sync_batchnorm: BatchNorm normalises over the whole global batch, as in one process, not over each rank's part.
    microbatches: parts of each reader's batch that go through the ranks one after another, in the order of `schedule`,
    "all_forward" or "1f1b"; 1 and all_forward unless given.

    Raises PlacementError for an option that is not valid.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    compared: ClassVar[bool] = True
    compares: ClassVar[bool] = False
    spans: ClassVar[bool] = False
    is_alone: ClassVar[bool] = False
    pins: ClassVar[PinWords] = PinWords()
    all_reduce: Annotated[str, one_of(*ALL_REDUCES)] | None = None
    sync_batchnorm: Flag | None = None
    microbatches: Count | None = None
    schedule: Annotated[str, one_of(*SCHEDULES)] | None = None

    def __post_init__(self) -> None:
        if problems := decode(hints_of(type(self)), asdict(self))[1]:
            raise PlacementError(f"{self.name}: {'; '.join(map(str, problems))}")

    def __str__(self) -> str:
        options = [f"{f.name}={getattr(self, f.name)}" for f in options_of(self) if getattr(self, f.name) is not None]
        return f"{self.name}({', '.join(options)})" if options else self.name

    @property
    def is_exact(self) -> bool:
        """Whether this plan of it is the same training, with its options."""
        return self.exact

    @property
    def inserts_norm(self) -> bool:
        """Whether the model is normalised where it needs that, before it is captured."""
        return False

    def order(self, usual: Order) -> Order:
        """The order that is asked for; `usual`, where none is."""
        number = self.microbatches or usual.pieces
        schedule = self.schedule if self.microbatches and number > 1 else None
        return Order(number, schedule or usual.schedule)

    def in_order_of(self, other: Strategy) -> Strategy:
        """The strategy in the microbatches that the other one asks for, if any."""
        return in_microbatches(self, other.microbatches)

    # -- its plans -----------------------------------------------------------------------------------------------------

    def proposals(self, request: Request) -> list[PricedPlan]:
        """The plans that no search finds."""
        return []

    def searches(self, by_name: bool) -> Sequence[bool]:
        """For each search of its space, whether it is the narrower one of a user who asked for it by name."""
        return (by_name,)

    def divisions(self, request: Request) -> Iterable[Division]:
        """The divisions of the world that it has."""
        return (all_ranks(request),)

    def space(self, request: Request, by_name: bool) -> Space:
        """What it allows, of what pins leave open."""

        def allows(division: Division, layer: str, option: Option) -> bool:
            pin = request.pins.get(layer, UNPINNED)
            return self.allows(option, pin) and (pin is UNPINNED or _follows(request, division, layer, option, pin))

        return Space(allows)

    def allows(self, option: Option, pin: Pin) -> bool:
        """Whether it has an option, in what no pin asks for."""
        if option.sync not in self.pins.syncs or (option.holding != "replicated" and not self.divides(pin)):
            return False
        return option.state is None or pin.state is not None or pin.group == 1

    def divides(self, pin: Pin) -> bool:
        """Whether it divides a layer with such a pin."""
        return self.pins.divides and pin is not UNPINNED

    def in_unit(self, request: Request) -> Request:
        """The request of the ranks that one of its divisions is of, where these are not all."""
        return request

    def in_world(self, request: Request, plan: Plan, division: Division) -> Plan:
        """The plan of all ranks, of one that has only those of its division."""
        return plan

    # -- why it has none -----------------------------------------------------------------------------------------------

    def impossible(self, request: Request) -> list[str]:
        """Why there is no plan whatever the prices, a line for each reason; none where a search makes sense."""
        dense = "late_multiply" not in self.pins.syncs and request.world > 1 and not self.is_alone
        why = f"the gradients of {', '.join(sorted(request.sparse))} are sparse, and {self.name} sums dense ones; take "
        sparse = [f"{why}late_multiply or auto, or leave out sparse=True"] if dense and request.sparse else []
        return contradictions(request, self.name, self.pins) + sparse

    def unfollowed(self, request: Request) -> list[str]:
        """The pins that no plan of it can follow; none where they are not what is in the way."""
        if not any(pin.only_in_groups for pin in request.pins.values()):
            return []
        return unmet_in_groups(request, request.world, group_sizes(request.world))

    def indivisible(self, request: Request) -> list[str]:
        """What of the model cannot be divided as it must."""
        return []

    @property
    def cut(self) -> str:
        """What a cut of the layers must do, as in `no cut of the layers ...`."""
        return "leaves parameters on both sides"


def _follows(request: Request, division: Division, layer: str, option: Option, pin: Pin) -> bool:
    """Whether an option has what a pin asks for."""
    group = division.roles[option.role].group
    grouped = 1 if option.state == "batch" and option.holding == "replicated" else group
    owns, trains = layer in request.divisible, request.gradient_of(layer) > 0
    summed = "all_reduce", "average"  # which is nothing where one rank trains it, in its unit
    return (
        (pin.stage in (None, option.role) or len(division.roles) == 1)
        and pin.group in (None, group, grouped)
        and (not owns or pin.holding in (None, option.holding))
        and pin.split in (None, option.split)
        and (pin.state in (None, option.state, option.makes) or option.role == 0)
        and (pin.sync in (None, option.sync) or (option.sync == "none" and (pin.sync in summed or not trains)))
    )


def in_microbatches(strategy: Strategy, number: Any) -> Strategy:
    """Return the strategy in `number` microbatches; "auto" and None leave its own.

    Raises PlacementError for another number, and for two that differ.
    """
    if number in (None, "auto"):
        return strategy
    if strategy.microbatches not in (None, number):
        raise PlacementError(f"microbatches={number}, but {strategy} has {strategy.microbatches}; give one of them")
    made: Strategy = replace(strategy, microbatches=number)
    return made


# -- the text form: `layer_separation(n_c=3, n_f=1)` -------------------------------------------------------------------


def strategy_named(name: str) -> type[Strategy]:
    """The class of a strategy in the registry."""
    found: type[Strategy] = getattr(import_module(f"splitc.strategies.{name}"), STRATEGIES[name])
    return found


def options_of(strategy: Strategy | type[Strategy]) -> list[Field[Any]]:
    """A strategy's own options first, then those of all."""
    return sorted(fields(strategy), key=lambda f: bool(f.kw_only))


def parse_strategy(text: str | Strategy | type[Strategy]) -> Strategy:
    """`"layer_separation(n_f=1)"` -> LayerSeparation(n_f=1).  Parsed, never evaluated.

    Raises PlacementError for an unknown name, option or value.
    """
    if isinstance(text, Strategy):
        return text
    if isinstance(text, type) and issubclass(text, Strategy):
        return text()
    if not isinstance(text, str):
        raise PlacementError(f"strategy is {text!r:.60}; give a name, with options or without, or a Strategy")
    named, given = name_and_options(text)
    cls = strategy_named(named)
    known = [f.name for f in options_of(cls)]
    options: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in given.split(","))):
        name, _, value = (p.strip() for p in part.partition("="))
        if name not in known:
            there = f"it has {', '.join(known)}, as in {cls.name}({known[0]}=1)" if known else "it has none"
            raise PlacementError(f"{cls.name} has no option {name!r}; {near_name(name, known)}{there}")
        if name in options:
            raise PlacementError(f"{cls.name}: {name} is given twice")
        if not value:
            raise PlacementError(f"{cls.name}: {name} has no value; write {name}=1, for example")
        options[name] = _literal(value)
    try:
        return cls(**options)
    except PlacementError as error:
        for name in options:
            with suppress(PlacementError):
                fewer = cls(**{each: value for each, value in options.items() if each != name})
                error.add_note(f"the smallest change of one part with which it can be asked for: strategy {fewer}")
                break
        raise


def _literal(text: str) -> Any:
    """A number, True, False, None, or else the text itself (`scheme=B`)."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
