"""Fit a cluster anew to what its runs took: a few factors, with the numbers of the cluster file as the prior.

A factor says how many times as long as before something takes: a class of ops, transfers of one kind, latencies, the
processor time of a byte.  By simulation each has a weight in a run,

    w = d log(seconds) / d log(factor)      seconds of its step, of its computing, and of its communication

so that with x = log(factor), and y the logarithms of the factors that the run was predicted with,

    log(measured / predicted) = sum of w (x - y) + error

Bayesian least squares finds x.  The prior of x is a normal distribution around 0; factors of one group are correlated
in it, so that a run without convolutions says something about convolutions too.  Runs that fit badly count less, as
with Huber's loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from splitc.cost_models.simulation.alike import num_transfers
from splitc.cost_models.simulation.timeline import Timeline, simulate
from splitc.ir.cluster import Cluster
from splitc.ir.device import COLLECTIVES, EFFICIENCIES, Device, Link
from splitc.ir.program import LoweredProgram
from splitc.ir.wire import wire
from splitc.runtime.transport.phases import Phases

GROUPS: Mapping[str, tuple[str, ...]] = {
    "compute": ("conv", "matmul", "memory"),
    "network": ("messages", *COLLECTIVES, "local"),
    "latency": ("latency",),
    "processor": ("processor",),
}
FACTORS = tuple(factor for group in GROUPS.values() for factor in group)
_TOGETHER = {"compute": 0.3, "network": 0.3, "latency": 0.4, "processor": 0.2}  # deviation of a group, a priori
_APART = 0.1  # of a factor from its group
_CALIBRATED = 1 / 3  # of these deviations, where the numbers were measured on the cluster
_ERRORS = (0.03, 0.1, 0.15)  # of what is predicted of a step, its computing, its communication
_VAGUE = 2  # times those of the parts, where computing and transfers take each other's time
_OTHER = math.log(3)  # what is as far from its prediction ran on another machine than the cluster file describes
_CHANGE = 1.05  # of a factor, by which its weight is found
_LEAST = 64  # bytes of a transfer, below which its price is a latency
_MOST = 5_000  # transfers of a step, above which weights take long to find


@dataclass(frozen=True)
class Run:
    """What a plan took on a cluster, and what it was predicted to take.

    plan: its hash.  name: of the build or the model.  based_on, factors, weights: as of a `Prediction`.
    steps: seconds of a step, of the last runs of this plan.  predicted: seconds of a step.
    compute, communication: predicted and measured seconds of a step, the sums over ranks; none where only the step is
    known.  transfers: kind and ranks -> number in a step, bytes of one, its predicted and measured seconds, by size.
    """

    plan: str
    name: str
    strategy: str
    world: int
    based_on: str
    predicted: float
    steps: tuple[float, ...]
    factors: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    compute: tuple[float, ...] = ()
    communication: tuple[float, ...] = ()
    transfers: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)

    @property
    def measured(self) -> float:
        return float(np.median(self.steps))

    @property
    def elsewhere(self) -> bool:
        """Whether it hardly ran on the cluster, so far from the prediction is it."""
        return not self.predicted or abs(math.log(self.measured / self.predicted)) > _OTHER


def priced(run: Run, factors: Mapping[str, float]) -> float:
    """Seconds of the run's step by other factors than those that it was predicted with."""
    logs = (w[0] * math.log(factors.get(f, 1.0) / run.factors.get(f, 1.0)) for f, w in run.weights.items())
    return run.predicted * math.exp(sum(logs))


def weights(program: LoweredProgram, cluster: Cluster, timeline: Timeline) -> dict[str, tuple[float, ...]]:
    """Factor -> its weights in the step, the computing and the communication of a program, whose timeline is known.

    Even ones for programs with very many transfers.
    """
    if num_transfers(program, cluster) > _MOST:
        return even_weights(timeline.phases)
    found = {}
    for factor in FACTORS:
        other = slowed(cluster, {factor: _CHANGE})
        if other != cluster:
            slower = _seconds(simulate(program, other))
            logs = (math.log(b / a) if a > 0 < b else 0.0 for a, b in zip(_seconds(timeline), slower, strict=True))
            found[factor] = tuple(round(each / math.log(_CHANGE), 4) for each in logs)
    return {factor: each for factor, each in found.items() if any(each)}


def even_weights(phases: Sequence[Phases]) -> dict[str, tuple[float, ...]]:
    """The same where nothing but a prediction is known: the factors of a group have equal parts of it."""
    slowest = max(phases, key=lambda each: each.step)
    found = dict[str, tuple[float, ...]]()
    for group, seconds, *parts in (("compute", slowest.compute, 1, 0), ("network", slowest.waiting, 0, 1)):
        whole = (seconds / slowest.step, *parts)
        found |= {factor: tuple(part / len(GROUPS[group]) for part in whole) for factor in GROUPS[group]}
    return found


def basis(program: LoweredProgram, cluster: Cluster) -> str:
    """What the price of a plan that did not run follows from, of `BASES`.

    It is interpolated where its classes of ops and its collectives, of as many ranks and of such sizes, ran on the
    cluster or were calibrated there.
    """
    seen = {} if cluster.learned is None else cluster.learned.seen
    ops = {_class(op.op_class) for cost in program.costs.values() for op in cost.small.ops}
    known = all(op in seen or op in cluster.device.efficiency for op in ops)
    sizes = {
        (kind, len(op.ranks) if op.kind == "collective" else 2, op.nbytes)
        for rank in {ranks[0] for ranks in program.plan.all_roles.values()}
        for op in wire(program, rank)
        if op.nbytes >= _LEAST and (kind := op.algorithm if op.kind == "collective" else "messages")
    }
    covered = all(_covers(cluster, seen.get(kind, ()), kind, ranks, nbytes) for kind, ranks, nbytes in sizes)
    return "interpolated" if known and covered else "extrapolated"


