"""Read action lists from text."""

from __future__ import annotations

import re

from splitc.errors import InternalError
from splitc.ir.schedule.actions import Action
from splitc.ir.schedule.verbs import VERBS

_LINE = r"(?:(\w+): )?(\w+)(?: (?!->|<-|\[)(.+?))?(?: (?:->|<-) (\w+))?(?: \[(\d+)\])?"


def parse_actions(text: str) -> tuple[Action, ...]:
    """Return the actions that `print_actions` wrote.  Raises InternalError that names the line."""
    actions = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines())), 1):
        match = re.fullmatch(_LINE, line)
        if match is None:
            raise InternalError(f"line {number} is no action: {line!r}")
        role, verb, value, peer, microbatch = match.groups(default="")
        bucket = re.fullmatch(r"bucket(\d+)", value) if verb in VERBS and VERBS[verb].buckets else None
        actions.append(
            Action(
                verb,
                value if bucket is None else "",
                peer,
                role,
                int(microbatch or 0),
                None if bucket is None else int(bucket[1]),
            )
        )
    return tuple(actions)
