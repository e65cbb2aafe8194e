"""From a wish for each layer to roles: which layers form a stage, and which ranks run it.

A layer runs on all ranks, each with its own examples, or on all ranks in model-parallel groups, or on one rank.  Layers
that follow each other with the same wish are one role; a value that comes back to an earlier kind of place begins a new
one, so that every role is run once in a step:

    conv (all)  conv (all)  fc6 (groups of 2)  fc7 (all)  fc8 (rank 0)
    `----- conv ------'     `----- fc ----'    `- fc2 -'  `-- fc3 --'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from splitc.errors import PlacementError
from splitc.ir.graph import info
from splitc.ir.plan import Grouping, LayerPlacement
from splitc.ir.program import Program
from splitc.passes.planner.cuts import cut_rules
from splitc.passes.planner.request import Request

ALL = "all"
ONE = "one"


@dataclass(frozen=True)
class LayerChoice:
    """Where a layer should run, "all" ranks or "one", and how its parameters are held and its gradients summed there.

    group: the size of its model-parallel groups; layers of one size, sharded or not, share them.
    """

    where: str = ALL
    holding: str = "replicated"
    sync: str = "all_reduce"
    group: int = 1
    split: str | None = None

    @property
    def place(self) -> tuple[str, int]:
        return self.where, self.group


@dataclass(frozen=True)
class Arrangement:
    """The roles of a plan, and the placement of every layer in them."""

    roles: Mapping[str, tuple[int, ...]]
    examples: Mapping[str, tuple[int, ...]]
    placements: Mapping[str, LayerPlacement]
    groups: Mapping[str, Grouping] = field(default_factory=dict)


def arrange(
    request: Request, wishes: Mapping[str, LayerChoice], scheme: str = "B/K", updates: str = "once"
) -> Arrangement:
    """The roles that the wishes make.

    scheme, updates: of the groups that the loss is in; groups before it work on all their examples at once.
    Raises PlacementError when layers that cannot be parted have wishes for different places.
    """
    program, world = request.program, request.world
    rules = cut_rules(program)
    for (i, j), why in rules.together.items():
        if wishes[i].place != wishes[j].place:
            raise PlacementError(f"{i} and {j} cannot be in different places: {why}")
    for layer, why in rules.conv_only.items():
        if wishes[layer].place != (ALL, 1):
            raise PlacementError(f"{layer} must be where the data is read: {why}")
    levels = _levels(program, wishes, rules.order, rules.together)
    inner = levels[info(program.loss).layer] if info(program.loss).layer in levels else max(levels.values())
    begins = {(levels[name], wish.place) for name, wish in wishes.items()}
    if (0, (ALL, 1)) not in begins:
        begins.add((-1, (ALL, 1)))  # somebody must read the data
    names = _names(sorted(begins, key=lambda key: (key[0], key[1] != (ALL, 1), key[1])))
    everyone = tuple(range(world))
    bounds = request.bounds(world)
    roles, examples, groups = {}, {}, {}
    for (level, (where, size)), role in names.items():
        roles[role] = everyone if where == ALL else (0,)
        examples[role] = bounds if where == ALL else (0, bounds[-1])
        if size > 1:
            has_loss = level == inner and (level, (where, size)) == (inner, wishes[info(program.loss).layer].place)
            groups[role] = Grouping(size, scheme, updates) if has_loss else Grouping(size, "BK")
    placements = {}
    for name, wish in wishes.items():
        replicas = 1 if wish.where == ONE else world // wish.group
        alone = replicas == 1 or not request.gradient_of(name)
        placements[name] = LayerPlacement(
            names[levels[name], wish.place],
            wish.holding,
            "none" if alone else wish.sync,
            wish.group if wish.holding == "sharded" else None,
            wish.split,
        )
    return Arrangement(roles, examples, placements, groups)


def _levels(
    program: Program,
    wishes: Mapping[str, LayerChoice],
    order: tuple[tuple[str, str], ...],
    together: Mapping[tuple[str, str], str],
) -> dict[str, int]:
    """How often the place changes on the way to each layer, at most."""
    levels = dict.fromkeys((layer.name for layer in program.layers), 0)
    for _ in range(len(levels) + 1):
        before = dict(levels)
        for i, j in order:
            levels[j] = max(levels[j], levels[i] + (wishes[i].place != wishes[j].place))
        for i, j in together:
            levels[i] = levels[j] = max(levels[i], levels[j])
        if levels == before:
            return levels
    raise PlacementError("layers that share a parameter lie before and after layers in another place")


def _names(places: list[tuple[int, tuple[str, int]]]) -> dict[tuple[int, tuple[str, int]], str]:
    """`all` for a single role; else `conv`, `fc`, `fc2`, ... in the order of the data's way."""
    if len(places) == 1:
        return {places[0]: "all"}
    return {place: "conv" if k == 0 else "fc" if k == 1 else f"fc{k}" for k, place in enumerate(places)}


def with_pins(
    request: Request, wishes: Mapping[str, LayerChoice], fc: LayerChoice | None = None
) -> dict[str, LayerChoice]:
    """The wishes, with the parts that pins ask for in their place.

    A layer pinned to role "conv" is on all ranks; to "fc", what `fc` wishes, by default on one rank.  A layer pinned to
    be sharded is in groups of the size that `fc` has, by default the smallest that divides the ranks.  Sync "none" is
    no wish of its own: it holds where nobody else trains the layer, which `fitting` checks.
    """
    smallest = next((size for size in range(2, request.world) if request.world % size == 0), max(2, request.world))
    pinned = dict(wishes)
    for layer, pin in request.pins.items():
        asked, wish = pin.placement, wishes[layer]
        if asked.role is not None:
            wish = (fc or LayerChoice(ONE)) if asked.role == "fc" else _whole(wish)
        if asked.group is not None:
            wish = replace(wish, group=asked.group) if asked.group > 1 else _whole(wish, wish.where)
        if asked.holding == "sharded":
            size = wish.group if wish.group > 1 else smallest if fc is None else fc.group
            wish = replace(wish, where=ALL, holding="sharded", group=asked.group or size, split="columns")
        elif asked.holding is not None:
            wish = replace(wish, holding=asked.holding, split=None)
        if asked.sync not in (None, "none"):
            wish = replace(wish, sync=asked.sync)
        if asked.split is not None:
            wish = replace(wish, split=asked.split)
        pinned[layer] = wish
    return pinned


def _whole(wish: LayerChoice, where: str = ALL) -> LayerChoice:
    """Without groups, on all ranks or one."""
    return replace(wish, where=where, group=1, holding="replicated", split=None)
