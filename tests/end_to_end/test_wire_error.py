"""Formats on the wire that are chosen below a bound of their error: what is chosen, measured, told and refused."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.bounded import bounded
from splitc.cli.options import parse
from splitc.compiled import CompiledProgram
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import LaunchError, PlacementError
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram
from splitc.ir.short_wire import free_kinds
from splitc.report.figures import as_json
from splitc.runtime.transport.formats import EXACT, FORMATS, Wire
from splitc.runtime.worker import Worker
from splitc.specialise import Settings
from splitc.verify.rounding import Rounding, rounding
from tests.support.every_strategy import planned
from tests.support.ranks import on_workers, part_of

SLOW = load_cluster("v100-10gbe").with_bandwidth(2e7)
BATCH = 64


@cache
def chosen(error: float, strategy: str = "data_parallel", wire: str | None = None) -> CompiledProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    batch = torch.randn(BATCH // 2, 32), torch.randint(8, (BATCH // 2,))
    options: dict[str, Any] = {"cluster": SLOW, "strategy": strategy, "wire_error": error, "wire": wire}
    made = splitc.compile(model, 2, *batch, F.cross_entropy, **options)
    assert isinstance(made, CompiledProgram)
    return made


def alone(batch: tuple[Tensor, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The gradients of one process."""
    model.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.ranks
