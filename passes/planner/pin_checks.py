"""Pins that a strategy cannot follow, found before it makes a plan.

Only linear layers, embeddings and normalisations of features can be divided; group sizes divide the world; gradients
of what several ranks train are summed.  Every strategy asks here, so that none ignores a part of a pin silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from splitc.ir.placements import SPLITS
from splitc.passes.planner.cuts import cut_rules, following
from splitc.passes.planner.pins import UNPINNED, Pin, quote_layers
from splitc.passes.planner.request import Request
from splitc.passes.planner.syncs import sync_named


@dataclass(frozen=True)
class PinWords:
    """The words that a strategy knows in pins.

    stages: roles that pins can name; 0: the only one is `role`.  syncs: how it sums gradients.  divides: it divides
    layers over groups of any size.
    """

    stages: int = 0
    role: str = "all"
    syncs: tuple[str, ...] = ("all_reduce", "none")
    divides: bool = False

    def roles(self, request: Request, pin: Pin) -> tuple[str, ...]:
        """Their names; with the pin's own name for one of them, if it has another."""
        if not self.stages:
            return (self.role,)
        names = (*request.role_names(2), *(f"stage{stage}" for stage in range(2, self.stages)))
        own = pin.role is not None and pin.stage is not None and pin.stage < self.stages
        return (*names, str(pin.role)) if own else names


def contradictions(request: Request, strategy: str, words: PinWords) -> list[str]:
    """Why `strategy` cannot follow the pins: one line for each part of a pin that it does not have."""
    asking: dict[tuple[str, str], list[str]] = {}
    for layer, pin in request.pins.items():
        for part, value, known in (
            ("role", pin.role, words.roles(request, pin)),
            ("holding", pin.holding, ("replicated", "sharded") if words.divides else ("replicated",)),
            ("sync", pin.sync, words.syncs),
            ("group", pin.group, (pin.group,) if words.divides else (1,)),
            ("split", pin.split, SPLITS if words.divides else ()),
        ):
            if value is not None and value not in known:
                has = f"has only {', '.join(map(str, known))}" if known else "divides no layer"
                problem = f"asks for {part} {value!r} of ..., but {strategy} {has}"
                asking.setdefault((pin.pattern, problem), []).append(layer)
    return _told(asking)


def _told(asking: Mapping[tuple[str, str], Sequence[str]]) -> list[str]:
    """A line for each pattern and problem of its pin, in which `...` stands for the layers that have it."""
    return [
        f"pin {pattern!r} {problem.replace('...', quote_layers(layers))}"
        for (pattern, problem), layers in asking.items()
    ]


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
        found = [*_of_its_kind(request, layer, pin), *_of_groups(pin, ranks, size)] or _of_its_place(
            request, layer, pin, size
        )
        for problem in found:
            asking.setdefault((pin.pattern, problem), []).append(layer)
    return _told(asking)


def _of_its_kind(request: Request, layer: str, pin: Pin) -> Iterator[str]:
    """Yield what the layer itself does not allow; `...` stands for its name."""
    owns = any(request.program.tensors[name].parameter for name in request.program.layer(layer).tensors)
    if pin.holding == "sharded" and owns and layer not in request.divisible:
        yield "asks ... to be sharded, but only linear layers, embeddings and normalisations of features can be"


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


def _of_its_place(request: Request, layer: str, pin: Pin, size: int | None) -> Iterator[str]:
    """Yield parts of a pin that contradict its other parts, or the place of the layer."""
    if pin.split is not None and not pin.divides:
        yield f"asks for split {pin.split!r} of ..., which is not sharded; ask for holding 'sharded' as well"
    yield from sync_named(pin.sync).unmet(request, layer, pin, size)


def unmet_in_groups(request: Request, ranks: int, sizes: Iterable[int]) -> list[str]:
    """The pins that layers in groups of one size, and those before them, cannot follow; of the size with the fewest."""
    inside = following(cut_rules(request.program, copies=True), request.linears)

    def unmet_with(size: int) -> list[str]:
        groups = {
            layer: pin.group or (size if pin.stage != 0 and (layer in inside or pin.divides) else 1)
            for layer, pin in request.pins.items()
        }
        apart = [layer for layer, each in groups.items() if ranks > each]
        return unmet(request, ranks, size) + unsummed(request, apart)

    return min(map(unmet_with, sizes), key=len, default=[])


def too_small(request: Request, strategy: str) -> list[str]:
    """A line if there is only one rank."""
    return [] if request.world > 1 else [f"{strategy} needs at least 2 ranks"]


def unreplicated(request: Request) -> list[str]:
    """Why not all ranks can hold all layers."""
    found = unsummed(request, [layer.name for layer in request.program.layers]) if request.world > 1 else []
    batch = request.bounds(request.world)[-1]
    if batch < request.world:
        found.append(f"{batch} examples cannot be shared out to {request.world} ranks")
    return found


def no_linear(
    request: Request,
    strategy: str,
    what: str,
    left: str,
    keeps: Callable[[Pin], bool],
    layers: Iterable[str] | None = None,
    kind: str = "linear layer",
) -> list[str]:
    """Why a strategy has no linear layer to divide, or other layers of a kind to multiply late.

    what: that one must do.  left: that none is left, where each of them has a pin that `keeps` it as it is.
    """
    among = request.linears if layers is None else layers
    trained = [layer for layer in among if request.gradient_of(layer)]
    if why := too_small(request, strategy):
        return why
    if not trained:
        return [f"no {kind} of the model {what}"]
    if not all(keeps(request.pins.get(layer, UNPINNED)) for layer in trained):
        return []
    patterns = dict.fromkeys(pin.pattern for layer, pin in request.pins.items() if layer in among)
    return [left + (f" (pin {', '.join(map(repr, patterns))})" if patterns else "")]
