"""Every strategy compiled once, and all that must hold of its program: bytes sent and held, weights, timeline."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import chain, zip_longest

import pytest
import torch
from torch import Tensor

from splitc.compiled import CompiledProgram
from splitc.cost_models.memory.memory_check import _bound
from splitc.cost_models.simulation import timeline
from splitc.cost_models.simulation.alike import representatives
from splitc.cost_models.simulation.batches import batches_of_round
from splitc.cost_models.simulation.events import Simulation
from splitc.cost_models.simulation.operations import Operation
from splitc.cost_models.simulation.prices import Prices
from splitc.cost_models.simulation.step_operations import Step
from splitc.cost_models.simulation.timeline import simulate
from splitc.ir.cluster import Cluster, Unlike
from splitc.ir.device import Link
from splitc.ir.program import LoweredProgram
from splitc.ir.wire import wire
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.transport.base import Transport
from splitc.runtime.weights import first_names
from splitc.runtime.worker import Worker
from tests.cost_models.memory.test_memory import assert_as_measured
from tests.cost_models.simulation.test_timeline import DEVICE, toy
from tests.support.every_strategy import Asked, every_strategy, images, planned
from tests.support.ranks import on_ranks, on_workers
from tests.support.sampling import sampled
from tests.support.wire_bytes import assert_defined

ROUNDS = [f"local_sgd(period=8{options})" for options in ("", ",fragments=2", ",fragments=2,delay=3")]
MICROBATCHES = [
    f"layer_separation({ranks},microbatches=3{schedule})"
    for ranks, schedule in (("n_c=2,n_f=2", ",schedule=1f1b"), ("n_c=3,n_f=1", ""), ("ranks=2+1+1", ",schedule=1f1b"))
]
HOSTS = toy(local_link=Link(1e9, 1e-6), ranks_per_host=2)
CLUSTERS = [
    toy(),
    replace(toy(), link=Link(1e6, 1e-4, duplex=False)),
    HOSTS,
    replace(HOSTS, link=replace(HOSTS.link, shared=True)),
    toy(unlike=(Unlike((1,), DEVICE.scaled(0.1), toy().link), Unlike((2,), DEVICE, Link(1e5, 1e-4)))),
]
EVERYWHERE = [
    (k, world, asked)
    for k, (world, asked) in enumerate((w, a) for w in (4, 3, 2) for a in every_strategy(w)[w % 4 :: 4])
]


@pytest.mark.slow
@sampled(("k", "world", "asked"), EVERYWHERE, one_in=8, ids=str)
def test_what_a_program_sends_holds_and_takes_is_what_was_predicted(
    k: int, world: int, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have equal and unequal batches in turn, and clusters of every kind."""
    done = planned(world, asked, norm=True, global_batch=4 * world + (0, 3)[k % 2])
    assert_defined(done, images(done.plan.global_batch))
    for rank, (memory, _) in enumerate(assert_as_measured(done)):
        assert memory.peak <= _bound(done.program, rank)
    assert_parts_of_weights(done)
    assert_phases(done.program)
    assert_units_are_alike(done.program, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [*ROUNDS, *MICROBATCHES])
def test_rounds_and_microbatches_take_what_was_predicted(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in (16, 19):
        assert_units_are_alike(planned(4, asked, global_batch=batch).program, monkeypatch)


def assert_parts_of_weights(done: CompiledProgram) -> None:
    """A rank is sent no more than it holds, and makes of it the stage that it makes of whole weights."""
    weights, parts = done.weights()["state"], list(done.parts())

    def stage_of(worker: Worker) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in worker.stage.state_dict().items()}

    def of_parts(transport: Transport) -> dict[str, Tensor]:
        part, own = load_rank(done.files, transport.rank), parts[transport.rank]
        return stage_of(Worker(part, transport, own, first_names(weights), None))

    for part, stage, whole in zip(parts, on_ranks(done.plan.world, of_parts), on_workers(done, stage_of), strict=True):
        assert stage.keys() == whole.keys()
        assert all(torch.equal(stage[name], tensor) for name, tensor in whole.items())
        assert {name: tensor.shape for name, tensor in part.items()} == {n: t.shape for n, t in whole.items()}


