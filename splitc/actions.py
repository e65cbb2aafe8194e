"""The action list of a role's step: data that codegen writes out line by line and the checker follows.

    send target -> fc          recv cut0 <- conv
    forward                    sum_loss
    recv_grad cut0 <- fc       backward
    send_grad cut0 -> conv     reduce bucket0

Reordering the list is how a schedule changes.  It prints as text and parses back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from splitc.errors import InternalError

VERBS = ("send", "recv", "forward", "sum_loss", "recv_grad", "backward", "send_grad", "reduce")


@dataclass(frozen=True)
class Action:
    """One step of a rank.  value: the cut or bucket; role: the other side; microbatch: which one it works on."""

    verb: str
    value: str = ""
    role: str = ""
    microbatch: int = 0

    def __post_init__(self) -> None:
        if self.verb not in VERBS:
            raise InternalError(f"unknown action {self.verb!r}; there are {', '.join(VERBS)}")

    def __str__(self) -> str:
        arrow = "<-" if self.verb.startswith("recv") else "->"
        other = f" {arrow} {self.role}" if self.role else ""
        micro = f" [{self.microbatch}]" if self.microbatch else ""
        return f"{self.verb}{' ' + self.value if self.value else ''}{other}{micro}"


def print_actions(actions: Iterable[Action]) -> str:
    """One action a line."""
    return "\n".join(map(str, actions)) + "\n"


def parse_actions(text: str) -> tuple[Action, ...]:
    """The inverse of `print_actions`.  Raises InternalError that names the line."""
    actions = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines())), 1):
        match = re.fullmatch(r"(\w+)(?: (\w+))?(?: (?:->|<-) (\w+))?(?: \[(\d+)\])?", line)
        if match is None:
            raise InternalError(f"line {number} is no action: {line!r}")
        actions.append(Action(match[1], match[2] or "", match[3] or "", int(match[4] or 0)))
    return tuple(actions)
