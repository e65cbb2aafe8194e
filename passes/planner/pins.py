"""A user's pins: patterns of layer names, and the part of a placement that each one fixes.

`{"classifier.*": "fc", "head": Placement(sync="all_reduce")}`: a text is a role.  Where two patterns
match a layer, the later one wins, part by part.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from splitc.errors import PlacementError, bullets
from splitc.ir.names import near_name
from splitc.ir.plan import HOLDINGS, SPLITS, SYNCS, Placement

MIXED = "mixed"
"""The strategy of a plan that pins mixed layer by layer."""

ROLES: dict[str, tuple[str, ...]] = {
    "single_device": ("all",),
    "data_parallel": ("all",),
    "parameter_server": ("worker",),
    "layer_separation": ("conv", "fc", "fc2", "fc3", "fc4", "fc5"),
    "hybrid_single": ("conv", "fc"),
    "modulo_shard": ("conv", "fc"),
    "late_multiply": ("all",),
    MIXED: ("conv", "fc"),
}
"""The roles of each strategy, in the order of the data's way."""

HELD: dict[str, tuple[str, ...]] = {"modulo_shard": ("replicated", "sharded"), MIXED: HOLDINGS}
"""How a strategy holds parameters, where not only replicated."""

SUMMED: dict[str, tuple[str, ...]] = {
    "late_multiply": ("all_reduce", "late_multiply", "none"),
    "parameter_server": ("parameter_server", "none"),
    MIXED: SYNCS,
}
"""How a strategy sums gradients, where not only by all_reduce."""

GROUPED = "modulo_shard", MIXED
"""The strategies that have groups, of any size, and divide layers."""


@dataclass(frozen=True)
class Pin:
    """What was asked of one layer, and the pattern that asked last."""

    placement: Placement
    pattern: str


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
        for layer in matching:
            before = resolved[layer].placement if layer in resolved else Placement()
            parts = {part: value for part, value in vars(pin).items() if value is not None}
            resolved[layer] = Pin(replace(before, **parts), pattern)
    if problems:
        raise PlacementError(bullets("these pins cannot be followed:", problems))
    return resolved


def contradictions(pins: Mapping[str, Pin], strategy: str) -> list[str]:
    """Why `strategy` cannot follow the pins: one line for each part of a pin that it does not know."""
    layers: dict[tuple[str, str, object, str], list[str]] = {}
    for layer, pin in pins.items():
        asked = pin.placement
        for part, value, known in (
            ("role", asked.role, ROLES[strategy]),
            ("holding", asked.holding, HELD.get(strategy, ("replicated",))),
            ("sync", asked.sync, SUMMED.get(strategy, ("all_reduce", "none"))),
            ("group", asked.group, (asked.group,) if strategy in GROUPED else (1,)),
            ("split", asked.split, SPLITS if strategy in GROUPED else ()),
        ):
            if value is not None and value not in known:
                key = pin.pattern, part, value, ", ".join(str(word) for word in known)
                layers.setdefault(key, []).append(layer)
    return [
        f"pin {pattern!r} asks for {part} {value!r} of {named(matching)}, "
        f"but {strategy} {f'has only {known}' if known else 'divides no layer'}"
        for (pattern, part, value, known), matching in layers.items()
    ]


def named(layers: Sequence[str]) -> str:
    """`fc1`, `fc1 and fc2`, `layer1.0.conv1 and 17 more layers`."""
    return " and ".join(layers) if len(layers) <= 2 else f"{layers[0]} and {len(layers) - 1} more layers"


def unknown_words(pin: Placement) -> list[str]:
    """What of a pin means nothing whatever the model and the strategy: one line each."""
    roles = tuple(dict.fromkeys(role for each in ROLES.values() for role in each))
    wrong = [
        f"there is no {part} {value!r}; there are {', '.join(known)}; {near_name(str(value), known)}".rstrip("; ")
        for part, value, known in (
            ("role", pin.role, roles),
            ("holding", pin.holding, HOLDINGS),
            ("sync", pin.sync, SYNCS),
            ("split", pin.split, SPLITS),
        )
        if value is not None and value not in known
    ]
    if pin.group is not None and (type(pin.group) is not int or pin.group < 1):
        wrong.append(f"group is {pin.group!r}; it must be a whole number of at least 1")
    return wrong


def _near(pattern: str, layers: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern.strip("*?."), layers, 3, 0.4)
    if near:
        return f"near it are {', '.join(near)}"
    return f"the layers are {', '.join(layers[:8])}{', ...' if len(layers) > 8 else ''}"
