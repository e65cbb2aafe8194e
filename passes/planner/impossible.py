"""Why a strategy has no plan whatever the prices: found before anything is searched."""

from __future__ import annotations

from splitc.ir.strategies import DataParallel, HybridSingle, LateMultiply, LayerSeparation, LocalSGD, ModuloShard
from splitc.ir.strategy import Strategy
from splitc.passes.planner.cuts import cut_rules, following
from splitc.passes.planner.divisions import pinned_sizes
from splitc.passes.planner.pin_checks import contradictions, pinned_by, too_small, unmet, unsummed
from splitc.passes.planner.pins import UNPINNED
from splitc.passes.planner.request import Request


def impossible(request: Request, asked: Strategy) -> list[str]:
    """One line for each reason; none where a search makes sense."""
    found = contradictions(request, asked.name)
    match asked:
        case DataParallel() | LocalSGD():
            found += _of_replicas(request)
        case LateMultiply():
            found += _of_linear(request, asked)
        case ModuloShard():
            found += _of_linear(request, asked) + _of_groups(request, asked)
        case LayerSeparation():
            found += _of_roles(request, asked.n_c, asked.n_f, asked.sizes)
        case HybridSingle():
            found += _of_roles(request)
    return found


def unfollowed(request: Request, asked: Strategy) -> list[str]:
    """The pins that no plan of a strategy can follow, by name; none where they are not what is in the way."""
    if not request.pins:
        return []
    if isinstance(asked, LateMultiply):
        return unmet(request, request.world) + unsummed(request, request.pins)
    if not any(pin.only_in_groups for pin in request.pins.values()) and not isinstance(asked, ModuloShard):
        return []
    ranks, mp = request.world, asked.mp if isinstance(asked, ModuloShard) else None
    sizes = [size for size in range(2, ranks + 1) if ranks % size == 0 and mp in (None, size)]
    if isinstance(asked, LayerSeparation):
        ranks = (asked.sizes or (ranks - (asked.n_c or 0),))[-1] if asked.n_f is None else asked.n_f
        sizes = pinned_sizes(request, ranks)
        if not any(ranks % size == 0 for size in sizes):
            role = request.role_names(2)[1]
            return [f"pins ask for groups of {sizes[0]} ranks, which those of {role} cannot form"]
    return min((_in_groups_of(request, ranks, size) for size in sizes), key=len, default=[])


def _in_groups_of(request: Request, ranks: int, size: int) -> list[str]:
    """The pins that layers in groups of one size, and those before them, cannot follow."""
    inside = following(cut_rules(request.program, copies=True), request.linears)
    groups = {
        layer: pin.group or (size if pin.stage != 0 and (layer in inside or pin.divides) else 1)
        for layer, pin in request.pins.items()
    }
    return unmet(request, ranks, size) + unsummed(request, [layer for layer, each in groups.items() if ranks > each])


def _of_replicas(request: Request) -> list[str]:
    found = unsummed(request, [layer.name for layer in request.program.layers]) if request.world > 1 else []
    batch = request.bounds(request.world)[-1]
    if batch < request.world:
        found.append(f"{batch} examples cannot be shared out to {request.world} ranks")
    return found


def _of_linear(request: Request, asked: LateMultiply | ModuloShard) -> list[str]:
    if found := too_small(request, asked.name):
        return found
    late = isinstance(asked, LateMultiply)
    trained = [layer for layer in request.linears if request.gradient_of(layer)]
    if not trained:
        what = "trains a weight of its own" if late else "has parameters of its own to divide"
        return [f"no linear layer of the model {what}"]
    pins = [request.pins.get(layer, UNPINNED) for layer in trained]
    if all(pin.sync in ("all_reduce", "none") if late else pin.holding == "replicated" for pin in pins):
        patterns = pinned_by(request, request.linears)
        nothing = "nothing is left to divide: no linear layer may be sharded"
        return [f"no linear layer is left to multiply late{patterns}" if late else f"{nothing}{patterns}"]
    return []


def _of_groups(request: Request, asked: ModuloShard) -> list[str]:
    most = request.world // 2 if asked.period else request.world  # several groups, that they may average
    if any(request.world % size == 0 and asked.mp in (None, size) for size in range(2, most + 1)):
        return []
    several = " into several, whose parameters could be averaged" if asked.period else ""
    return [f"groups of mp = {asked.mp or 'two or more'} do not divide {request.world} ranks{several}"]


def _of_roles(
    request: Request, n_c: int | None = None, n_f: int | None = None, sizes: tuple[int, ...] = ()
) -> list[str]:
    """Why no numbers of ranks can meet the request."""
    world, roles = request.world, " and ".join(request.role_names(2))
    owners = [n for n, held in request.held.items() if any(h.parameter for h in held)]
    why = []
    if sizes and sum(sizes) != world:
        why.append(f"roles of {' + '.join(map(str, sizes))} ranks are {sum(sizes)}, but the world has {world}")
    elif world < 2:
        why.append(f"a world of {world} cannot be divided into {roles} ranks; it needs 2 ranks")
    elif n_c is not None and n_f is not None and n_c + n_f != world:
        why.append(f"n_c = {n_c} and n_f = {n_f} are {n_c + n_f} ranks, but the world has {world}")
    elif max(n_c or 1, n_f or 1) >= world:
        name, value = ("n_c", n_c) if (n_c or 1) >= world else ("n_f", n_f)
        why.append(f"{name} = {value} leaves no rank of {world} for the other role")
    if not owners:
        why.append("the model has no parameters, so no layers to separate")
    elif sizes and len(owners) < len(sizes):
        why.append(f"{len(owners)} layers have parameters, which is too few for {len(sizes)} roles")
    elif len(owners) == 1:
        why.append(f"only one layer, {owners[0]}, has parameters; both roles need at least one")
    return why
