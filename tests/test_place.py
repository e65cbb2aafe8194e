"""Plans: the integer program against brute force, and what users are told."""

import itertools
import random
import time
from dataclasses import replace

import pytest

from passes.place import Place
from splitc.errors import PlacementError
from splitc.pipeline import run_passes
from splitc.plan import Placement, serve, share_out
from splitc.program import SizeSpec
from splitc.strategies import Auto, DataParallel, LayerSeparation, SingleDevice
from tests.small_programs import Row, separable, small_cluster, small_program


def place(program, world=4, strategy=None, cluster=None, **options):
    """The plan that the pass makes."""
    strategy = strategy if strategy is not None else LayerSeparation()
    pass_ = Place(cluster or small_cluster(), world, strategy, **options)
    return run_passes(program, [pass_]).required_plan


def fc_layers(plan):
    return {layer for layer, placed in plan.placements.items() if placed.role == "fc"}


def candidate(plan, strategy):
    (found,) = (c for c in plan.candidates if c.strategy == strategy)
    return found


# The oracle: every division and every assignment, priced from the program and nothing else.


def ring(nbytes, n, link):
    return 2 * (n - 1) * (link.latency + nbytes / n / link.bandwidth) if nbytes else 0.0


def crossing(program, fc):
    """(spec, whether a gradient comes back) of every value that crosses; None where one must not."""
    layer_of, values = program.layer_of, []
    for node in program.graph.nodes:
        readers = [layer_of[user.name] for user in node.users if user.op != "output"]
        if layer_of.get(node.name) in fc or not any(reader in fc for reader in readers):
            continue
        spec = node.meta["spec"]
        if spec.batch_dim is None:
            return None
        values.append((spec, spec.requires_grad and node.op != "placeholder"))
    return values


def falls_back(program, fc):
    layer_of = program.layer_of
    edges = [(layer_of.get(a.name), layer_of.get(b.name)) for a, b in program.edges()]
    return any(a in fc and b is not None and b not in fc for a, b in edges)


