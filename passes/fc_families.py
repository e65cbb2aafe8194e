"""Offers of the strategies that treat fully connected layers apart on the same ranks.

    hybrid_single   the fc layers on one of the ranks that run the others        Practical Lessons 2.2
    late_multiply   fc layers replicated, X and E gathered in place of gradients Practical Lessons 2.1
    modulo_shard    fc layers divided over groups of mp ranks                    SplitBrain 3, Krizhevsky 2014
    mixed           whatever the pins ask for, layer by layer

A linear layer is late-multiplied where that is faster than the ring all-reduce of its gradient: with b examples on each
of n ranks, r rows of each and features i -> o,

    (n - 1) (b r (i + o)) / bandwidth + (n - 1) / 3 compute  <  2 (n - 1) / n (i + 1) o / bandwidth        (1)

and it is divided over a group of K where the time it saves, of computing and of summing its gradient, is more than what
gathering its output takes: the computation-to-communication ratio of SplitBrain's listing 1, with the ratio at which
both take as long on the cluster at hand as its threshold                                                  (2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from cost_models.alpha_beta import all_gather
from passes.arrange import Arrangement, Wish, arrange, with_pins
from passes.cuts import cut_rules
from passes.families import Offer, Request, largest, shortage, smallest
from passes.pins import contradictions
from passes.wire_price import rewritten, step_seconds
from splitc.elementwise import is_elementwise
from splitc.errors import PlacementError
from splitc.linears import Linear, linear_layers
from splitc.pipeline import Pass
from splitc.plan import Plan
from splitc.strategies import LateMultiply, ModuloShard

Rewrites = Callable[[], Iterable[Pass]]
"""The passes that make a program of a plan, for its price."""


@dataclass(frozen=True)
class Pricing:
    """How a plan that is only considered becomes an offer."""

    request: Request
    rewrites: Rewrites

    def offer(self, strategy: str, made: Arrangement, exact: bool = True) -> Offer:
        """The arrangement as a priced plan of `strategy`; infeasible where a rank has too little memory."""
        request = self.request
        plan = Plan(
            strategy,
            request.world,
            made.roles,
            made.placements,
            made.examples,
            request.cluster.name,
            groups=made.groups,
            all_reduce=request.all_reduce,
        )
        empty = Offer(strategy, feasible=False, roles=made.roles, examples=made.examples, exact=exact)
        if not smallest(request.bounds(request.world)):
            return replace(empty, why=f"{plan.global_batch} examples leave some of {request.world} ranks without any")
        try:
            seconds = step_seconds(request, rewritten(request, plan, self.rewrites()))
        except PlacementError as error:
            return replace(empty, why=str(error))
        why = _memory_shortage(request, plan)
        return Offer(
            strategy,
            feasible=not why,
            why="; ".join(why),
            roles=made.roles,
            examples=made.examples,
            role_of={name: place.role or "" for name, place in made.placements.items()},
            step_seconds=seconds,
            most=0.0 if why or not seconds else plan.global_batch / seconds,
            searched=False,
            placements=made.placements,
            groups=made.groups,
            exact=exact,
        )


def _memory_shortage(request: Request, plan: Plan) -> list[str]:
    """A line when rank 0, which has every role, needs more than there is."""
    needed = {}
    for name, place in plan.placements.items():
        assert place.role is not None
        worked = plan.worked(place.role, plan.roles[place.role][0])
        part = place.group if place.holding == "sharded" and place.group else 1
        needed[name] = request.layer_memory(name, worked, place.sync == "all_reduce") / part
    everyone = tuple(range(request.world))
    return shortage("conv", everyone, sum(needed.values()), request.memory_of(request.world), needed)


def late_multiply(pricing: Pricing, options: LateMultiply) -> Offer:
    """Late multiply of the linear layers for which it is the faster way; of all of them where it is for none."""
    request, name = pricing.request, "late_multiply"
    if why := contradictions(request.pins, name) or _too_small(request, name):
        return Offer(name, feasible=False, why="; ".join(why))
    linears = {k: v for k, v in linear_layers(request.program).items() if request.gradient_of(k)}
    if not linears:
        return Offer(name, feasible=False, why="no linear layer of the model trains a weight of its own")
    cheaper = [layer for layer, uses in linears.items() if _late_saves(request, layer, uses) > 0]
    wishes = {
        layer.name: Wish(sync="late_multiply" if layer.name in (cheaper or linears) else "all_reduce")
        for layer in request.program.layers
    }
    return _arranged(pricing, name, with_pins(request, wishes))


def _late_saves(request: Request, layer: str, uses: tuple[Linear, ...]) -> float:
    """Seconds: the right side of (1) less the left one."""
    n, link = request.world, request.cluster.link
    batch = largest(request.bounds(n))
    gathered = sum(spec.nbytes(batch) for use in uses for spec in (use.value.meta["spec"], use.node.meta["spec"]))
    compute = request.seconds(layer, batch, request.cluster.device_for(n))
    late = all_gather(n * gathered, n, link) + (n - 1) / 3 * compute
    return request.all_reduce_seconds(request.gradient_of(layer), n) - late


def modulo_shard(pricing: Pricing, options: ModuloShard) -> Offer:
    """The fastest group size, and the fastest first layer to shard, of those asked for."""
    request, name = pricing.request, "modulo_shard"
    exact = options.updates != "every"
    if why := contradictions(request.pins, name) or _too_small(request, name):
        return Offer(name, feasible=False, why="; ".join(why), exact=exact)
    linears = {k: v for k, v in linear_layers(request.program).items() if request.gradient_of(k)}
    if not linears:
        why = ["no linear layer of the model has parameters of its own to divide"]
        return Offer(name, feasible=False, why="; ".join(why), exact=exact)
    sizes = [k for k in range(2, request.world + 1) if request.world % k == 0 and options.mp in (None, k)]
    if not sizes:
        why = [f"groups of mp = {options.mp} do not divide {request.world} ranks"]
        return Offer(name, feasible=False, why="; ".join(why), exact=exact)
    scheme = options.scheme or "B/K"
    found: list[tuple[float, int, dict[str, Wish]]] = []
    for size in sizes:
        for wishes in _sharded_from(request, linears, size):
            found.append((_estimate(request, linears, wishes, size), size, wishes))
    if not found:
        why = ["the linear layers cannot be parted from the layers before them"]
        return Offer(name, feasible=False, why="; ".join(why), exact=exact)
    best: Offer | None = None
    for _, size, wishes in sorted(found, key=lambda each: each[0])[:4]:
        pinned = with_pins(request, wishes, fc=Wish(group=size, holding="sharded", split="columns"))
        for layer, wish in pinned.items():
            if wish.holding == "sharded" and layer not in linears:
                pinned[layer] = replace(wish, holding="replicated", split=None)
        offer = _arranged(pricing, name, pinned, scheme, options.updates or "once", exact)
        if best is None or (offer.feasible, -offer.step_seconds) > (best.feasible, -best.step_seconds):
            best = offer
    assert best is not None
    return best


def _sharded_from(request: Request, linears: Mapping[str, tuple[Linear, ...]], size: int) -> Iterable[dict[str, Wish]]:
    """For every linear layer as the first that is divided: it and all that follow from it are in groups."""
    rules = cut_rules(request.program)
    for first in linears:
        inside = {first}
        for _ in request.program.layers:
            more = {j for i, j in rules.order if i in inside}
            more |= {j for i, j in rules.together if i in inside} | {i for i, j in rules.together if j in inside}
            if more <= inside:
                break
            inside |= more
        if inside & set(rules.conv_only):
            continue
        wishes = {layer.name: Wish(group=size if layer.name in inside else 1) for layer in request.program.layers}
        sharded = [
            layer
            for layer, uses in linears.items()
            if layer in inside and (layer == first or _shard_saves(request, layer, uses, size) > 0)
        ]
        for layer in sharded:
            wishes[layer] = replace(wishes[layer], holding="sharded", split="columns")
        yield wishes


def _shard_saves(request: Request, layer: str, uses: tuple[Linear, ...], size: int) -> float:
    """Seconds that dividing a layer of a group saves, less those of gathering its output: equation (2)."""
    n, link = request.world, request.cluster.link
    batch = size * largest(request.bounds(n))
    device = request.cluster.device_for(n)
    saved = request.seconds(layer, batch, device) * (1 - 1 / size)
    gradient = request.gradient_of(layer)
    replicas = n // size
    if replicas > 1:
        saved += request.all_reduce_seconds(gradient, replicas)
        saved -= request.all_reduce_seconds(gradient / size, replicas)
    gathered = sum(all_gather(use.node.meta["spec"].nbytes(batch), size, link) for use in uses)
    return saved - gathered


def _with_rows(request: Request, wishes: Mapping[str, Wish]) -> dict[str, Wish]:
    """Divide a layer by rows where its input comes in parts and summing its output is cheaper than gathering both.

    Gathering features i forward and scattering their gradients backward, and gathering o: 2 i + o; summing o: 2 o.
    Raises PlacementError where a pin asks for rows and the input does not come in parts.
    """
    divided = dict(wishes)
    linears = linear_layers(request.program)
    layer_of_output = {uses[0].node: layer for layer, uses in linears.items() if len(uses) == 1}
    for layer, uses in linears.items():
        if divided[layer].holding != "sharded":
            continue
        pin = request.pins.get(layer)
        asked = pin.placement.split if pin is not None else None
        source = _through_elementwise(uses[0]) if len(uses) == 1 else None
        before = layer_of_output.get(source) if source is not None else None
        if before is None or divided[before].split != "columns" or divided[before].place != divided[layer].place:
            if asked == "rows":
                raise PlacementError(
                    f"{layer} is pinned to be divided by rows, but no layer divided by columns feeds it"
                )
            continue
        assert source is not None
        features_in, features_out = (node.meta["spec"].shape[-1] for node in (source, uses[0].node))
        if asked == "rows" or (asked is None and 2 * features_out < 2 * features_in + features_out):
            divided[layer] = replace(divided[layer], split="rows")
    return divided


def _through_elementwise(linear: Linear) -> fx.Node | None:
    """The node whose parts a linear layer would read: up through elementwise ones that nobody else reads."""
    node = linear.value
    while len(node.users) == 1:
        tensors = node.all_input_nodes
        if not is_elementwise(node):
            return node
        if len(tensors) != 1:
            return None
        (node,) = tensors
    return None


def _estimate(
    request: Request, linears: Mapping[str, tuple[Linear, ...]], wishes: Mapping[str, Wish], size: int
) -> float:
    """Seconds of a step, roughly: which of many first layers are worth a full price."""
    n, link = request.world, request.cluster.link
    batch, device = largest(request.bounds(n)), request.cluster.device_for(n)
    seconds = 0.0
    for layer, wish in wishes.items():
        gradient, replicas = request.gradient_of(layer), n // wish.group
        part = size if wish.holding == "sharded" else 1
        seconds += request.seconds(layer, batch * wish.group, device) / part
        if gradient and replicas > 1:
            seconds += request.all_reduce_seconds(gradient / part, replicas)
        if wish.holding == "sharded":
            seconds += sum(
                2 * all_gather(use.node.meta["spec"].nbytes(batch * size), size, link) for use in linears[layer]
            )
    return seconds


def mixed(pricing: Pricing) -> Offer:
    """All layers replicated and all-reduced, but where pins ask for something else."""
    request, name = pricing.request, "mixed"
    asked = [pin.placement for pin in request.pins.values()]
    if not any(p.holding or p.group or p.split or p.sync in ("late_multiply", "parameter_server") for p in asked):
        return Offer(name, feasible=False, why="no pin asks for a holding or a sync")
    wishes = with_pins(request, {layer.name: Wish() for layer in request.program.layers})
    if why := _unfit(request, wishes):
        return Offer(name, feasible=False, why="; ".join(why))
    return _arranged(pricing, name, wishes)


def _unfit(request: Request, wishes: Mapping[str, Wish]) -> list[str]:
    """What pins ask of layers that cannot have it."""
    linears = linear_layers(request.program)
    why = []
    for layer, wish in wishes.items():
        asks = (
            "to be sharded"
            if wish.holding == "sharded"
            else "to be late-multiplied"
            if wish.sync == "late_multiply"
            else ""
        )
        pin = request.pins.get(layer)
        if asks and layer not in linears and pin is not None and request.gradient_of(layer):
            why.append(f"pin {pin.pattern!r} asks {layer} {asks}, but only linear layers of their own weight can be")
        if wish.holding == "subnet":
            why.append(f"{layer} asks for holding 'subnet', which is approximate and cannot be planned yet")
        if request.world % wish.group:
            why.append(f"{layer} asks for groups of {wish.group}, which do not divide {request.world} ranks")
        if wish.sync == "parameter_server":
            why.append(f"{layer} asks for sync 'parameter_server', which only the strategy of that name has")
        if wish.group > 1 and wish.sync == "late_multiply":
            why.append(f"{layer} asks for groups and for late multiply, which is for layers that all ranks have whole")
    return why


def _too_small(request: Request, strategy: str) -> list[str]:
    return [] if request.world > 1 else [f"{strategy} needs at least 2 ranks"]


def _arranged(
    pricing: Pricing,
    strategy: str,
    wishes: Mapping[str, Wish],
    scheme: str = "B/K",
    updates: str = "once",
    exact: bool = True,
) -> Offer:
    try:
        wishes = _with_rows(pricing.request, wishes)
        return pricing.offer(strategy, arrange(pricing.request, wishes, scheme, updates), exact)
    except PlacementError as error:
        return Offer(strategy, feasible=False, why=str(error), exact=exact)
