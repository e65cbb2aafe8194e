"""What is known of a verb: in which steps it is done and among which ranks, how it is waited for, and its line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from splitc.ir.transitions import Collective
from splitc.ir.wire_op import What


class When(Enum):
    """In which steps a rank does it."""

    EVERY_STEP = auto()
    FIRST_OF_UPDATE = auto()
    LAST_OF_UPDATE = auto()
    BEFORE_ROUND = auto()
    AFTER_ROUND = auto()


class Often(Enum):
    """How often in such a step."""

    ONCE = auto()
    EACH_MICROBATCH = auto()
    AS_IT_TRAVELS = auto()  # a cut: inputs once


class Among(Enum):
    """Which ranks communicate."""

    NONE = auto()
    PAIR = auto()  # of roles
    GROUP = auto()
    STAGE = auto()  # those of its nodes
    REPLICAS = auto()  # of the parameters of a bucket
    HOLDERS = auto()  # of a tied parameter
    OWN = auto()  # those that its feature says
    WORLD = auto()


class Waits(Enum):
    """When what it begins is waited for."""

    AT_ONCE = auto()
    BY_COMPUTING = auto()  # on the microbatch
    AFTER_BACKWARD = auto()  # which begins it
    BY_NODES = auto()
    ONE_BY_ONE = auto()  # and added
    AT_THE_END = auto()
    COMPUTES = auto()  # begins nothing that outlasts it


@dataclass(frozen=True)
class Verb:
    """One kind of action.

    forward: whether evaluation has it.  after, before: verbs that it comes after and before, in its role and microbatch
    and of its cut; `anywhere`, in all roles.  buckets: the field of a Stage that it does a bucket of.
    sync: of gradients, which it exchanges as backward fills a bucket.
    lands: the verb that waits for what it begins, if ranks do that; else it waits itself.
    unit: what consecutive actions of a microbatch it belongs to.
    collective: that a message or a sum is; what features and groups do is said where it is counted.
    line: the call, of a communicator, that codegen writes; "": a line of its own kind, or none.  note: beside it.
    """

    doc: str
    often: Often = Often.ONCE
    when: When = When.EVERY_STEP
    among: Among = Among.NONE
    what: What | None = None
    collective: Collective = Collective.NONE
    waits: Waits = Waits.AT_ONCE
    forward: bool = False
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    anywhere: bool = False
    buckets: str = ""
    sync: str = ""
    lands: str = ""
    unit: str = ""
    line: str = ""
    note: str = ""

    @property
    def moves_cut(self) -> bool:
        """Whether it moves a cut, or its gradient, between roles or in a group."""
        return self.among in (Among.PAIR, Among.GROUP)

    @property
    def backward(self) -> bool:
        """Whether what it moves is a gradient."""
        return self.what in (What.CUT_GRADIENT, What.ENTRY_GRADIENT, What.NODE_GRADIENT)

    @property
    def in_round(self) -> bool:
        """Whether it is done once a round, not in every step."""
        return self.when in (When.BEFORE_ROUND, When.AFTER_ROUND)
