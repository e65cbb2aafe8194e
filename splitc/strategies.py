"""The strategies a user can ask for, and the text form of one: `layer_separation(n_c=3, n_f=1)`.

A strategy is a family of plans.  Options left out (None) are chosen by the planner.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from splitc.errors import PlacementError
from splitc.names import near_name


@dataclass(frozen=True)
class Strategy:
    """Base of all strategies.  name: how users write it.  exact: whether it is the same training as in one process."""

    name: ClassVar[str]
    exact: ClassVar[bool] = True

    def __str__(self) -> str:
        options = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) is not None]
        return f"{self.name}({', '.join(options)})" if options else self.name


@dataclass(frozen=True)
class SingleDevice(Strategy):
    """All layers on one rank."""

    name = "single_device"


@dataclass(frozen=True)
class DataParallel(Strategy):
    """All layers on every rank, gradients all-reduced."""

    name = "data_parallel"


@dataclass(frozen=True)
class LayerSeparation(Strategy):
    """Conv ranks and fc ranks, disjoint (Stanza 3-4).  n_c, n_f: how many of each."""

    name = "layer_separation"
    n_c: int | None = None
    n_f: int | None = None

    def __post_init__(self) -> None:
        for option in ("n_c", "n_f"):
            value = getattr(self, option)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise PlacementError(
                    f"layer_separation: {option} is {value!r}; it must be a whole number of at least 1"
                )


@dataclass(frozen=True)
class Auto(Strategy):
    """The fastest exact plan that fits."""

    name = "auto"


STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (SingleDevice, DataParallel, LayerSeparation, Auto)}


PRICED = ("parameter_server",)
"""Strategies that the report prices by the formula of their paper, and that cannot be compiled yet."""

_PLANNED = ("hybrid_single", "modulo_shard", "late_multiply", "independent_subnets", "local_sgd")


def parse_strategy(text: str | Strategy | type[Strategy]) -> Strategy:
    """`"layer_separation(n_f=1)"` -> LayerSeparation(n_f=1).  Parsed, never evaluated.

    Raises PlacementError for an unknown name, option or value.
    """
    if isinstance(text, Strategy):
        return text
    if isinstance(text, type) and issubclass(text, Strategy):
        return text()
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None or match[1] not in STRATEGIES:
        raise PlacementError(f"unknown strategy {text!r}; {_instead(text)}")
    cls = STRATEGIES[match[1]]
    known = [f.name for f in fields(cls)]
    options: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in (match[2] or "").split(","))):
        name, _, value = (p.strip() for p in part.partition("="))
        if name not in known:
            there = f"it has {', '.join(known)}, as in {cls.name}({known[0]}=1)" if known else "it has none"
            raise PlacementError(f"{cls.name} has no option {name!r}; {near_name(name, known)}{there}")
        if name in options:
            raise PlacementError(f"{cls.name}: {name} is given twice")
        options[name] = _literal(value, f"{cls.name}: {name}")
    return cls(**options)


def _instead(text: str) -> str:
    """What to write in place of an unknown strategy."""
    name = text.partition("(")[0].strip()
    if name in PRICED:
        return f"{name} is priced by a formula in the report, but cannot be compiled yet"
    if name in _PLANNED:
        return f"{name} cannot be planned yet; there are {', '.join(sorted(STRATEGIES))}"
    if name in STRATEGIES:
        return f"write its options in parentheses, as in {LayerSeparation(3, 1)}"
    return (
        f"{near_name(name, STRATEGIES)}there are {', '.join(sorted(STRATEGIES))}, "
        f"with options as in {LayerSeparation(3, 1)}"
    )


def _literal(text: str, where: str) -> Any:
    """A number, True, False, None, or else the text itself (`scheme=B`)."""
    if not text:
        raise PlacementError(f"{where} has no value; write {where.split(': ')[-1]}=1, for example")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