def test_what_is_stated_is_what_other_batches_show() -> None:
    made = chosen(3e-2)
    assert made.plan.wire == Wire(gradients="int8")
    exact, short = made.plan.prediction.on_wire
    rows = torch.Generator().manual_seed(7)
    images, labels = made.request.example.tensors.values()
    drawn = [torch.randint(BATCH // 2, (BATCH,), generator=rows) for _ in range(21)]
    batches = [(images[each], labels[each]) for each in drawn]

    def run(worker: Worker) -> list[dict[str, Tensor]]:
        found = []
        for batch in batches:
            worker.step(*part_of(worker, batch, made.plan.local_batches))
            found.append({name: gradient.clone() for name, gradient in worker.gradients().items()})
        return found

    got = on_workers(made, run, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))[0][1:]
    expected = [alone(batch, made._model) for batch in batches[1:]]
    lost, square, noise = (dict.fromkeys(expected[0], 0.0) for _ in range(3))
    for name in expected[0]:
        gradients = torch.stack([each[name] for each in expected])
        lost[name] = float((torch.stack([each[name] for each in got]) - gradients).square().sum())
        square[name] = float(gradients.square().sum())
        noise[name] = float(gradients.var(0).sum().sqrt() / gradients.mean(0).norm())
    errors = {name: (lost[name] / square[name]) ** 0.5 for name in lost}
    assert short.error == pytest.approx(max(errors.values()), rel=0.1)
    assert 0.01 < short.error < 3e-2 and exact.error == 0.0
    weights = made.weights()
    found = rounding(made.program, made._model, made._example, weights, made.plan.local_batches, 20).effects
    assert list(found) == sorted(found, key=lambda name: -found[name][0]) and found.keys() == errors.keys()
    for name, (error, cosine, spread) in found.items():
        assert error == pytest.approx(errors[name], rel=0.15)
        assert spread == pytest.approx(noise[name], rel=0.25)
        assert cosine == pytest.approx(1 - error**2 / 2, abs=error**2 / 4)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_report_has_the_exact_plan_and_the_short_one_as_two_rows() -> None:
    made = chosen(3e-2)
    text = made.report()
    section = text[text.index("the best plan by the numbers on the wire") :].split("\n\n")[0].splitlines()
    assert [line.split()[:2] for line in section[3:5]] == [["data_parallel", "(approximate)"], ["data_parallel", "2"]]
    assert "with gradients in int8 on the wire the gradient of" in " ".join(section)
    assert "sampling noise of a batch" in " ".join("".join(section).split())
    (exact, short), figures = made.plan.prediction.on_wire, as_json(made.program)["on_wire"]
    assert [each["error"] for each in figures] == [exact.error, short.error]
    assert (exact.exact, short.exact) == (True, False) and short.step_seconds < exact.step_seconds
    assert Plan.from_json(made.plan.to_json()).prediction.on_wire == (exact, short)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_smaller_bound_has_finer_formats_and_the_smallest_none() -> None:
    formats = [chosen(error).plan.wire.gradients for error in (3e-2, 5e-3, 1e-6)]
    assert formats == ["int8", "bf16", EXACT]
    exact = chosen(1e-6).plan
    assert exact.exact and len(exact.prediction.on_wire) == 1


@pytest.mark.slow
@pytest.mark.ranks
def test_kinds_with_a_format_keep_it_and_are_refused_if_they_are_too_coarse() -> None:
    strategy = "layer_separation(n_c=1, n_f=1)"
    assert chosen(0.3, strategy, "activations=bf16").plan.wire.activations == "bf16"
    with pytest.raises(PlacementError, match=r"wire_error: with gradients in int8 .* not by less than 0.001"):
        chosen(1e-3, "data_parallel", "gradients=int8")


def test_what_makes_no_sense_is_refused() -> None:
    for error, wire, words in (
        (3, None, "wire_error is 3; give the largest relative error"),
        (0.0, None, "wire_error is 0.0"),
        (1e-2, "bf16", "wire gives every kind a format"),
        (1e-2, Wire(), "wire gives every kind a format"),
    ):
        with pytest.raises(PlacementError, match=words):
            free_kinds(error, wire)
    assert free_kinds(None, "bf16") == () and free_kinds(1e-2, {"errors": "bf16"}) == ("activations", "gradients")
    with pytest.raises(LaunchError, match="--wire-error: invalid float value: 'small'"):
        parse(["inspect", "model.py", "--wire-error", "small"])
    with pytest.raises(PlacementError, match="local_sgd is approximate whatever travels"):
        planned_by({}, {}, strategy="local_sgd(period=2)")


ROUNDINGS = {name: each.rounding for name, each in FORMATS.items()} | {EXACT: 0.0}
SIZES = {name: float(each.size) for name, each in FORMATS.items()} | {EXACT: 4.0}
KINDS = ("activations", "errors", "gradients")


def planned_by(
    seconds: Mapping[str, float], errors: Mapping[str, float], limit: float = 1e-2, strategy: str = "data_parallel"
) -> tuple[LoweredProgram, list[Wire]]:
    """What is chosen where a byte of each kind takes so many seconds, and errors are so many roundings; and measured.

    A step computes for a second.
    """
    program, measured = planned(2, strategy, global_batch=BATCH).program, []

    def made(asked: Settings) -> LoweredProgram:
        step = 1.0 + sum(seconds.get(kind, 0.0) * SIZES[getattr(asked.wire, kind)] for kind in KINDS)
        prediction = replace(program.plan.prediction, step_seconds=step)
        return replace(program, plan=replace(program.plan, wire=asked.wire, prediction=prediction))

    def measure(each: LoweredProgram, batches: int) -> Rounding:
        measured.append(each.plan.wire)
        return Rounding(error_of(each.plan.wire, errors), "w", {}, "adds little")

    return bounded(Settings(2, wire_error=limit, free=KINDS), made, measure), measured


def error_of(wire: Wire, errors: Mapping[str, float]) -> float:
    return sum(errors.get(kind, 1.0) * ROUNDINGS[getattr(wire, kind)] for kind in KINDS)


def test_what_costs_no_time_stays_exact_and_the_coarsest_error_goes_first() -> None:
    best, measured = planned_by({"gradients": 1.0}, {})
    assert best.plan.wire == Wire(gradients="bf16") and Wire(gradients="int8") in measured
    assert planned_by({}, {})[0].plan.wire == Wire() and not planned_by({}, {})[1]
    best, _ = planned_by({"activations": 1.0, "errors": 1.0}, {"activations": 5.0, "errors": 0.3})
    assert best.plan.wire == Wire("fp16", "int8")


def test_the_chosen_formats_are_below_the_bound_and_nearly_as_fast_as_the_best_of_all() -> None:
    draw, slower = random.Random(5), []
    every = [Wire(*names) for names in itertools.product(SIZES, repeat=3)]
    for _ in range(60):
        seconds = {kind: draw.choice((0.0, 0.1, 1.0)) for kind in KINDS}
        errors = {kind: 10 ** draw.uniform(-1, 1) for kind in KINDS}
        best, _ = planned_by(seconds, errors)
        assert error_of(best.plan.wire, errors) < 1e-2
        allowed = [wire for wire in every if error_of(wire, errors) < 1e-2]
        steps = [1 + sum(seconds[kind] * SIZES[getattr(wire, kind)] for kind in KINDS) for wire in allowed]
        slower.append(best.plan.step_seconds / min(steps))
    assert statistics.mean(slower) < 1.03 and max(slower) < 1.5, (statistics.mean(slower), max(slower))
