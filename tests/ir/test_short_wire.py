"""What is asked for by `wire=`, how a plan keeps it, and what a step sends then."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from splitc.cli.model_file import load_model
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.simulation.timeline import simulate
from splitc.errors import PlacementError
from splitc.ir.plan import Plan
from splitc.ir.plan_checks import decision_problems
from splitc.ir.short_wire import KINDS, parse_wire, wire_text
from splitc.ir.wire import wire
from splitc.ir.wire_op import Payload, What, WireOp
from splitc.passes.analysis import analyse
from splitc.runtime.transport.collective import Collective
from splitc.runtime.transport.formats import FORMATS, Wire
from splitc.specialise import Settings, specialise
from tests import ROOT
from tests.support.every_strategy import Asked, every_strategy, images, planned
from tests.support.sampling import along
from tests.support.wire_bytes import assert_defined

BATCH = 96
MIXED = Wire("bf16", "fp16", "int8")


def test_a_format_is_for_all_kinds_or_for_some_by_name() -> None:
    for given, expected in (
        (None, Wire()),
        ("exact", Wire()),
        ("bf16", Wire("bf16", "bf16", "bf16", "bf16")),
        ({"errors": "fp8"}, Wire(errors="fp8")),
        (" activations=bf16, errors = fp16,gradients=int8 ", MIXED),
        (MIXED, MIXED),
    ):
        assert parse_wire(given) == expected
    assert [wire_text(each) for each in (Wire(), parse_wire("fp8"), Wire("bf16", gradients="int8"))] == [
        "",
        "all in fp8",
        "activations in bf16, gradients in int8",
    ]


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(PlacementError) as caught:
        parse_wire("activation=bf16,errors=int4")
    assert str(caught.value) == (
        "wire: there is no kind 'activation'; did you mean activations? there are activations, errors, gradients, "
        "averages; there is no format 'int4'; there are exact, bf16, fp16, int8, fp8"
    )


def test_a_plan_keeps_it_is_approximate_and_has_another_hash() -> None:
    exact = planned(2, "data_parallel", global_batch=BATCH).plan
    plan = planned(2, "data_parallel", global_batch=BATCH, wire=MIXED).plan
    assert "wire" not in json.loads(exact.to_json())
    kinds = {"activations": "bf16", "errors": "fp16", "gradients": "int8", "averages": "exact"}
    assert json.loads(plan.to_json())["wire"] == kinds
    assert (exact.exact, plan.exact, replace(exact, wire=MIXED, exact=True).exact) == (True, False, False)
    assert plan.hash != exact.hash
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_that_a_person_wrote_says_what_it_cannot_have() -> None:
    plan = planned(2, "data_parallel", global_batch=BATCH).plan
    assert decision_problems(replace(plan, wire=Wire(errors="bf15"))) == [
        "wire: errors is 'bf15'; there are exact, bf16, fp16, int8, fp8"
    ]
    (problem,) = decision_problems(replace(plan, wire=MIXED, all_reduce="recursive_doubling"))
    assert problem.startswith("wire: gradients are 'int8', but all_reduce 'recursive_doubling' would round")
    with pytest.raises(PlacementError, match="a sum of int8 gradients is not made by recursive_doubling"):
        planned(2, "data_parallel(all_reduce=recursive_doubling)", global_batch=BATCH, wire=MIXED)


def test_every_kind_has_its_own_format_and_what_is_not_of_a_kind_travels_as_it_is() -> None:
    names = "modulo_shard(mp=2,scheme=BK)", "layer_separation(n_c=2, n_f=1)", "parameter_server", "late_multiply"
    seen = set()
    for name in names:
        world = 3 if "separation" in name else 2
        for op in (
            op
            for rank in range(world)
            for op in wire(planned(world, name, global_batch=BATCH, wire=MIXED).program, rank)
        ):
            kind = KINDS.get(op.payload.what)
            asked = {"activations": "bf16", "errors": "fp16", "gradients": "int8", "factors": "fp16"}.get(kind or "")
            assert op.form in ("", asked), str(op)
            assert not op.form or op.dtype == torch.float32
            seen |= {(op.payload.what, op.form)} if op.form else set()
    assert {what for what, _ in seen} >= {What.CUT, What.CUT_GRADIENT, What.BUCKET, What.PUSH, What.LATE}
    assert not {What.LOSS, What.PULL} & {what for what, _ in seen}


def test_bytes_of_a_step_are_those_of_its_formats() -> None:
    def sent(name: str, form: Wire | None) -> float:
        return sum(op.sent for op in wire(planned(2, name, global_batch=BATCH, wire=parse_wire(form)).program, 0))

    for name in ("data_parallel", "late_multiply"):
        assert sent(name, parse_wire("bf16")) < 0.53 * sent(name, None)
    assert sent("data_parallel", Wire(gradients="int8")) < 0.29 * sent("data_parallel", None)


def test_casting_costs_memory_traffic_on_both_ends() -> None:
    def cast(kind: str, algorithm: str = "", ranks: tuple[int, ...] = (1,), form: str = "int8") -> tuple[float, float]:
        traffic = FORMATS["int8"].traffic
        op = WireOp(kind, Payload(What.CUT), ranks, (1000,), torch.float32, 0.0, None, algorithm, form=form)
        return op.cast[0] / traffic, op.cast[1] / traffic

    four = (0, 1, 2, 3)
    assert cast("send", form="") == (0, 0)
    assert cast("send") == (1000, 0)
    assert cast("recv") == (0, 1000)
    assert cast("collective", Collective.ALL_GATHER, four) == (250, 1000)
    assert cast("collective", Collective.REDUCE_SCATTER, four) == (750, 750)
    assert cast("collective", Collective.ALL_TO_ALL, four) == (250, 250)


def test_the_simulation_sends_as_much_and_takes_the_time_of_casting() -> None:
    cluster = load_cluster("v100-10gbe")
    slow = replace(cluster, device=replace(cluster.device, memory_bandwidth=cluster.device.memory_bandwidth / 1e4))
    exact, short = (
        planned(2, "data_parallel", global_batch=BATCH, wire=parse_wire(form)).program for form in (None, "int8")
    )
    for program in (exact, short):
        for rank, phases in enumerate(simulate(program, cluster).phases):
            assert phases.sent_bytes == pytest.approx(sum(op.sent for op in wire(program, rank)))
    fast, casting = ([simulate(each, on).step_seconds for each in (exact, short)] for on in (cluster, slow))
    cast = sum(sum(op.cast) for op in wire(short, 0)) / slow.device.memory_bandwidth
    assert casting[1] - casting[0] == pytest.approx(
        cast / slow.device.efficiency_of("memory") + fast[1] - fast[0], rel=0.05
    )


FORMS = ["bf16", "activations=fp8,errors=bf16,gradients=int8"]


@pytest.mark.ranks
@along(1, asked=[asked for asked in every_strategy(4) if "doubling" not in asked.name], form=FORMS)
def test_ranks_send_the_bytes_that_their_wire_says(form: str, asked: Asked) -> None:
    assert_defined(planned(4, asked, global_batch=2 * BATCH, wire=parse_wire(form)), images(2 * BATCH))


@pytest.mark.slow
def test_alexnet_sends_about_half_in_two_bytes_and_a_quarter_of_its_gradients_in_one() -> None:
    file = load_model(str(Path(ROOT) / "benchmarks/models/alexnet_quarter.py"), None)
    program = analyse(file.model, file.example, name=file.name)

    settings = Settings(4, cluster="v100-10gbe")

    def sent(plan: Plan, form: str | None) -> list[float]:
        made = specialise(program, settings, replace(plan, wire=parse_wire(form)))
        return [sum(op.sent for op in wire(made, rank)) for rank in range(4)]

    for strategy in ("data_parallel", "late_multiply", "layer_separation", "modulo_shard", "hybrid_single"):
        plan = specialise(program, replace(settings, strategy=strategy)).plan.decided
        exact, short = sent(plan, None), sent(plan, "bf16")
        assert all(b <= 0.53 * a for a, b in zip(exact, short, strict=True)), strategy
        if strategy == "data_parallel":
            assert all(b <= 0.29 * a for a, b in zip(exact, sent(plan, "gradients=int8"), strict=True))