def assert_phases(program: LoweredProgram) -> None:
    """A rank sends what its wire says, computes or waits, and is faster the more bandwidth there is."""
    found = simulate(program, toy())
    for rank, phases in enumerate(found.phases):
        assert phases.sent_bytes == pytest.approx(sum(op.per_step for op in wire(program, rank)))
        assert phases.compute + phases.waiting == pytest.approx(phases.step)
        assert 0 <= phases.communication <= phases.step * (1 + 1e-9)
    assert found.step_seconds == pytest.approx(max(phases.step for phases in found.phases), rel=0.05)
    times = [simulate(program, toy(bandwidth)).step_seconds for bandwidth in (1e5, 1e7, 1e12)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


def assert_units_are_alike(program: LoweredProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a unit, of which one stands for all, take as long as those of each."""
    assert_simulated(program)
    for same in (*CLUSTERS[:2], toy(ranks_share_device=True, cores=2)):
        found = simulate(program, same)
        with monkeypatch.context() as patched:
            patched.setattr(timeline, "representatives", lambda plan, cluster: tuple(range(plan.world)))
            everyone = simulate(program, same)
        assert found.step_seconds == pytest.approx(everyone.step_seconds, rel=1e-9)
        numbers = [chain.from_iterable(map(astuple, each.phases)) for each in (found, everyone)]
        assert all(a == pytest.approx(b, rel=1e-9, abs=1e-12) for a, b in zip_longest(*numbers))


def assert_simulated(program: LoweredProgram) -> None:
    """On devices that all differ: messages that are ready for a line at the same moment may go in another order."""
    world = program.plan.world
    unlike = tuple(Unlike((rank,), DEVICE.slowed(1 + 0.0137 * (rank + 1) ** 1.5), toy().link) for rank in range(world))
    cluster = toy(1e6, unlike=unlike)
    found, usual = simulate(program, cluster), Simulation(one_by_one(program, cluster, 3), cores=world)
    marks = len(list(batches_of_round(program)))
    updates = program.plan.rounds.steps if program.plan.rounds else 1
    ends = usual.ends()
    assert found.step_seconds == pytest.approx((ends[-1] - ends[marks - 1]) / 2 / updates, rel=1e-9)
    for rank, phases in enumerate(found.phases):
        steps = usual.steps(rank)[-marks:]
        for name in ("step", "compute", "waiting", "communication", "sent_bytes"):
            expected = sum(getattr(step, name) for step in steps) / updates
            assert getattr(phases, name) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def one_by_one(program: LoweredProgram, cluster: Cluster, steps: int) -> list[list[Operation]]:
    """The operations of `steps` steps or rounds, generated for every rank by itself."""
    prices = Prices(program, cluster)
    ranks = range(program.plan.world)
    found: list[list[Operation]] = [[] for _ in ranks]
    for batch in steps * list(batches_of_round(program)):
        prices.begin_step(batch.times)
        for rank in ranks:
            found[rank] += Step(prices, rank, batch).operations()
    return found


def test_one_rank_of_equal_units_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    generated: list[int] = []
    usual = Step.operations

    def counted(self: Step) -> list[Operation]:
        generated.append(self.rank)
        return usual(self)

    monkeypatch.setattr(Step, "operations", counted)
    program = planned(4, "data_parallel").program
    generated.clear()
    simulate(program, toy())
    assert generated == [0]


@pytest.mark.slow
def test_a_unit_has_a_part_of_every_role() -> None:
    for asked, simulated in {
        "data_parallel": [0],
        "modulo_shard(mp=2)": [0, 1],
        "layer_separation(n_c=2,n_f=2)": [0, 2],
        "hybrid_single": [0, 1, 2, 3],
    }.items():
        plan = planned(4, asked, global_batch=24).program.plan
        assert sorted(set(representatives(plan, toy()))) == simulated, asked
        assert sorted(set(representatives(plan, CLUSTERS[2]))) == [0, 1, 2, 3], asked
        uneven = planned(4, asked, global_batch=23).program.plan
        assert sorted(set(representatives(uneven, toy()))) == [0, 1, 2, 3], asked
