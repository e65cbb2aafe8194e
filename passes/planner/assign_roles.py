"""Make the roles of a plan from a choice for each layer.

A layer runs on all ranks, each with its own examples, or on all ranks in model-parallel groups, or on one rank.
Consecutive layers with the same choice are one role; a value that returns to an earlier kind of place starts a new
role, so that every role runs once in a step:

    conv (all)  conv (all)  fc6 (groups of 2)  fc7 (all)   fc8 (rank 0)
    `----- stage0 ----'     `--- stage1 ----'  `- stage2 '  `- stage3 -'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from splitc.errors import PlacementError
from splitc.ir.graph import info
from splitc.ir.placements import Grouping, LayerPlacement
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.passes.planner.cuts import cut_rules
from splitc.passes.planner.request import Request
from splitc.runtime.collectives.layouts import State
from splitc.runtime.spec import Rounds

ALL = "all"
ONE = "one"


@dataclass(frozen=True)
class LayerChoice:
    """On which ranks a layer should run, "all" or "one", how its parameters are held and its gradients summed.

    group: the size of its model-parallel groups; layers with groups of one size, sharded or not, share them.
    """

    where: str = ALL
    holding: str = "replicated"
    sync: str = "all_reduce"
    group: int = 1
    split: str | None = None
    state: str | None = None
    arrives: str | None = None

    @property
    def place(self) -> tuple[str, int]:
        return self.where, self.group


def assign_roles(
    request: Request,
    strategy: str,
    choices: Mapping[str, LayerChoice],
    scheme: str = "B/K",
    updates: str = "once",
    exact: bool = True,
    rounds: Rounds | None = None,
) -> Plan:
    """The plan with the roles that the choices make.

    scheme, updates: of the groups that hold the loss; other groups have one microbatch.
    Raises PlacementError when layers that cannot be separated have choices of different places.
    """
    program, world = request.program, request.world
    rules = cut_rules(program)
    for (i, j), why in rules.together.items():
        if choices[i].place != choices[j].place:
            raise PlacementError(f"{i} and {j} cannot be in different places: {why}")
    for layer, why in rules.reader_only.items():
        if choices[layer].place != (ALL, 1):
            raise PlacementError(f"{layer} must be where the data is read: {why}")
    levels = _levels(program, choices, rules.order, rules.together)
    loss_layer = info(program.loss).layer
    loss_place = (levels[loss_layer], choices[loss_layer].place) if loss_layer in levels else None
    places = {(levels[name], choice.place) for name, choice in choices.items()}
    if (0, (ALL, 1)) not in places:
        places.add((-1, (ALL, 1)))  # a role must read the data
    ordered = sorted(places, key=lambda key: (key[0], key[1] != (ALL, 1), key[1]))
    names = dict(zip(ordered, request.role_names(len(ordered)), strict=True))
    bounds = request.bounds(world)
    roles, offsets, groups = {}, {}, {}
    for place, role in names.items():
        _, (where, size) = place
        roles[role] = tuple(range(world)) if where == ALL else (0,)
        offsets[role] = bounds if where == ALL else (0, bounds[-1])
        if size > 1:
            in_turns = place == loss_place and not any(choice.state for choice in choices.values())
            groups[role] = Grouping(size, scheme, updates) if in_turns else Grouping(size, "BK")
    placements = {}
    for name, choice in choices.items():
        role = names[levels[name], choice.place]
        placements[name] = layer_placement(request, name, role, choice, rounds.unit if rounds else world, bool(rounds))
    plan = Plan(strategy, world, roles, placements, offsets, groups=groups, all_reduce=request.all_reduce, exact=exact)
    return replace(plan, rounds=rounds)


def layer_placement(
    request: Request, layer: str, role: str, choice: LayerChoice, ranks: int, in_rounds: bool = False
) -> LayerPlacement:
    """The placement that a choice makes in a role in which so many ranks train together."""
    apart = choice.holding == "replicated" and choice.state == State.BATCH  # on each rank's own examples
    alone = choice.where == ONE or (choice.group == ranks and not apart)
    sync = choice.sync if not alone else "average" if in_rounds else "none"
    return LayerPlacement(
        role,
        choice.holding,
        sync if request.gradient_of(layer) else "none",
        choice.group if choice.holding == "sharded" else None,
        choice.split,
        choice.state if choice.group > 1 else None,
        choice.arrives if choice.group > 1 else None,
    )


def _levels(
    program: Program,
    choices: Mapping[str, LayerChoice],
    order: tuple[tuple[str, str], ...],
    together: Mapping[tuple[str, str], str],
) -> dict[str, int]:
    """How often the place changes on the way to each layer, at most."""
    levels = dict.fromkeys((layer.name for layer in program.layers), 0)
    for _ in range(len(levels) + 1):
        before = dict(levels)
        for i, j in order:
            levels[j] = max(levels[j], levels[i] + (choices[i].place != choices[j].place))
        for i, j in together:
            levels[i] = levels[j] = max(levels[i], levels[j])
        if levels == before:
            return levels
    why = next(why for (i, _), why in together.items() if levels[i] != before[i])
    raise PlacementError(f"layers that cannot be separated lie before and after layers in another place: {why}")


def apply_pins(
    request: Request, choices: Mapping[str, LayerChoice], second: LayerChoice | None = None
) -> dict[str, LayerChoice]:
    """The choices, with the parts that pins fix in place of the strategy's.

    A layer pinned to the first role is on all ranks; to the second, as `second` says, by default on one rank.  A layer
    pinned to be sharded is in groups of the size of `second`, by default the smallest that divides the world.  Sync
    "none" changes nothing here: `pin_checks` refuses it for layers that several ranks train.
    """
    smallest = next((size for size in range(2, request.world) if request.world % size == 0), max(2, request.world))
    pinned = dict(choices)
    for layer, pin in request.pins.items():
        choice = choices[layer]
        if pin.role is not None:
            choice = (second or LayerChoice(ONE)) if pin.stage == 1 else _ungrouped(choice)
        if pin.group is not None:
            choice = replace(choice, group=pin.group) if pin.group > 1 else _ungrouped(choice, choice.where)
        if pin.holding == "sharded" or (pin.holding is None and pin.split is not None):
            size = choice.group if choice.group > 1 else smallest if second is None else second.group
            choice = replace(choice, where=ALL, holding="sharded", group=pin.group or size, split="columns")
        elif pin.holding is not None:
            choice = replace(choice, holding=pin.holding, split=None)
        if pin.sync not in (None, "none"):
            choice = replace(choice, sync=pin.sync)
        if pin.split is not None:
            choice = replace(choice, split=pin.split)
        if pin.state is not None:
            choice = replace(choice, state=pin.state)
        if pin.arrives is not None:
            choice = replace(choice, arrives=pin.arrives)
        pinned[layer] = choice
    return pinned


def _ungrouped(choice: LayerChoice, where: str = ALL) -> LayerChoice:
    """The choice without groups, on all ranks or one."""
    return replace(choice, where=where, group=1, holding="replicated", split=None)
