"""The table of what a rank can do in a step.

A new verb is a row: the checks read its order, the wire what travels, the simulation how it is waited for, and codegen
its line.
"""

from __future__ import annotations

from splitc.features import parts
from splitc.ir.schedule.verb import Among, Often, Verb, Waits, When
from splitc.ir.transitions import TRANSITIONS, Collective
from splitc.ir.wire_op import What

_ENTRIES = tuple(node.__name__ for node in TRANSITIONS)
_GRADIENTS = tuple(f"{verb}_grad" for verb in _ENTRIES)
_ENDS = ("backward", "multiply")  # while gradients travel

_SEND, _RECV, _SUM = Collective.SEND, Collective.RECV, Collective.ALL_REDUCE
_EACH, _TRAVELS = Often.EACH_MICROBATCH, Often.AS_IT_TRAVELS

VERBS: dict[str, Verb] = {
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
        buckets="buckets", sync="all_reduce", unit="backward"),
    "all_reduce_tied": Verb("all-reduce the gradient of a parameter over all roles that use it",
        when=When.LAST_OF_UPDATE, among=Among.HOLDERS, what=What.TIED, collective=_SUM,
        after=("backward",), anywhere=True),
    "multiply": Verb("multiply the gathered inputs and errors of late-multiplied layers",
        _EACH, waits=Waits.COMPUTES, after=("backward",), unit="backward"),
    "update": Verb("step the optimizer of this role's parameters",
        _EACH, waits=Waits.COMPUTES, after=("backward", *_GRADIENTS), unit="backward",
        line="update()", note="unlike one process, in every microbatch"),
    **dict.fromkeys(_ENTRIES, Verb("bring a cut to the state in which a group reads it",
        _EACH, among=Among.GROUP, what=What.ENTRY, forward=True, before=("forward",), unit="forward")),
    **dict.fromkeys(_GRADIENTS, Verb("return the gradient of what a group brought there",
        _EACH, among=Among.GROUP, what=What.ENTRY_GRADIENT, after=("backward",), unit="backward")),
    **{verb: row for part in parts("splitc.ir", "verbs") for verb, row in part.VERBS.items()},
}  # fmt: skip
"""What a rank can do in a step."""

SUMS = {row.sync: verb for verb, row in VERBS.items() if row.sync}
"""How gradients are summed, as a plan says it -> the verb, and node, that exchanges buckets of them."""
