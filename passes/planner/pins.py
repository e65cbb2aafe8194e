"""A user's pins: patterns of layer names, and the part of a placement that each one fixes.

`{"classifier.*": "fc", "head": Placement(sync="all_reduce")}`: a text is a role.  Where two patterns match a layer, it
has the parts of both; where these contradict each other that of the later one, which must match fewer layers.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated

from splitc.errors import PlacementError, bullets
from splitc.ir.decode import decode, hints_of, one_of
from splitc.ir.placements import Placement
from splitc.ir.roles import ROLES, STAGE_OF_ROLE


@dataclass(frozen=True)
class Pin(Placement):
    """The parts of a layer's placement that the user fixed, and the last pattern that matched it."""

    pattern: str = ""

    @property
    def stage(self) -> int | None:
        """The place of its role on the data's way, by any of its names; None for other roles and without one."""
        return None if self.role is None else STAGE_OF_ROLE.get(self.role)

    @property
    def divides(self) -> bool:
        """Whether it asks for shards."""
        return self.holding == "sharded" or (self.holding is None and self.split is not None)

    @property
    def grouped(self) -> bool:
        """Whether it asks for groups of ranks."""
        return self.divides or (self.group or 1) > 1

    @property
    def only_in_groups(self) -> bool:
        """Whether it asks for what only ranks in groups have."""
        return self.grouped or bool(self.split or self.state or self.arrives)


UNPINNED = Pin()
"""The pin of a layer that has none."""


def resolve_pins(pins: Mapping[str, str | Placement], layers: Sequence[str]) -> dict[str, Pin]:
    """Layer -> its pin, for the layers that have one.

    Raises PlacementError with every pattern that matches no layer and every unknown word.
    """
    problems: list[str] = []
    resolved: dict[str, Pin] = {}
    for pattern, asked in pins.items():
        pin = Placement(role=asked) if isinstance(asked, str) else asked
        problems += [f"pin {pattern!r}: {problem}" for problem in unknown_words(pin)]
        matching = [layer for layer in layers if fnmatchcase(layer, pattern)]
        if not matching:
            problems.append(f"pin {pattern!r} matches no layer; {_near(pattern, layers)}")
        parts = {part: value for part, value in asdict(pin).items() if value is not None}
        for layer in matching:
            before = resolved.get(layer, UNPINNED)
            wider = {each for each in layers if fnmatchcase(each, before.pattern)}
            if not set(matching) < wider and (old := contradicted(before, parts)):
                more = "give the one for fewer layers last, or leave one out"
                problems.append(f"pin {pattern!r}: {layer} has {', '.join(old)} by {before.pattern!r}; {more}")
            resolved[layer] = replace(before, **{**parts, "pattern": pattern})
    if problems:
        raise PlacementError(bullets("these pins cannot be followed:", problems))
    return resolved


def contradicted(pin: Placement, parts: Mapping[str, object]) -> list[str]:
    """The parts of a pin that others contradict: `role 'fc'`."""
    own = ((part, getattr(pin, part)) for part in parts)
    return [f"{part} {value!r}" for part, value in own if value not in (None, parts[part])]


def quote_layers(layers: Sequence[str]) -> str:
    """`fc1`, `fc1 and fc2`, `layer1.0.conv1 and 17 more layers`."""
    return " and ".join(layers) if len(layers) <= 2 else f"{layers[0]} and {len(layers) - 1} more layers"


def unknown_words(pin: Placement) -> list[str]:
    """The parts of a pin that no model and no strategy knows: one line each."""
    parts = {**hints_of(Placement), "role": Annotated[str, one_of(*ROLES)] | None}
    _, problems = decode(parts, {part: getattr(pin, part) for part in parts})
    return [str(problem) for problem in problems]


def _near(pattern: str, layers: Sequence[str]) -> str:
    if near := difflib.get_close_matches(pattern.strip("*?."), layers, 3, 0.4):
        return f"near it are {', '.join(near)}"
    return f"the layers are {', '.join(layers[:8])}{', ...' if len(layers) > 8 else ''}"