def price(program, cluster, fc, n_c, n_f, memory, global_batch):
    """Seconds of a step, None when the assignment is not allowed."""
    values = crossing(program, fc)
    owners = {layer.name for layer in program.layers if layer.holdings}
    if values is None or falls_back(program, fc) or not owners & fc or not owners - fc:
        return None
    conv = {layer.name for layer in program.layers} - fc
    held = {
        role: {h for layer in program.layers if layer.name in inside for h in layer.holdings}
        for role, inside in (("conv", conv), ("fc", fc))
    }
    if held["conv"] & held["fc"]:
        return None
    bounds = share_out(global_batch, n_c)
    served = serve(bounds, n_f)
    if 0 in [b - a for a, b in itertools.pairwise((*bounds,))] or len(set(served)) <= n_f:
        return None
    batch = {
        role: max(b - a for a, b in itertools.pairwise(ends))
        for role, ends in (("conv", bounds), ("fc", served))
    }
    device, link = cluster.device_for(n_c + n_f), cluster.link
    rate, moving = device.flop_rate["float32"], device.memory_bandwidth
    compute, need, sync = 0.0, {}, {}
    for role, inside, n in (("conv", conv, n_c), ("fc", fc, n_f)):
        need[role] = 0.0
        for name in inside:
            cost = program.costs[name].at(batch[role])
            compute += max(cost.forward_flops / rate, cost.forward_moved / moving)
            compute += max(cost.backward_flops / rate, cost.backward_moved / moving)
            need[role] += cost.kept
        parameters = [program.holdings[h] for h in held[role]]
        gradient = sum(h.nbytes for h in parameters if h.trainable)
        need[role] += sum(h.nbytes for h in parameters) + (3 if n > 1 else 2) * gradient
        sync[role] = ring(gradient, n, link)
    most = max(batch.values())
    partners = max(-(-n_c // n_f), -(-n_f // n_c))
    if n_f > n_c:  # the fc ranks' shares may lie across those of the conv ranks
        pieces = [
            [max(a, c) < min(b, d) for c, d in itertools.pairwise(served)]
            for a, b in itertools.pairwise(bounds)
        ]
        partners = max(*(sum(row) for row in pieces), *(sum(col) for col in zip(*pieces, strict=True)))
    exchange = 0.0
    for spec, gradient in values:
        there = partners * link.latency + spec.nbytes(most) / link.bandwidth
        exchange += there * (2 if gradient else 1)
        need["fc"] += spec.nbytes(batch["fc"]) * (2 if gradient else 1)
        need["conv"] += spec.nbytes(batch["conv"]) if gradient else 0
    if max(need.values()) > memory * (1 + 1e-9):
        return None
    return compute + exchange + max(sync.values())


def brute_force(program, cluster, world, memory, global_batch, allowed=lambda fc: True):
    """Samples per second of the best separation; 0 when there is none."""
    names, best = [layer.name for layer in program.layers], 0.0
    for n_f in range(1, world):
        batch = global_batch or program.batch * (world - n_f)
        for size in range(1, len(names)):
            for fc in map(set, itertools.combinations(names, size)):
                if allowed(fc):
                    seconds = price(program, cluster, fc, world - n_f, n_f, memory, batch)
                    best = max(best, batch / seconds if seconds else 0.0)
    return best


def random_program(rng):
    """Two to six layers in any shape that a graph can have, on wires of any speed."""
    rows, count = [], rng.randint(2, 6)
    for i in range(count):
        earlier = [row.name for row in rows] + ["images"]
        reads = set(rng.sample(earlier, min(len(earlier), rng.randint(1, 3))))
        if i == count - 1:
            reads |= {"labels"} | ({rows[-1].name} if rows else set())
        kind = rng.choice(["conv", "fc", "none"]) if i else "conv"
        rows.append(
            Row(
                f"layer{i}",
                tuple(sorted(reads)),
                parameters={"conv": rng.randint(10, 500), "fc": rng.randint(500, 30_000)}.get(kind, 0),
                width=rng.randint(1, 300),
                flops=rng.uniform(1e3, 1e6),
                moved=rng.uniform(1e2, 1e6),
                kept=rng.uniform(0, 1e4),
                trains=rng.random() > 0.2,
                batched=rng.random() > 0.1,
                shares=None,
            )
        )
    if rng.random() < 0.3 and rows[0].parameters and count > 3:
        rows[2] = replace(rows[2], parameters=0, shares=rows[0].name)
    return small_program(rows, batch=rng.randint(1, 6), inputs={"images": 8, "labels": 1})


@pytest.mark.parametrize("seed", range(60))
def test_the_plan_is_as_fast_as_the_best_of_all_assignments(seed) -> None:
    rng = random.Random(seed)
    program, world = random_program(rng), rng.randint(2, 5)
    cluster = small_cluster(
        bandwidth=10 ** rng.uniform(3, 7),
        latency=10 ** rng.uniform(-6, -2),
        duplex_device=None,
    ) if False else small_cluster(10 ** rng.uniform(3, 7), 10 ** rng.uniform(-6, -2))
    memory = rng.choice([1e9, 1e9, 10 ** rng.uniform(3.5, 5.5)])
    global_batch = rng.choice([None, None, rng.randint(1, 20)])
    best = brute_force(program, cluster, world, memory, global_batch)
    options = {"cluster": cluster, "memory": memory, "global_batch": global_batch}
    if best == 0.0:
        with pytest.raises(PlacementError):
            place(program, world, **options)
        return
    plan = place(program, world, **options)
    assert plan.samples_per_second == pytest.approx(best, rel=1e-6)
    assert plan.proof == "optimal"
    assert plan.gap == 0.0


def test_the_random_programs_meet_every_case() -> None:
    """Else the test above proves less than it says."""
    possible, tied = 0, 0
    for seed in range(60):
        rng = random.Random(seed)
        program, world = random_program(rng), rng.randint(2, 5)
        cluster = small_cluster(10 ** rng.uniform(3, 7), 10 ** rng.uniform(-6, -2))
        memory = rng.choice([1e9, 1e9, 10 ** rng.uniform(3.5, 5.5)])
        global_batch = rng.choice([None, None, rng.randint(1, 20)])
        possible += brute_force(program, cluster, world, memory, global_batch) > 0
        held = [h for layer in program.layers for h in layer.holdings]
        tied += len(held) > len(set(held))
    assert 20 <= possible <= 55
    assert tied >= 3
