"""The strategies a user can ask for, and the text form of one: `layer_separation(n_c=3, n_f=1)`.

A strategy is a family of plans.  Options left out (None) are chosen by the planner.  A new one is a class here, in
`_ALL`; a function in `passes/planner/` that proposes its best plan, called by `passes/place.py`; what its pins may ask,
in `passes/planner/pin_checks.py`; and its name in `splitc/__init__.py`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from splitc.errors import PlacementError
from splitc.ir.names import near_name
from splitc.ir.placements import SCHEMES, UPDATES
from splitc.ir.strategy import InRounds, Strategy, one_of, options_of, whole


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
    """Conv ranks and fc ranks, disjoint (Stanza 3-4).  n_c, n_f: how many of each.

    ranks: for more than two roles, how many each one has, as "4+2+1" (Stanza 10).
    """

    name = "layer_separation"
    n_c: int | None = whole(1)
    n_f: int | None = whole(1)
    ranks: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks is None:
            return
        if self.n_c is not None or self.n_f is not None:
            raise PlacementError("layer_separation: ranks says how many each role has; leave n_c and n_f out")
        if not isinstance(self.ranks, str) or not re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)+", self.ranks):
            raise PlacementError(
                f"layer_separation: ranks is {self.ranks!r}; write how many each role has, as in ranks=4+2+1"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many ranks each role has, where that was said; none else."""
        return () if self.ranks is None else tuple(map(int, self.ranks.split("+")))


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Workers push gradients to servers and pull parameters, synchronously (Stanza 2.2, 7.1).

    servers: how many; beside: on ranks that are workers too; overlap: layer by layer while workers compute, or all at
    once as in the paper.
    """

    name = "parameter_server"
    servers: int | None = whole(1)
    beside: bool | None = one_of(True, False)
    overlap: bool | None = one_of(True, False)


@dataclass(frozen=True)
class HybridSingle(Strategy):
    """Convolutions on every rank, the fc layers on one of them (Practical Lessons 2.2)."""

    name = "hybrid_single"


@dataclass(frozen=True)
class ModuloShard(InRounds):
    """The fc layers divided over groups of mp ranks (SplitBrain 3; Krizhevsky 2014).

    scheme: which examples of a group are worked on at a time, BK, B or B/K.  updates: once after all turns, or every
    turn, which is the paper's and approximate.  period: updates after which the groups average, until then each trains
    by itself, which is approximate too (SplitBrain 4); None: they sum all gradients.
    """

    name = "modulo_shard"
    mp: int | None = whole(2)
    scheme: str | None = one_of(*SCHEMES)
    updates: str | None = one_of(*UPDATES)

    @property
    def is_exact(self) -> bool:
        return self.updates != "every" and self.period is None


@dataclass(frozen=True)
class LateMultiply(Strategy):
    """Fc layers replicated; their inputs and output errors travel, not their gradients (Practical Lessons 2.1)."""

    name = "late_multiply"


@dataclass(frozen=True)
class Mixed(Strategy):
    """What pins ask for, layer by layer; all other layers are replicated and all-reduced."""

    name = "mixed"


@dataclass(frozen=True)
class LocalSGD(InRounds):
    """Every rank trains the whole model by itself, and after each `period` updates all average (IST 4; local SGD)."""

    name = "local_sgd"
    exact = False
    period: int = whole(1, default=8)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sync_batchnorm or self.all_reduce:
            raise PlacementError("local_sgd: every rank trains by itself; leave sync_batchnorm and all_reduce out")


@dataclass(frozen=True)
class IndependentSubnets(Strategy):
    """Each rank trains its own random part of the hidden neurons, dealt again after each round (IST, Yuan et al. 2019).

    local_steps: updates in a round (J).  insert_norm: normalise hidden layers that have no normalisation, and the
    last layer's outputs.
    """

    name = "independent_subnets"
    exact = False
    local_steps: int = whole(1, default=8)
    insert_norm: bool | None = one_of(True, False)


@dataclass(frozen=True)
class Auto(Strategy):
    """The fastest exact plan that fits."""

    name = "auto"


_ALL = (
    SingleDevice,
    DataParallel,
    ParameterServer,
    LayerSeparation,
    HybridSingle,
    ModuloShard,
    LateMultiply,
    Mixed,
    LocalSGD,
    IndependentSubnets,
    Auto,
)

STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in _ALL}


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
    known = [f.name for f in options_of(cls)]
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
