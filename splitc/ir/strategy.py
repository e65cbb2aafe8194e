"""What all strategies have in common, and those in which units of ranks train by themselves for some updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar

from splitc.errors import PlacementError
from splitc.ir.placements import ALL_REDUCES, SCHEDULES
from splitc.runtime.spec import Rounds


@dataclass(frozen=True)
class _Valid:
    """What an option may be, if it is given: a test of it, and the same in words."""

    holds: Callable[[Any], bool]
    must: str


def whole(least: int, default: int | None = None) -> Any:
    """An option that is a whole number of at least `least`."""
    valid = _Valid(lambda value: type(value) is int and value >= least, f"a whole number of at least {least}")
    return field(default=default, metadata={"valid": valid})


def number() -> Any:
    """An option that is a number."""
    return field(default=None, metadata={"valid": _Valid(lambda value: type(value) in (int, float), "a number")})


def one_of(*known: object) -> Any:
    """An option that is one of these values."""
    valid = _Valid(lambda value: value in known, f"one of {', '.join(map(str, known))}")
    return field(default=None, metadata={"valid": valid})


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Base of all strategies.  name: how users write it.  exact: whether it is the same training as in one process.

    all_reduce: the algorithm that sums gradients, the "backend"'s own or "recursive_doubling" (Stanza 4.1.2).
    sync_batchnorm: BatchNorm normalises over the whole global batch, as in one process, not over each rank's part.
    microbatches: parts of each reader's batch that go through the ranks one after another, in the order of `schedule`,
    "all_forward" or "1f1b"; 1 and all_forward unless given.

    Raises PlacementError for an option that is not valid.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    all_reduce: str | None = one_of(*ALL_REDUCES)
    sync_batchnorm: bool | None = one_of(True, False)
    microbatches: int | None = whole(1)
    schedule: str | None = one_of(*SCHEDULES)

    def __post_init__(self) -> None:
        for option in fields(self):
            value, valid = getattr(self, option.name), option.metadata.get("valid")
            if value is not None and valid is not None and not valid.holds(value):
                raise PlacementError(f"{self.name}: {option.name} is {value!r}; it must be {valid.must}")

    @property
    def is_exact(self) -> bool:
        """Whether this plan of it is the same training, with its options."""
        return self.exact

    def __str__(self) -> str:
        options = [f"{f.name}={getattr(self, f.name)}" for f in options_of(self) if getattr(self, f.name) is not None]
        return f"{self.name}({', '.join(options)})" if options else self.name


@dataclass(frozen=True, kw_only=True)
class InRounds(Strategy):
    """Base of strategies in which units of ranks may train by themselves, and average after each `period` updates.

    outer_lr, outer_momentum, nesterov: of an outer SGD, to which the averaged change is a gradient (DiLoCo); nesterov
    is the rule where there is momentum.
    fragments: parts of the model that are averaged in turns; delay: updates that one travels; mixing: how much of its
    own parameters a rank keeps when one arrives, a half unless given (streaming DiLoCo).
    through: "peers", or a "server", the ranks of the first unit (SplitBrain 4).
    """

    period: int | None = whole(1)
    outer_lr: float | None = number()
    outer_momentum: float | None = number()
    nesterov: bool | None = one_of(True, False)
    fragments: int | None = whole(1)
    delay: int | None = whole(0)
    mixing: float | None = number()
    through: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (rounds := self.rounds(unit=1)) is not None and (problems := list(rounds_problems(rounds))):
            raise PlacementError(f"{self.name}: {'; '.join(problems)}")

    def rounds(self, unit: int) -> Rounds | None:
        """The rounds of units of so many ranks; None without a period."""
        own = fields(InRounds)[len(fields(Strategy)) + 1 :]
        given = {f.name: getattr(self, f.name) for f in own if getattr(self, f.name) is not None}
        if given and self.period is None:
            raise PlacementError(f"{self.name}: {next(iter(given))} needs a period, the updates between two averages")
        usual = {"nesterov": bool(self.outer_momentum), "mixing": 0.5 if self.delay else 0.0}
        return None if self.period is None else Rounds(self.period, unit, **{**usual, **given})


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


def options_of(strategy: Strategy | type[Strategy]) -> list[Field[Any]]:
    """A strategy's own options first, then those of all."""
    return sorted(fields(strategy), key=lambda f: bool(f.kw_only))


def rounds_problems(rounds: Rounds) -> Iterator[str]:
    """Yield a line for each number that makes no sense."""
    if rounds.steps < 1:
        yield f"a round has {rounds.steps} updates; it must have at least 1"
    if not rounds.outer_lr > 0:
        yield f"outer_lr is {rounds.outer_lr:g}; it must be more than 0"
    if not 0 <= rounds.outer_momentum < 1:
        yield f"outer_momentum is {rounds.outer_momentum:g}; it must be at least 0 and less than 1"
    if rounds.nesterov and not rounds.outer_momentum:
        yield "nesterov is a rule for momentum, but outer_momentum is 0"
    if not 1 <= rounds.fragments <= max(rounds.steps, 1):
        yield f"{rounds.fragments} fragments cannot take turns in {rounds.steps} updates; take 1 to {rounds.steps}"
    if not 0 <= rounds.delay < max(rounds.steps, 1):
        yield f"delay is {rounds.delay}, but a fragment arrives before it leaves again, {rounds.steps} updates later"
    if rounds.through not in ("peers", "server"):
        yield f"through is {rounds.through!r}; it must be peers or server"
    if not 0 <= rounds.mixing <= 1 or (rounds.mixing and not rounds.delay):
        yield f"mixing is {rounds.mixing:g}; it must be 0 to 1, and 0 without a delay, which leaves nothing to mix"
