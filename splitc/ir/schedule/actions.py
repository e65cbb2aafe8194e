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
from splitc.ir.schedule.verb import Verb
from splitc.ir.schedule.verbs import VERBS


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
    def row(self) -> Verb:
        """Its row in the table of verbs."""
        return VERBS[self.verb]

    def __post_init__(self) -> None:
        if self.verb not in VERBS:
            raise InternalError(f"unknown action {self.verb!r}; there are {', '.join(VERBS)}")
        if (self.bucket is not None) != bool(self.row.buckets):
            with_bucket = " and ".join(verb for verb, row in VERBS.items() if row.buckets)
            raise InternalError(f"{self.verb} has bucket {self.bucket}; {with_bucket} have one each")

    def __str__(self) -> str:
        arrow = "<-" if self.verb.startswith("recv") else "->"
        role = f"{self.role}: " if self.role else ""
        value = self.value if self.bucket is None else f"bucket{self.bucket}"
        peer = f" {arrow} {self.peer}" if self.peer else ""
        microbatch = f" [{self.microbatch}]" if self.microbatch else ""
        when = f"after update {self.update} of a round" if self.update else "once a round"
        once = f" ({when})" if self.row.in_round else ""
        return f"{role}{self.verb}{' ' + value if value else ''}{peer}{microbatch}{once}"


@dataclass(frozen=True)
class RankProgram:
    """The program of the ranks that are in the same roles: its stages, and the action list of a step.

    name: of its file, "conv" or "conv_fc", by the roles of the plan.
    whole: what they do forward, with one batch as a whole, as evaluation does.
    """

    roles: tuple[str, ...]
    ranks: tuple[int, ...]
    name: str
    actions: tuple[Action, ...] = ()
    whole: tuple[Action, ...] = ()


def print_actions(actions: Iterable[Action]) -> str:
    """Return the actions as text, one a line."""
    return "\n".join(map(str, actions)) + "\n"
