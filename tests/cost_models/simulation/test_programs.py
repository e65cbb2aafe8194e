"""Operations that are generated once for ranks of a kind: the same as those generated for each rank."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pytest

from splitc.cost_models.simulation import timeline
from splitc.cost_models.simulation.alike import representatives
from splitc.cost_models.simulation.batches import batches_of_round
from splitc.cost_models.simulation.events import Simulation
from splitc.cost_models.simulation.operations import Begin, Compute, Operation, Transfer, Wait
from splitc.cost_models.simulation.prices import Prices
from splitc.cost_models.simulation.programs import Programs
from splitc.cost_models.simulation.step_operations import Step
from splitc.cost_models.simulation.timeline import simulate
from splitc.ir.cluster import Cluster, Link, Unlike
from splitc.ir.program import LoweredProgram
from tests.cost_models.simulation.test_timeline import DEVICE, toy
from tests.support.every_strategy import Asked, everywhere, planned

ROUNDS = [f"local_sgd(period=8{options})" for options in ("", ",fragments=2", ",fragments=2,delay=3")]
MICROBATCHES = [
    f"layer_separation({ranks},microbatches=3{schedule})"
    for ranks in ("n_c=2,n_f=2", "n_c=3,n_f=1", "ranks=2+1+1")
    for schedule in ("", ",schedule=1f1b")
]
MORE = [*everywhere(4, slow=(6,), one_in=3), *(pytest.param(4, text) for text in (*ROUNDS, *MICROBATCHES))]
HOSTS = toy(local_link=Link(1e9, 1e-6), ranks_per_host=2)
CLUSTERS = {
    "plain": toy(),
    "half duplex": replace(toy(), link=Link(1e6, 1e-4, duplex=False)),
    "hosts": HOSTS,
    "hosts with a shared link": replace(HOSTS, link=replace(HOSTS.link, shared=True)),
    "unlike": toy(unlike=(Unlike((1,), DEVICE.scaled(0.1), toy().link), Unlike((2,), DEVICE, Link(1e5, 1e-4)))),
}


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


def described(programs: list[list[Operation]]) -> list[list[Any]]:
    """Operations as values, with transfers numbered in the order in which ranks name them."""
    numbers: dict[Transfer, int] = {}

    def of(transfer: Transfer) -> Any:
        number = numbers.setdefault(transfer, len(numbers))
        return number, transfer.name, transfer.parties, transfer.lines, transfer.seconds, transfer.processor

    def value(each: Operation) -> Any:
        match each:
            case Begin(transfer, nbytes):
                return "begin", of(transfer), nbytes
            case Wait(transfers):
                return "wait", tuple(map(of, transfers))
            case Compute(name, seconds):
                return name, seconds
        return "mark"

    return [[value(each) for each in program] for program in programs]


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize(("world", "asked"), MORE)
def test_a_rank_has_the_operations_that_are_generated_for_it_alone(
    world: int, asked: Asked | str, cluster: Cluster
) -> None:
    program = planned(world, asked, global_batch=4 * world + 3).program
    programs = Programs(Prices(program, cluster), merge=False)
    for batch in 2 * list(batches_of_round(program)):
        programs.add(batch)
    assert described(programs.operations) == described(one_by_one(program, cluster, 2))


@pytest.mark.parametrize(("world", "asked"), MORE)
def test_a_simulation_says_the_same_as_one_event_for_each_operation(world: int, asked: Asked | str) -> None:
    """On devices that all differ: messages that are ready for a line at the same moment may go in another order."""
    program = planned(world, asked, global_batch=4 * world + 3).program
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


def test_ranks_alike_are_generated_once(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("cluster", [CLUSTERS["plain"], CLUSTERS["half duplex"]], ids=["plain", "half duplex"])
@pytest.mark.parametrize(("world", "asked"), MORE)
def test_one_unit_of_ranks_alike_stands_for_all(
    world: int, asked: Asked | str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = planned(world, asked, global_batch=4 * world).program
    found = simulate(program, cluster)
    monkeypatch.setattr(timeline, "representatives", lambda plan, cluster: tuple(range(plan.world)))
    everyone = simulate(program, cluster)
    assert found.step_seconds == pytest.approx(everyone.step_seconds, rel=1e-9)
    for own, known in zip(found.phases, everyone.phases, strict=True):
        assert astuple(own) == pytest.approx(astuple(known), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("asked", "simulated"),
    [
        ("data_parallel", [0]),
        ("modulo_shard(mp=2)", [0, 1]),
        ("layer_separation(n_c=2,n_f=2)", [0, 2]),
        ("layer_separation(n_c=3,n_f=1)", [0, 1, 2, 3]),
        ("hybrid_single", [0, 1, 2, 3]),
    ],
)
def test_a_unit_has_a_part_of_every_role(asked: str, simulated: list[int]) -> None:
    plan = planned(4, asked, global_batch=24).program.plan
    assert sorted(set(representatives(plan, toy()))) == simulated
    assert sorted(set(representatives(plan, CLUSTERS["hosts"]))) == [0, 1, 2, 3]
    uneven = planned(4, asked, global_batch=23).program.plan
    assert sorted(set(representatives(uneven, toy()))) == [0, 1, 2, 3]