def _covers(cluster: Cluster, seen: tuple[float, ...], kind: str, ranks: int, nbytes: float) -> bool:
    """Whether transfers ran of so many ranks and, within a factor of 2, bytes; or their kind was calibrated."""
    if len(seen) == 4 and seen[0] <= ranks <= seen[1] and seen[2] / 2 <= nbytes <= 2 * seen[3]:
        return True
    calibrated = cluster.link.collectives
    return bool(calibrated) and ranks <= (cluster.world or 0) and (kind == "messages" or kind in calibrated)


def _seconds(timeline: Timeline) -> tuple[float, float, float]:
    phases = timeline.phases
    return timeline.step_seconds, sum(p.compute for p in phases), sum(p.communication for p in phases)


def slowed(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """The cluster on which everything takes so many times as long."""
    times = dict.fromkeys(FACTORS, 1.0) | {**factors}
    local = dict.fromkeys(FACTORS, times["local"]) | {"latency": times["latency"], "processor": times["processor"]}
    return replace(
        cluster,
        device=_device(cluster.device, times),
        link=_link(cluster.link, times),
        local_link=None if cluster.local_link is None else _link(cluster.local_link, local),
        site_link=None if cluster.site_link is None else _link(cluster.site_link, times),
        unlike=tuple(replace(u, device=_device(u.device, times), link=_link(u.link, times)) for u in cluster.unlike),
    )


def _device(device: Device, times: Mapping[str, float]) -> Device:
    """Efficiencies are at most 1: where one would be more, the peak rises."""
    if all(times[op] == 1 for op in GROUPS["compute"]):
        return device
    reached = {name: device.efficiency_of(_op(name), _op(name) != name) / times[_class(name)] for name in EFFICIENCIES}
    products = {name: each for name, each in reached.items() if _op(name) in ("conv", "matmul", "attention")}
    top, of_memory = max(1.0, *products.values()), max(1.0, *(reached[name] for name in reached.keys() - products))
    return replace(
        device,
        flop_rate={dtype: rate * top for dtype, rate in device.flop_rate.items()},
        memory_bandwidth=device.memory_bandwidth * of_memory,
        efficiency={name: each / (top if name in products else of_memory) for name, each in reached.items()},
        launch=device.launch * times["memory"],
        conv_launch=device.conv_launch * times["conv"],
    )


def _op(name: str) -> str:
    return name.removesuffix("_backward")


def _class(name: str) -> str:
    """The factor of an efficiency."""
    return {"conv": "conv", "matmul": "matmul", "attention": "matmul"}.get(_op(name).removesuffix("_moved"), "memory")


def _link(link: Link, times: Mapping[str, float]) -> Link:
    rates = {
        kind: replace(rate, bandwidth=rate.bandwidth / times[kind], latency=rate.latency * times["latency"])
        for kind, rate in link.collectives.items()
    }
    return replace(
        link,
        bandwidth=link.bandwidth / times["messages"],
        latency=link.latency * times["latency"],
        processor=link.processor * times["processor"],
        collectives=rates,
    )


def fit(runs: Iterable[Run], calibrated: bool = False) -> dict[str, float]:
    """Factor -> how many times as long as the cluster file says, by all runs on it.

    calibrated: its numbers were measured there, so that less is to be expected.
    """
    rows = [row for run in runs if not run.elsewhere for row in _rows(run)]
    if not rows:
        return {}
    w = np.array([row for row, _, _ in rows])
    y, errors = np.array([y for _, y, _ in rows]), np.array([error for _, _, error in rows])
    prior, x = np.linalg.inv(_prior() * (_CALIBRATED**2 if calibrated else 1.0)), np.zeros(len(FACTORS))
    trust = np.ones(len(rows))
    for _ in range(8):
        scaled = w * (trust / errors**2)[:, None]
        x = np.linalg.solve(w.T @ scaled + prior, scaled.T @ y)
        trust = 1 / np.maximum(1.0, np.abs(y - w @ x) / (2 * errors))
    return {factor: round(math.exp(each), 4) for factor, each in zip(FACTORS, x, strict=True) if abs(each) > 1e-3}


def _rows(run: Run) -> Iterable[tuple[list[float], float, float]]:
    """Weights of all factors, what they add up to, and its error: of a step, its computing, its communication."""
    measured: Sequence[tuple[float, ...]] = ((run.predicted, run.measured), run.compute, run.communication)
    for k, (pair, error) in enumerate(zip(measured, _ERRORS, strict=True)):
        if len(pair) == 2 and min(pair) > 0:
            vague = _VAGUE if k and "processor" in run.weights else 1
            row = [run.weights.get(factor, (0.0,) * 3)[k] for factor in FACTORS]
            before = sum(w * math.log(run.factors.get(f, 1.0)) for f, w in zip(FACTORS, row, strict=True))
            if any(row):
                yield row, math.log(pair[1] / pair[0]) + before, vague * error


def _prior() -> np.ndarray:
    """The covariance of the factors' logarithms."""
    together = [[_TOGETHER[name] ** 2 * (f in group) for name, group in GROUPS.items()] for f in FACTORS]
    member = [[float(f in group) for group in GROUPS.values()] for f in FACTORS]
    covariance: np.ndarray = np.array(together) @ np.array(member).T + _APART**2 * np.eye(len(FACTORS))
    return covariance
