"""What all strategies have in common, and those in which units of ranks train by themselves for some updates."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar

from splitc.errors import PlacementError
from splitc.ir.placements import ALL_REDUCES, SCHEDULES
from splitc.ir.rounds import rounds_problems
from splitc.runtime.spec import Rounds


@dataclass(frozen=True)
class Strategy:
    """Base of all strategies.  name: how users write it.  exact: whether it is the same training as in one process.

    all_reduce: the algorithm that sums gradients, the "backend"'s own or "recursive_doubling" (Stanza 4.1.2).
    sync_batchnorm: BatchNorm normalises over the whole global batch, as in one process, not over each rank's part.
    microbatches: parts of each reader's batch that go through the ranks one after another, in the order of `schedule`,
    "all_forward" or "1f1b"; 1 and all_forward unless given.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    all_reduce: str | None = field(default=None, kw_only=True)
    sync_batchnorm: bool | None = field(default=None, kw_only=True)
    microbatches: int | None = field(default=None, kw_only=True)
    schedule: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        one_of(self, "all_reduce", ALL_REDUCES)
        one_of(self, "sync_batchnorm", (True, False))
        one_of(self, "schedule", SCHEDULES)
        whole(self, "microbatches", 1)

    @property
    def is_exact(self) -> bool:
        """Whether this plan of it is the same training, with its options."""
        return self.exact

    def __str__(self) -> str:
        options = [f"{f.name}={getattr(self, f.name)}" for f in options_of(self) if getattr(self, f.name) is not None]
        return f"{self.name}({', '.join(options)})" if options else self.name


@dataclass(frozen=True)
class InRounds(Strategy):
    """Base of strategies in which units of ranks may train by themselves, and average after each `period` updates.

    outer_lr, outer_momentum, nesterov: of an outer SGD, to which the averaged change is a gradient (DiLoCo); nesterov
    is the rule where there is momentum.
    fragments: parts of the model that are averaged in turns; delay: updates that one travels; mixing: how much of its
    own parameters a rank keeps when one arrives, a half unless given (streaming DiLoCo).
    through: "peers", or a "server", the ranks of the first unit (SplitBrain 4).
    """

    period: int | None = field(default=None, kw_only=True)
    outer_lr: float | None = field(default=None, kw_only=True)
    outer_momentum: float | None = field(default=None, kw_only=True)
    nesterov: bool | None = field(default=None, kw_only=True)
    fragments: int | None = field(default=None, kw_only=True)
    delay: int | None = field(default=None, kw_only=True)
    mixing: float | None = field(default=None, kw_only=True)
    through: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, least in (("period", 1), ("fragments", 1), ("delay", 0)):
            whole(self, option, least)
        for option in ("outer_lr", "outer_momentum", "mixing"):
            if type(getattr(self, option) or 0) not in (int, float):
                raise PlacementError(f"{self.name}: {option} is {getattr(self, option)!r}; it must be a number")
        one_of(self, "nesterov", (True, False))
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


def whole(strategy: Strategy, option: str, least: int) -> None:
    """Raise PlacementError for what is given and no whole number of at least `least`."""
    value = getattr(strategy, option)
    if value is not None and (type(value) is not int or value < least):
        raise PlacementError(f"{strategy.name}: {option} is {value!r}; it must be a whole number of at least {least}")


def one_of(strategy: Strategy, option: str, known: tuple[object, ...]) -> None:
    """Raise PlacementError for what is given and not `known`."""
    value = getattr(strategy, option)
    if value is not None and value not in known:
        raise PlacementError(f"{strategy.name}: {option} is {value!r}; it must be one of {', '.join(map(str, known))}")
