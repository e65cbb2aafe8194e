"""The table of what a rank can do in a step.

A new verb is a row: the checks read its order, the wire what travels, the simulation how it is waited for, and codegen
its line.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from splitc.ir.transitions import TRANSITIONS, Collective
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
    OWNERS = auto()  # of the slices that are dealt
    SERVERS = auto()
    WORKERS = auto()
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
    unit: what consecutive actions of a microbatch it belongs to.
    collective: that a message or a sum is; what servers, groups and owners do is said where it is counted.
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


_ENTRIES = tuple(node.__name__ for node in TRANSITIONS)
_GRADIENTS = tuple(f"{verb}_grad" for verb in _ENTRIES)
_ENDS = ("backward", "multiply")  # while gradients travel

_SEND, _RECV, _SUM = Collective.SEND, Collective.RECV, Collective.ALL_REDUCE
_EACH, _TRAVELS = Often.EACH_MICROBATCH, Often.AS_IT_TRAVELS

VERBS = {
    "send": Verb("send the examples of a cut to the ranks that compute on them",
        _TRAVELS, among=Among.PAIR, what=What.CUT, collective=_SEND, waits=Waits.AT_THE_END, forward=True,
        after=("forward",), unit="forward"),
    "recv": Verb("receive a cut",
        _TRAVELS, among=Among.PAIR, what=What.CUT, collective=_RECV, waits=Waits.BY_COMPUTING, forward=True,
        before=(*_ENTRIES, "forward"), unit="receive"),
    "weigh": Verb("compute the denominators of the loss, of the whole batch",
        among=Among.STAGE, what=What.NODE, forward=True, before=("forward",)),
    "forward": Verb("run the stage forward",
        _EACH, among=Among.STAGE, what=What.NODE, waits=Waits.COMPUTES, forward=True, unit="forward"),
    "sum_loss": Verb("begin to all-reduce the loss over all ranks",
        among=Among.WORLD, what=What.LOSS, collective=_SUM, waits=Waits.AT_THE_END, forward=True),
    "backward": Verb("run the stage backward",
        _EACH, among=Among.STAGE, what=What.NODE_GRADIENT, waits=Waits.COMPUTES, after=("forward",), unit="backward"),
    "recv_grad": Verb("receive the gradient of a cut that was sent",
        _TRAVELS, among=Among.PAIR, what=What.CUT_GRADIENT, collective=_RECV, waits=Waits.BY_COMPUTING,
        before=("backward",), unit="receive_gradients"),
    "send_grad": Verb("send the gradient of a cut that was received",
        _TRAVELS, among=Among.PAIR, what=What.CUT_GRADIENT, collective=_SEND, waits=Waits.AT_THE_END,
        after=("backward", *_GRADIENTS), unit="backward"),
    "all_reduce": Verb("all-reduce a bucket of gradients over the replicas",
        _EACH, When.LAST_OF_UPDATE, Among.REPLICAS, What.BUCKET, _SUM, Waits.AFTER_BACKWARD, after=_ENDS,
        buckets="buckets", unit="backward"),
    "all_reduce_tied": Verb("all-reduce the gradient of a parameter over all roles that use it",
        when=When.LAST_OF_UPDATE, among=Among.HOLDERS, what=What.TIED, collective=_SUM,
        after=("backward",), anywhere=True),
    "multiply": Verb("multiply the gathered inputs and errors of late-multiplied layers",
        _EACH, waits=Waits.COMPUTES, after=("backward",), unit="backward"),
    "update": Verb("step the optimizer of this role's parameters",
        _EACH, waits=Waits.COMPUTES, after=("backward", *_GRADIENTS), unit="backward",
        line="update()", note="unlike one process, in every microbatch"),
    "deal": Verb("before a round, gather the slices of parameters that this rank is dealt",
        when=When.BEFORE_ROUND, among=Among.OWNERS, what=What.DEAL, before=("forward",),
        line="deal(stage, {DEALT})", note="this rank's slices arrive"),
    "fetch_ahead": Verb("during a round, gather of the next slices what no rank trains in this one",
        when=When.BEFORE_ROUND, among=Among.OWNERS, what=What.FETCH_AHEAD, after=("deal",), before=("forward",),
        line="fetch_ahead(stage, {DEALT})", note="what the next slices have and nobody trains begins to arrive"),
    "collect": Verb("after a round, return them to the ranks that own them",
        when=When.AFTER_ROUND, among=Among.OWNERS, what=What.COLLECT, after=("backward",),
        line="collect(stage, {DEALT})", note="back to their owners"),
    "keep": Verb("before a round, keep the parameters that the outer optimizer updates after it",
        when=When.BEFORE_ROUND, after=("backward",)),
    "average": Verb("after a round, average a bucket of parameters over the units that trained them",
        when=When.AFTER_ROUND, among=Among.REPLICAS, what=What.AVERAGE, collective=_SUM,
        after=("backward",), buckets="averaged"),
    "arrive": Verb("wait for a bucket that was on its way during updates",
        when=When.AFTER_ROUND, after=("backward",), buckets="averaged"),
    "send_parameters": Verb("send a server's parameters to the workers",
        when=When.FIRST_OF_UPDATE, among=Among.WORKERS, what=What.PULL, waits=Waits.AT_THE_END, forward=True,
        line="send_parameters(stage, SERVED)", note="to the workers"),
    "pull": Verb("receive parameters from the servers",
        when=When.FIRST_OF_UPDATE, among=Among.SERVERS, what=What.PULL, waits=Waits.BY_NODES, forward=True,
        before=("forward",)),
    "push": Verb("send a bucket of gradients to the servers",
        _EACH, When.LAST_OF_UPDATE, Among.SERVERS, What.PUSH, waits=Waits.AFTER_BACKWARD, after=_ENDS,
        buckets="served", unit="backward"),
    "reduce_gradients": Verb("sum the workers' gradients on a server",
        when=When.LAST_OF_UPDATE, among=Among.WORKERS, what=What.PUSH, waits=Waits.ONE_BY_ONE,
        line="reduce_gradients(stage, SERVED)", note="summed over the workers"),
    **dict.fromkeys(
        _ENTRIES,
        Verb("bring a cut to the state in which a group reads it",
            _EACH, among=Among.GROUP, what=What.ENTRY, forward=True, before=("forward",), unit="forward",
        )),
    **dict.fromkeys(
        _GRADIENTS,
        Verb("return the gradient of what a group brought there",
            _EACH, among=Among.GROUP, what=What.ENTRY_GRADIENT, after=("backward",), unit="backward",
        )),
}  # fmt: skip
"""What a rank can do in a step."""
