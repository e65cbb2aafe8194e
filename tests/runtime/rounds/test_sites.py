"""Sites: an exact plan inside each, and DiLoCo between them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from splitc.compiled import CompiledProgram
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import PlacementError
from splitc.ir.device import Link
from splitc.ir.plan_checks import decision_problems
from splitc.ir.wire import wire
from splitc.ir.wire_op import What
from splitc.passes.planner.strategy import parse_strategy
from splitc.runtime.transport.formats import Wire
from splitc.runtime.worker import Worker
from tests.runtime.rounds.test_groups import batch_of, known, planned
from tests.runtime.rounds.test_local_sgd import EXACT
from tests.runtime.rounds.test_outer_optimizer import LR, MOMENTUM, stream
from tests.support.compiled import CLUSTER
from tests.support.ranks import assert_same, on_workers, train
from tests.support.sampling import sampled
from tests.support.units import train_units

SITES = replace(load_cluster(CLUSTER), site_link=Link(6e5, 5e-2, shared=True), ranks_per_site=2)
INSIDE = ["data_parallel", "layer_separation", "late_multiply", "modulo_shard"]
DILOCO = f", outer_lr={LR}, outer_momentum={MOMENTUM}"


def sites(inside: str = "data_parallel", kind: str = "", more: str = "", **options: Any) -> CompiledProgram:
    return planned(f"sites(inside={inside}, period=2{more})", 4, kind, **{"cluster": SITES, **options})


@sampled("inside", INSIDE, INSIDE[:2])
def test_each_site_trains_exactly_and_all_average(inside: str) -> None:
    sizes = [3, 4, 5, 2] if inside != "layer_separation" else [7, 7]
    batches = [batch_of(14) for _ in range(3)]
    program = sites(inside)
    plan = program.plan
    assert plan.rounds is not None and plan.rounds.unit == 2 and plan.strategy == "sites" and not plan.exact
    results = on_workers(program, lambda worker: train(worker, batches, sizes))
    losses, state = train_units(known()[0], batches, [[7, 7]] * 3, 2)
    assert_same(results[0][1], state, EXACT)
    for rank, (found, _) in enumerate(results):
        assert found[0] == pytest.approx(losses[rank // 2][0], rel=EXACT)


@pytest.mark.slow
def test_an_outer_optimizer_updates_slices_of_what_copies_have() -> None:
    batches = [batch_of(14) for _ in range(5)]
    program = sites(kind="norm", more=f"{DILOCO}, sync_batchnorm=True")
    (stage,) = program.program.stages
    statistics = {"norm.running_mean", "norm.running_var"}
    assert all(statistics.issuperset(bucket) or statistics.isdisjoint(bucket) for bucket in stage.averaged)

    def run(worker: Worker) -> tuple[Any, int]:
        state = train(worker, batches, [3, 4, 5, 2])[1]
        (part,) = (part for comm in worker.rank.comms for part in comm.parts if hasattr(part, "averages"))
        return state, sum(kept.numel() for kept in part.averages.kept.values())

    results = on_workers(program, run)
    own = [name for bucket in stage.averaged for name in bucket]
    assert_same(results[0][0], stream(known("norm")[0], batches, [7, 7], 2, [own]), EXACT)
    of_model = known("norm")[0].state_dict()
    numels = [of_model[name].numel() * (2 if name in statistics else 1) for name in own]
    assert sum(results[k][1] for k in (0, 1)) == sum(numels)  # what two copies keep


@pytest.mark.slow
def test_units_that_are_in_time_do_as_a_server_does() -> None:
    batches = [batch_of(14) for _ in range(6)]
    more = f"{DILOCO}, delay=1, through=server, sync_batchnorm=True"
    program = planned(
        f"sites(inside=data_parallel, period=4, fragments=2, patience=60{more})", 4, "norm", cluster=SITES
    )
    (stage,) = program.program.stages
    assert "fragments=(" in program.files["all.py"] and "at a round's end of all" not in program.files["all.py"]
    own: list[list[str]] = [[], []]
    for bucket, fragment in zip(stage.averaged, stage.fragments, strict=True):
        own[fragment] += bucket
    got = on_workers(program, lambda worker: train(worker, batches, [3, 4, 5, 2]))
    assert_same(got[0][1], stream(known("norm")[0], batches, [7, 7], 4, own, 1, None), EXACT)


def test_a_slice_crosses_the_line_once_and_is_gathered_inside() -> None:
    program = sites()
    parameters = sum(p.nbytes for name, p in known()[0].named_parameters() if name != "gain")
    ops = [op for op in wire(program.program, 0) if op.payload.what is What.AVERAGE]
    assert {op.ranks for op in ops} == {(0, 2), (0, 1)}
    assert sum(op.sent for op in ops if op.ranks == (0, 2)) == pytest.approx(parameters / 2, abs=16)
    assert sum(op.sent for op in ops if op.ranks == (0, 1)) == pytest.approx(parameters / 2, abs=16)

    def sent(worker: Worker) -> int:
        before = worker.rank.sent_bytes
        for _ in range(2):
            worker.step(*batch_of(4))
        return worker.rank.sent_bytes - before

    every = sum(op.per_step for op in wire(program.program, 0))
    assert on_workers(program, sent)[0] == pytest.approx(2 * every, abs=8)


@sampled("more", ["", ", through=server, delay=1, patience=60"], one_in=2)
def test_changes_travel_in_a_short_format(more: str) -> None:
    batches = [batch_of(14) for _ in range(5)]
    program = sites(more=DILOCO + more, wire=Wire(averages="int8"))
    exact, short = (sum(op.sent for op in wire(p.program, 2) if 0 in op.ranks) for p in (sites(more=DILOCO), program))
    assert short < exact / 6  # of float64
    assert program.plan.step_seconds < sites(more=DILOCO).plan.step_seconds
    results = on_workers(program, lambda worker: (train(worker, batches, [3, 4, 5, 2]), worker.stage.state_dict()))
    stage = program.program.stages[0]
    own = [name for bucket in stage.averaged for name in bucket]
    expected = stream(known()[0], batches, [7, 7], 2, [own], *((1, None) if more else ()))
    for _, state in results:
        for name in own:
            torch.testing.assert_close(state[name], results[0][1][name], rtol=0, atol=0)
            torch.testing.assert_close(state[name], expected[name], rtol=0.05, atol=0.02)


def test_what_sites_cannot_be_is_refused() -> None:
    for text, why in (
        ("sites(inside=local_sgd)", "local_sgd(period=8) is not exact"),
        ("sites(patience=2)", "patience is 2; it must be more than 0 seconds, with through=server and a delay"),
        ("sites(period=4, fragments=2, delay=2, through=server, patience=1)", "one in 2 updates; delay must be less"),
    ):
        with pytest.raises(PlacementError, match=re.escape(why)):
            parse_strategy(text)
    with pytest.raises(PlacementError, match="4 ranks are not several sites of 3"):
        planned("sites(ranks=3)", 4)
    plan = sites("layer_separation").plan
    assert plan.rounds is not None
    assert not decision_problems(plan)
    head = [*plan.roles][-1]
    wrong = {
        "is not on the same ranks of each unit": replace(plan, roles={**plan.roles, head: (1, 2)}),
        "has other examples of a unit": replace(plan, batch_offsets={**plan.batch_offsets, head: (0, 3, 8)}),
        "a server sums numbers as they are": replace(
            plan, wire=Wire(averages="int8"), rounds=replace(plan.rounds, through="server")
        ),
    }
    for why, each in wrong.items():
        assert any(why in problem for problem in decision_problems(each)), why


@pytest.mark.slow
def test_sites_are_verified_against_copies_in_one_process() -> None:
    result = sites("modulo_shard").verify()
    assert result.holds and "against one process that trains 2 copies in turn" in str(result), result
