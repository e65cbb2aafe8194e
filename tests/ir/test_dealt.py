"""Slices of dealt tensors: what a rank trains, and what their exchange sends (independent subnet training, 3.4)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch.nn.functional as F
from torch import nn

from benchmarks.papers.ist import Symbols, exchanged_nbytes, ist_nbytes
from splitc.checks.deadlock import no_deadlock, sends_meet_receives
from splitc.cost_models.network.alpha_beta import all_to_all, ring_all_reduce
from splitc.cost_models.simulation.timeline import simulate
from splitc.ir.placements import LayerPlacement
from splitc.ir.program import LoweredProgram
from splitc.ir.schedule.actions import Action
from splitc.ir.subnets.slices import slice_numel
from splitc.ir.wire import nbytes_trained, wire
from splitc.runtime.launch.feed import synthetic
from splitc.runtime.spec import DealtDims, Neurons
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.simulated import run_ranks
from tests.cost_models.simulation.test_timeline import toy
from tests.support.compiled import class_batch, compiled
from tests.support.ranks import sgd, worker_of

J = 5


def network(N: tuple[int, ...]) -> nn.Sequential:
    """Linear layers without biases, of N[0] features, N[1] neurons, ..., N[-1] labels."""
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(N)))


def dealt(N: tuple[int, ...], n: int) -> LoweredProgram:
    """A program whose hidden neurons are dealt to n ranks in rounds of J updates."""
    x, y = class_batch((4, N[0]), classes=N[-1])
    program = compiled(network(N), (x,), y, F.cross_entropy, n, f"local_sgd(period={J})").program
    layers = len(N) - 1
    dims: dict[str, DealtDims] = {}
    for k in range(layers):
        of = {0: (Neurons(str(k), N[k + 1]),)} if k < layers - 1 else {}
        dims[f"{k}.weight"] = {**of, **({1: (Neurons(str(k - 1), N[k]),)} if k else {})}
    (stage,), (one,) = program.stages, program.rank_programs
    own = tuple(action for action in one.actions if action.verb != "average")
    ahead = (Action("fetch_ahead", role=stage.role),) if layers > 2 else ()
    actions = (Action("deal", role=stage.role), *ahead, *own, Action("collect", role=stage.role))
    subnet = {name: LayerPlacement("all", "subnet", "none") for name in program.plan.placements}
    return replace(
        program,
        plan=replace(program.plan, placements=subnet),
        stages=(replace(stage, dealt=dims, averaged=()),),
        rank_programs=(replace(one, actions=actions),),
    )


def test_a_slice_has_a_ranks_neurons_of_each_layer_and_what_every_rank_has() -> None:
    runs, tensor = (Neurons("a", 5), Neurons("", 3), Neurons("b", 7)), dealt((15, 15, 5), 3).tensors["0.weight"]
    sizes = [slice_numel(tensor, {0: runs}, 3, rank) for rank in range(3)]
    assert sizes == [15 * width for width in (2 + 3 + 3, 2 + 3 + 2, 1 + 3 + 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("N", "n"), [((12, 16, 8), 4), ((20, 16, 8, 16, 12), 2)])
def test_deal_and_collect_send_3_4_times_what_a_rank_does_not_own(N: tuple[int, ...], n: int) -> None:
    """(1 - 1/n) of 3.4's sum each, for parameters and momentum."""
    program = dealt(N, n)
    of_a_round = J * ist_nbytes(Symbols(N, B=4, J=J), n)
    ops = [op for rank in range(n) for op in wire(program, rank) if op.algorithm == "all_to_all"]
    for what in (("deal", "fetch_ahead"), ("collect",)):
        assert sum(op.sent for op in ops if op.payload.what in what) == pytest.approx((1 - 1 / n) * of_a_round * 2)
    assert sum(op.per_step for op in ops) == pytest.approx(2 * (1 - 1 / n) * of_a_round * 2 / J)
    assert not sends_meet_receives(program) and not no_deadlock(program)


def test_neurons_that_n_does_not_divide_are_all_sent() -> None:
    program = dealt((7, 11, 5, 3), 3)
    (stage,) = program.stages
    own = [sum(nbytes_trained(program, stage, name, rank) for name in stage.tensors) for rank in range(3)]
    for what in (("deal", "fetch_ahead"), ("collect",)):
        ops = [op for rank in range(3) for op in wire(program, rank) if op.payload.what in what]
        assert sum(op.sent for op in ops) == pytest.approx(2 * 2 / 3 * sum(own))
    (collect,) = [op for op in wire(program, 2) if op.payload.what == "collect"]
    assert collect.sent == pytest.approx(2 * 2 / 3 * own[2])


@pytest.mark.slow
def test_a_simulated_rank_computes_its_share_and_exchanges_once_a_round() -> None:
    N, n, latency = (400, 800, 800, 400), 4, 1e-4
    program = dealt(N, n)
    whole = replace(
        program.plan, placements={k: replace(v, holding="replicated") for k, v in program.plan.placements.items()}
    )
    cluster = toy(1e6, latency)
    found, alone = simulate(program, cluster), simulate(replace(program, plan=whole), cluster)
    assert found.phases[0].compute < 0.4 * alone.phases[0].compute
    first, inner, last = (a * b for a, b in pairwise(N))
    collected = 4 * 2 * (first + inner / n + last)
    dealt_then = collected - 4 * 2 * inner / n * (1 - 1 / n)  # the rest is fetched ahead, under computing
    exchanged = sum(all_to_all(each, n, cluster.link) for each in (collected, dealt_then, collected - dealt_then))
    loss = ring_all_reduce(8, n, cluster.link)  # which may travel between the packets of others
    assert exchanged / J <= found.phases[0].communication * (1 + 1e-9) <= (exchanged + loss) / J * (1 + 1e-6)
    assert found.phases[0].sent_bytes == pytest.approx(sum(op.per_step for op in wire(program, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 4])
def test_ranks_send_what_3_4_says(n: int) -> None:
    """Within 3 % from the third round on, when all of the optimizer's state travels too."""
    N, steps = (125, 500, 500, 25), 2
    modules = [m for a, b in pairwise(N[:-1]) for m in (nn.Linear(a, b, bias=False), nn.BatchNorm1d(b, affine=False))]
    x, y = class_batch((8, N[0]), classes=N[-1])
    model = nn.Sequential(*modules, nn.Linear(*N[-2:]))
    program = compiled(model, (x,), y, F.cross_entropy, n, f"independent_subnets(local_steps={steps})")

    def run(transport: Transport) -> float:
        worker, sent = worker_of(program, transport, sgd), []
        for batch, _ in zip(synthetic(worker.rank.spec), range(5 * steps), strict=False):
            worker.step(*batch)
            sent.append(worker.rank.sent_bytes)
        return (sent[-1] - sent[2 * steps - 1]) / (3 * steps)

    sent = sum(run_ranks(n, run))
    bias = 4 * N[-1]
    assert sent == pytest.approx(exchanged_nbytes(Symbols(N, 8, steps), n, states=1, averaged=bias), rel=0.03)
    assert sent == pytest.approx(sum(op.per_step for r in range(n) for op in wire(program.program, r)), rel=0.03)
