"""The action list of a step: data that codegen writes out line by line and the checker follows.

    conv: send target -> fc          fc: recv cut0 <- conv
    conv: forward                    fc: sum_loss
    conv: recv_grad cut0 <- fc       fc: backward
    fc: send_grad cut0 -> conv       conv: all_reduce bucket0
    fc: modulo cut0 [1]              fc: modulo_grad cut0 [1]

Each line says in which of its roles a rank does it; a number in brackets is the turn of its group.  Reordering the
list is how a schedule changes.  It prints as text and parses back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from splitc.errors import InternalError

VERBS = {
    "send": "give the examples of a cut to those who work on them",
    "recv": "take a cut",
    "modulo": "gather a turn's examples of a cut over the group",
    "slice_batch": "take one's own examples of a cut out of the group's",
    "forward": "run the stage",
    "sum_loss": "start to sum the loss over all ranks",
    "backward": "run the stage's backward",
    "recv_grad": "take the gradient of a cut that was sent",
    "send_grad": "give the gradient of a cut that was taken",
    "all_gather_grad": "gather the gradient of a kept cut over the group",
    "modulo_grad": "give the gradient of a turn's examples back to their owners in the group",
    "all_reduce": "sum a bucket of gradients over the replicas",
    "all_reduce_tied": "sum the gradient of a parameter over all roles that use it",
    "multiply": "multiply what late-multiplied layers gathered",
    "update": "let the optimizer step on this role's parameters",
    "send_parameters": "a server gives its parameters to the workers",
    "pull": "a worker takes parameters",
    "push": "a worker gives a bucket of gradients to the servers",
    "reduce_gradients": "a server sums the gradients of the workers",
}
"""What a rank can do in a step."""


@dataclass(frozen=True)
class Action:
    """One thing that a rank does as one of `own`.  value: the cut or bucket; role: the other side; turn: of a group."""

    verb: str
    value: str = ""
    role: str = ""
    own: str = ""
    turn: int = 0

    def __post_init__(self) -> None:
        if self.verb not in VERBS:
            raise InternalError(f"unknown action {self.verb!r}; there are {', '.join(VERBS)}")

    def __str__(self) -> str:
        arrow = "<-" if self.verb.startswith("recv") else "->"
        own = f"{self.own}: " if self.own else ""
        other = f" {arrow} {self.role}" if self.role else ""
        turn = f" [{self.turn}]" if self.turn else ""
        return f"{own}{self.verb}{' ' + self.value if self.value else ''}{other}{turn}"


def print_actions(actions: Iterable[Action]) -> str:
    """One action a line."""
    return "\n".join(map(str, actions)) + "\n"


def parse_actions(text: str) -> tuple[Action, ...]:
    """The inverse of `print_actions`.  Raises InternalError that names the line."""
    actions = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines())), 1):
        match = re.fullmatch(r"(?:(\w+): )?(\w+)(?: (\w+))?(?: (?:->|<-) (\w+))?(?: \[(\d+)\])?", line)
        if match is None:
            raise InternalError(f"line {number} is no action: {line!r}")
        actions.append(Action(match[2], match[3] or "", match[4] or "", match[1] or "", int(match[5] or 0)))
    return tuple(actions)
