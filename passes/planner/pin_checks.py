"""Pins that a strategy cannot follow, found before it makes a plan.

Only a linear layer that owns its weight can be divided or late-multiplied; group sizes divide the world; gradients of
what several ranks train are summed.  Every strategy asks here, so that none ignores a part of a pin silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from splitc.ir.placements import SPLITS
from splitc.ir.roles import MAX_STAGES
from splitc.ir.strategies import Mixed
from splitc.passes.planner.pins import Pin, quote_layers
from splitc.passes.planner.request import Request

MIXED = Mixed.name

_STAGES = {"layer_separation": MAX_STAGES, "hybrid_single": 2, "modulo_shard": 2, MIXED: 2}
"""How many roles a strategy has for pins to name; others have one."""

_SYNCS: dict[str, tuple[str, ...]] = {
    "late_multiply": ("all_reduce", "late_multiply", "none"),
    "parameter_server": ("parameter_server", "none"),
    "local_sgd": ("average", "none"),
    "independent_subnets": ("average", "none"),
    MIXED: ("all_reduce", "late_multiply", "none"),
}
"""How a strategy sums gradients, if not only by all_reduce."""

_GROUPED = "layer_separation", "modulo_shard", MIXED
"""The strategies that divide layers over groups of any size."""


def contradictions(request: Request, strategy: str) -> list[str]:
    """Why `strategy` cannot follow the pins: one line for each part of a pin that it does not have."""
    layers: dict[tuple[str, str, object, str], list[str]] = {}
    divides = strategy in _GROUPED
    for layer, pin in request.pins.items():
        for part, value, known in (
            ("role", pin.role, _known_roles(request, strategy, pin)),
            ("holding", pin.holding, ("replicated", "sharded") if divides else ("replicated",)),
            ("sync", pin.sync, _SYNCS.get(strategy, ("all_reduce", "none"))),
            ("group", pin.group, (pin.group,) if divides else (1,)),
            ("split", pin.split, SPLITS if divides else ()),
        ):
            if value is not None and value not in known:
                key = pin.pattern, part, value, ", ".join(str(word) for word in known)
                layers.setdefault(key, []).append(layer)
    return [
        f"pin {pattern!r} asks for {part} {value!r} of {quote_layers(matching)}, "
        f"but {strategy} {f'has only {known}' if known else 'divides no layer'}"
        for (pattern, part, value, known), matching in layers.items()
    ]


def _known_roles(request: Request, strategy: str, pin: Pin) -> tuple[str, ...]:
    """The roles of a strategy; with the pin's own name for one of them, if it has another."""
    stages = _STAGES.get(strategy, 0)
    if not stages:
        return ("worker",) if strategy == "parameter_server" else ("all",)
    names = (*request.role_names(2), *(f"stage{stage}" for stage in range(2, stages)))
    return (*names, pin.role) if pin.role is not None and pin.stage is not None and pin.stage < stages else names


def unsummed(request: Request, layers: Iterable[str]) -> list[str]:
    """The pins that would let several ranks train a layer independently: sync "none" of a layer that trains."""
    return [
        f"pin {pin.pattern!r} asks for sync 'none' of {layer}, whose gradient must be summed when several ranks hold it"
        for layer, pin in request.pins.items()
        if layer in layers and pin.sync == "none" and request.gradient_of(layer)
    ]


def unmet(request: Request, ranks: int, size: int | None = None) -> list[str]:
    """Return a line for each part of a pin that its layer cannot have.

    ranks: that groups divide.  size: of all groups of a strategy; None: pins alone say where layers are.
    """
    asking: dict[tuple[str, str], list[str]] = {}
    for layer, pin in request.pins.items():
        found = [*_of_its_kind(request, layer, pin), *_of_groups(pin, ranks, size)] or _of_its_place(pin, size)
        for problem in found:
            asking.setdefault((pin.pattern, problem), []).append(layer)
    return [
        f"pin {pattern!r} {problem.replace('...', quote_layers(layers))}"
        for (pattern, problem), layers in asking.items()
    ]


def _of_its_kind(request: Request, layer: str, pin: Pin) -> Iterator[str]:
    """Yield what the layer itself does not allow; `...` stands for its name."""
    owns = any(request.program.tensors[name].parameter for name in request.program.layer(layer).tensors)
    if pin.holding == "sharded" and owns and layer not in request.divisible:
        yield "asks ... to be sharded, but only linear layers, embeddings and normalisations of features can be"
    if pin.sync == "late_multiply" and request.gradient_of(layer) and layer not in request.linears:
        yield "asks ... to be late-multiplied, but only linear layers of their own weight can be"


def _of_groups(pin: Pin, ranks: int, size: int | None) -> Iterator[str]:
    """Yield groups that the ranks or the strategy do not have."""
    if pin.group is not None and ranks % pin.group:
        yield f"asks for groups of {pin.group} of ..., which do not divide {ranks} ranks"
    elif pin.group not in (None, 1) and size not in (None, pin.group):
        yield f"asks for groups of {pin.group} of ..., but here all groups have {size} ranks"
    if pin.group == 1 and pin.holding == "sharded":
        yield "asks ... to be sharded in groups of 1, which divide nothing"
    if pin.grouped and pin.stage == 0:
        yield f"asks for role {pin.role!r} of ... and for groups, which are in another role"
    if size is None and pin.grouped and not pin.divides and pin.stage == 1:
        yield f"asks for groups of {pin.group} of ... on one rank"


def _of_its_place(pin: Pin, size: int | None) -> Iterator[str]:
    """Yield parts of a pin that contradict its other parts, or the place of the layer."""
    if pin.split is not None and not pin.divides:
        yield f"asks for split {pin.split!r} of ..., which is not sharded; ask for holding 'sharded' as well"
    if pin.sync == "late_multiply" and pin.grouped:
        yield "asks for groups and for late multiply of ..., but only what all ranks have whole is late-multiplied"
    elif pin.sync == "late_multiply" and size is None and pin.stage == 1:
        yield "asks for late multiply of ... on one rank, where there is nothing to gather"


def too_small(request: Request, strategy: str) -> list[str]:
    """A line if there is only one rank."""
    return [] if request.world > 1 else [f"{strategy} needs at least 2 ranks"]


def pinned_by(request: Request, layers: Mapping[str, object]) -> str:
    """` (pin 'fc*')`: the pins of these layers, to append to an error; empty if there are none."""
    patterns = dict.fromkeys(pin.pattern for layer, pin in request.pins.items() if layer in layers)
    return f" (pin {', '.join(map(repr, patterns))})" if patterns else ""
