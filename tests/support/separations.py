"""The rates of separations into two roles, each priced from the graph with nothing that the planner computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from splitc.ir.cluster import Cluster
from splitc.ir.device import Link
from splitc.ir.graph import tensor_spec
from splitc.ir.program import Program, TensorSpec
from splitc.ir.shares import serve, share_out
from splitc.passes.bucket_gradients import BucketGradients
from tests.support.op_sums import bytes_of, flops_of


def ring(nbytes: float, n: int, link: Link) -> float:
    return 2 * (n - 1) * (link.latency + nbytes / n / link.bandwidth) if nbytes else 0.0


def crossing(program: Program, fc: set[str]) -> list[tuple[TensorSpec, bool]] | None:
    """(spec, whether a gradient comes back) of every value that crosses; None where one must not."""
    layer_of = program.layer_of
    values: list[tuple[TensorSpec, bool]] = []
    for node in program.graph.nodes:
        readers = [layer_of[user.name] for user in node.users if user.op != "output"]
        if node.op == "get_attr" or layer_of.get(node.name) in fc or not any(reader in fc for reader in readers):
            continue
        spec = tensor_spec(node)
        if spec.batch_dim is None:
            return None
        values.append((spec, spec.requires_grad and node.op != "placeholder"))
    return values


def falls_back(program: Program, fc: set[str]) -> bool:
    layer_of = program.layer_of
    edges = [(layer_of.get(a.name), layer_of.get(b.name)) for a, b in program.edges()]
    return any(a in fc and b is not None and b not in fc for a, b in edges)


def price(
    program: Program, cluster: Cluster, fc: set[str], n_c: int, n_f: int, memory: float, global_batch: int
) -> float | None:
    """Seconds of a step, None when the assignment is not allowed."""
    values = crossing(program, fc)
    owners = {layer.name for layer in program.layers if layer.tensors}
    if values is None or falls_back(program, fc) or not owners & fc or not owners - fc:
        return None
    conv = {layer.name for layer in program.layers} - fc
    held = {
        role: {h for layer in program.layers if layer.name in inside for h in layer.tensors}
        for role, inside in (("conv", conv), ("fc", fc))
    }
    if held["conv"] & held["fc"]:
        return None
    bounds = {"conv": share_out(global_batch, n_c)}
    bounds["fc"] = serve(bounds["conv"], n_f)
    shares = {role: [b - a for a, b in itertools.pairwise(ends)] for role, ends in bounds.items()}
    if min(min(each) for each in shares.values()) == 0:
        return None
    batch = {role: max(each) for role, each in shares.items()}
    device, link = cluster.device_for(n_c + n_f), cluster.link
    rate, moving = device.flop_rate["float32"], device.memory_bandwidth
    compute = 0.0
    need: dict[str, float] = {}
    backward: dict[str, float] = {}
    for role, inside, n in (("conv", conv, n_c), ("fc", fc, n_f)):
        need[role] = 0.0
        for name in inside:
            cost = program.costs[name].at(batch[role])
            compute += max(flops_of(cost.forward_ops) / rate, bytes_of(cost.forward_ops) / moving)
            backward[name] = max(flops_of(cost.backward_ops) / rate, bytes_of(cost.backward_ops) / moving)
            compute += backward[name]
            need[role] += cost.saved_bytes
        parameters = [program.tensors[h] for h in held[role]]
        gradient = sum(h.nbytes for h in parameters if h.trainable)
        compute += 8 * gradient / moving * (role == "conv")  # the optimizer; of fc under the backward of conv
        need[role] += sum(h.nbytes for h in parameters) + (3 if n > 1 else 2) * gradient
    most = max(batch.values())
    meets = [
        [max(a, c) < min(b, d) for c, d in itertools.pairwise(bounds["fc"])]
        for a, b in itertools.pairwise(bounds["conv"])
    ]
    partners = max(*map(sum, meets), *map(sum, zip(*meets, strict=True)))
    exchange = 0.0
    for spec, gradient in values:
        there = partners * link.latency + spec.nbytes(most) / link.bandwidth
        exchange += there * (2 if gradient else 1)
        need["fc"] += spec.nbytes(batch["fc"]) * (2 if gradient else 1)
        need["conv"] += spec.nbytes(batch["conv"]) * (2 if gradient else 1)
    if max(need.values()) > memory * (1 + 1e-9):
        return None
    exposed = sum(left_to_sync(program, backward, inside, n, link) for inside, n in ((conv, n_c), (fc, n_f)))
    return compute + exchange + exposed


def left_to_sync(program: Program, backward: Mapping[str, float], inside: set[str], n: int, link: Link) -> float:
    """Seconds for which the syncs of a role's layers outlast backward; those of a bucket share their latency."""
    seen: set[str] = set()
    worst = sent = hidden = 0.0
    for layer in program.layers:
        own = [program.tensors[h] for h in layer.tensors if h not in seen]
        seen.update(layer.tensors)
        nbytes = sum(h.nbytes for h in own if h.trainable)
        if nbytes and n > 1 and layer.name in inside:
            shared = 2 * (n - 1) * link.latency * max(0.0, 1 - nbytes / BucketGradients.nbytes)
            sent += ring(nbytes, n, link) - shared
        worst = max(worst, sent - hidden)
        hidden += backward[layer.name] if layer.name in inside else 0.0
    return worst


def assignments(program: Program, pins: Mapping[str, str]) -> Iterator[set[str]]:
    """Every set of fc layers that keeps to the pins."""
    names = [layer.name for layer in program.layers]
    for size in range(1, len(names)):
        for fc in map(set, itertools.combinations(names, size)):
            if all((name in fc) == (role == "fc") for name, role in pins.items()):
                yield fc


def brute_force(
    program: Program, world: int, cluster: Cluster, memory: float, global_batch: int | None, pins: Mapping[str, str]
) -> tuple[float, set[str]]:
    """Samples per second and fc layers of the best separation; (0, none) when there is none."""
    best: tuple[float, set[str]] = (0.0, set())
    for n_f in range(1, world):
        batch = global_batch or program.batch * (world - n_f)
        for fc in assignments(program, pins):
            seconds = price(program, cluster, fc, world - n_f, n_f, memory, batch)
            if seconds is not None:
                best = max(best, (batch / seconds, fc), key=lambda found: found[0])
    return best
