"""The action list of a training step: data that codegen writes out line by line and the checks follow.

    conv: send target -> fc          fc: recv cut0 <- conv
    conv: forward                    fc: sum_loss
    conv: recv_grad cut0 <- fc       fc: backward
    fc: send_grad cut0 -> conv       conv: all_reduce bucket0
    fc: modulo cut0 [1]              fc: modulo_grad cut0 [1]

A line begins with the role in which a rank does it; a number in brackets is the microbatch.  Reordering
the list changes the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from splitc.errors import InternalError
from splitc.ir.transitions import TRANSITIONS

ENTRY_VERBS = tuple(node.__name__ for node in TRANSITIONS)
"""How a group brings a cut to the state that its stage reads; with `_grad`, the gradient's way back."""

VERBS = {
    "send": "send the examples of a cut to the ranks that compute on them",
    "recv": "receive a cut",
    "weigh": "compute the denominators of the loss, of the whole batch",
    "forward": "run the stage forward",
    "sum_loss": "begin to all-reduce the loss over all ranks",
    "backward": "run the stage backward",
    "recv_grad": "receive the gradient of a cut that was sent",
    "send_grad": "send the gradient of a cut that was received",
    "all_reduce": "all-reduce a bucket of gradients over the replicas",
    "all_reduce_tied": "all-reduce the gradient of a parameter over all roles that use it",
    "multiply": "multiply the gathered inputs and errors of late-multiplied layers",
    "update": "step the optimizer of this role's parameters",
    "deal": "before a round, gather the slices of parameters that this rank is dealt",
    "fetch_ahead": "during a round, gather of the next slices what no rank trains in this one",
    "collect": "after a round, return them to the ranks that own them",
    "keep": "before a round, keep the parameters that the outer optimizer updates after it",
    "average": "after a round, average a bucket of parameters over the units that trained them",
    "arrive": "wait for a bucket that was on its way during updates",
    "send_parameters": "send a server's parameters to the workers",
    "pull": "receive parameters from the servers",
    "push": "send a bucket of gradients to the servers",
    "reduce_gradients": "sum the workers' gradients on a server",
    **dict.fromkeys(ENTRY_VERBS, "bring a cut to the state in which a group reads it"),
    **dict.fromkeys((f"{verb}_grad" for verb in ENTRY_VERBS), "return the gradient of what a group brought there"),
}
"""What a rank can do in a step."""

BUCKET_VERBS = ("all_reduce", "push", "average", "arrive")
BEGIN_ROUND = ("deal", "fetch_ahead", "keep")
"""What a rank does before a round of local updates, not in every step."""
END_ROUND = ("collect", "average", "arrive")
"""What it does after one."""
BEGIN_UPDATE = ("pull", "send_parameters")
"""What a rank does in the first of the batches that are accumulated to an update."""
END_UPDATE = ("all_reduce", "all_reduce_tied", "push", "reduce_gradients")
"""What it does in the last."""
FORWARD = ("send", "recv", "weigh", *ENTRY_VERBS, "forward", "sum_loss", "send_parameters", "pull")
"""What a rank does in evaluation."""
PRODUCER_VERBS = ("send", "recv_grad")
"""What the producer of a cut does."""


@dataclass(frozen=True)
class Action:
    """One thing that a rank does in one of its roles.

    role: that role.  value: name of the cut, or of the tied parameter.  peer: the role at the other end of a cut.
    bucket: number of the bucket, of an `all_reduce`, a `push` or an `average`.
    microbatch: of the step, or of the role's groups.
    update: after which update of a round, where fragments of the parameters take turns; else at its begin or end.
    """

    verb: str
    value: str = ""
    peer: str = ""
    role: str = ""
    microbatch: int = 0
    bucket: int | None = None
    update: int | None = None

    @property
    def in_group(self) -> bool:
        """Whether a group brings a cut, or its gradient, to another state."""
        return self.verb.removesuffix("_grad") in ENTRY_VERBS

    def __post_init__(self) -> None:
        if self.verb not in VERBS:
            raise InternalError(f"unknown action {self.verb!r}; there are {', '.join(VERBS)}")
        if (self.bucket is not None) != (self.verb in BUCKET_VERBS):
            raise InternalError(f"{self.verb} has bucket {self.bucket}; {' and '.join(BUCKET_VERBS)} have one each")

    def __str__(self) -> str:
        arrow = "<-" if self.verb.startswith("recv") else "->"
        role = f"{self.role}: " if self.role else ""
        value = self.value if self.bucket is None else f"bucket{self.bucket}"
        peer = f" {arrow} {self.peer}" if self.peer else ""
        microbatch = f" [{self.microbatch}]" if self.microbatch else ""
        when = f"after update {self.update} of a round" if self.update else "once a round"
        once = f" ({when})" if self.verb in (*BEGIN_ROUND, *END_ROUND) else ""
        return f"{role}{self.verb}{' ' + value if value else ''}{peer}{microbatch}{once}"


@dataclass(frozen=True)
class RankProgram:
    """The program of the ranks that are in the same roles: its stages, and the action list of a step.

    name: of its file, "conv" or "conv_fc", by the roles of the plan.
    whole: the list of a step that has no microbatches, as evaluation has none.
    """

    roles: tuple[str, ...]
    ranks: tuple[int, ...]
    name: str
    actions: tuple[Action, ...] = ()
    whole: tuple[Action, ...] = ()


def print_actions(actions: Iterable[Action]) -> str:
    """Return the actions as text, one a line."""
    return "\n".join(map(str, actions)) + "\n"
