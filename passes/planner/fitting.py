"""What pins ask of layers that cannot have it, said before a plan is made of the wishes.

Only a linear layer whose weight is its own can be divided or late-multiplied; groups divide the ranks; what several
ranks train is summed.  Each family asks here, so that none leaves out a part of a pin without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from splitc.ir.plan import Placement
from splitc.passes.planner.arrange import ONE, LayerChoice
from splitc.passes.planner.pins import named
from splitc.passes.planner.request import Request, unsummed

_LINEAR = "but only linear layers of their own weight can be"


def unfit(request: Request, wishes: Mapping[str, LayerChoice], size: int | None = None) -> list[str]:
    """A line for each part of a pin that `wishes`, which follow the pins, cannot give its layers.

    size: of the groups, where a strategy has one size of them.
    """
    asking: dict[tuple[str, str], list[str]] = {}
    for layer, pin in request.pins.items():
        found = [*_of_its_kind(request, layer, pin.placement, layer in request.linears)]
        found += [*_of_groups(request, pin.placement, wishes[layer], size)]
        for problem in found or _of_its_place(pin.placement, wishes[layer]):
            asking.setdefault((pin.pattern, problem), []).append(layer)
    why = [f"pin {pattern!r} {problem.replace('...', named(layers))}" for (pattern, problem), layers in asking.items()]
    return why + unsummed(request, [layer for layer, wish in wishes.items() if _replicas(request, wish) > 1])


def _of_its_kind(request: Request, layer: str, asked: Placement, linear: bool) -> Iterator[str]:
    """What the layer itself cannot do; `...` stands for its name."""
    owns = any(request.program.tensors[name].parameter for name in request.program.layer(layer).tensors)
    if asked.holding == "sharded" and owns and not linear:
        yield f"asks ... to be sharded, {_LINEAR}"
    if asked.sync == "late_multiply" and request.gradient_of(layer) and not linear:
        yield f"asks ... to be late-multiplied, {_LINEAR}"
    if asked.holding == "subnet":
        yield "asks for holding 'subnet' of ..., which is approximate and cannot be planned yet"
    if asked.sync == "parameter_server":
        yield "asks for sync 'parameter_server' of ..., which only the strategy of that name has"


def _of_groups(request: Request, asked: Placement, wish: LayerChoice, size: int | None) -> Iterator[str]:
    """Groups that the ranks or the strategy do not have."""
    if asked.group is not None and request.world % asked.group:
        yield f"asks for groups of {asked.group} of ..., which do not divide {request.world} ranks"
    elif asked.group not in (None, 1) and size not in (None, asked.group):
        yield f"asks for groups of {asked.group} of ..., but here all groups have {size} ranks"
    if asked.group == 1 and asked.holding == "sharded":
        yield "asks ... to be sharded in groups of 1, which divide nothing"
    if wish.group > 1 and asked.role == "conv":
        yield "asks for role 'conv' of ... and for groups, which are in another role"
    if wish.group > 1 and wish.where == ONE:
        yield f"asks for groups of {wish.group} of ... on one rank"


def _of_its_place(asked: Placement, wish: LayerChoice) -> Iterator[str]:
    """Parts of a pin that mean nothing where the other parts, or the strategy, put the layer."""
    if asked.split is not None and wish.holding != "sharded":
        yield f"asks for split {asked.split!r} of ..., which is not sharded; ask for holding 'sharded' as well"
    if asked.sync == "late_multiply" and wish.group > 1:
        yield "asks for groups and for late multiply of ..., but only what all ranks have whole is late-multiplied"
    if asked.sync == "late_multiply" and wish.where == ONE:
        yield "asks for late multiply of ... on one rank, where there is nothing to gather"


def _replicas(request: Request, wish: LayerChoice) -> int:
    """How many times a layer's parameters are trained."""
    return 1 if wish.where == ONE else max(1, request.world // wish.group)


def whole_unless_linear(request: Request, wishes: Mapping[str, LayerChoice]) -> dict[str, LayerChoice]:
    """The wishes, with layers that have nothing to divide whole in their groups: a loss, a norm in role fc."""
    return {
        layer: replace(wish, holding="replicated", split=None)
        if wish.holding == "sharded" and layer not in request.linears
        else wish
        for layer, wish in wishes.items()
    }


def too_small(request: Request, strategy: str) -> list[str]:
    """A line where there is one rank only."""
    return [] if request.world > 1 else [f"{strategy} needs at least 2 ranks"]


def asked_by(request: Request, layers: Mapping[str, object]) -> str:
    """` (pin 'fc*')`: the pins of these layers, to stand behind what they leave nothing of."""
    patterns = dict.fromkeys(pin.pattern for layer, pin in request.pins.items() if layer in layers)
    return f" (pin {', '.join(map(repr, patterns))})" if patterns else ""
