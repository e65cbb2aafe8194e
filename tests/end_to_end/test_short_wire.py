"""Training with numbers in short formats between ranks: every exact strategy, bounded by verify, and resumed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from splitc.compiled import CompiledProgram
from splitc.ir.short_wire import parse_wire
from splitc.ir.wire import wire
from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_resume import assert_equal
from tests.support.every_strategy import every_strategy, images, planned
from tests.support.ranks import on_workers, part_of, train
from tests.support.run_state import run_state
from tests.support.sampling import sampled

WORLD, BATCH = 4, 128
EVERY = {each.name: each for each in every_strategy(WORLD) if "doubling" not in each.name}
FIRST = ("data_parallel", "layer_separation(n_c=3, n_f=1)", "modulo_shard(mp=2,scheme=B/K)", "parameter_server")
MIXED = "activations=bf16,errors=fp16,gradients=int8"


def some(first: int) -> pytest.MarkDecorator:
    """FIRST, of which one is everyday, and others: how they train and how they are judged are two questions."""
    return sampled("name", dict.fromkeys([*FIRST, *list(EVERY)[first::2]]), FIRST[first : first + 1])


@cache
def program(name: str, form: str | None, batch: int = BATCH) -> CompiledProgram:
    return planned(WORLD, EVERY[name], global_batch=batch, wire=parse_wire(form))


def is_short(name: str, form: str) -> bool:
    """Whether anything travels in a format; of a model this small some servers have tiny messages only."""
    made = program(name, form).program
    return any(op.form for rank in range(WORLD) for op in wire(made, rank))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(11)
    return [images(BATCH) for _ in range(number)]


def trained(name: str, form: str | None) -> tuple[list[float], float]:
    """The losses, and that of an evaluation before; ranks compare what they hold alike after each step."""
    made, given = program(name, form), batches(4)

    def run(worker: Worker) -> tuple[list[float], float]:
        before = float(worker.evaluate(*part_of(worker, given[0], made.plan.local_batches)))
        return train(worker, given)[0], before

    found = on_workers(made, run, optimizer=sgd, check_replicas=1)
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.ranks
@some(0)
def test_every_strategy_trains_near_to_exact_and_evaluates_as_it(name: str) -> None:
    expected, evaluated = trained(name, None)
    for form in ("bf16", MIXED):
        losses, own = trained(name, form)
        assert own == evaluated
        assert losses == pytest.approx(expected, rel=3e-3)
        assert (losses[1:] != expected[1:]) == is_short(name, form)


@pytest.mark.ranks
@some(1)
def test_verify_bounds_every_strategy_and_never_calls_it_the_same(name: str) -> None:
    result = program(name, "bf16").verify(steps=2, examples=BATCH)
    assert not result.holds and result.bounded, str(result)
    assert str(result).startswith("approximate, bounded: 2 steps")
    errors = [error for error, *_ in result.parameters.values()]
    assert errors == sorted(errors, reverse=True)
    assert all(cosine > 0.99 and noise > 0 for _, cosine, noise in result.parameters.values())
    assert (errors[0] > 1e-4) == is_short(name, "bf16")
    assert next(iter(result.parameters)) in str(result)
    assert f"to the sampling noise of a batch of {BATCH} examples" in str(result)


@pytest.mark.ranks
def test_what_is_not_within_the_bound_is_no_such_plan() -> None:
    made = planned(2, "data_parallel", global_batch=BATCH, wire=parse_wire("bf16"))
    files = dict(made.files)
    edited = files["all.py"].replace("total = comm.sum_loss(loss)", "loss = 1.05 * loss; total = comm.sum_loss(loss)")
    assert edited != files["all.py"]
    made.__dict__["files"] = files | {"all.py": edited}
    result = made.verify(steps=1, examples=BATCH)
    assert not result.holds and not result.bounded
    assert str(result).startswith("DOES NOT HOLD")


@pytest.mark.ranks
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FIRST[0] else [pytest.mark.slow]) for n in FIRST])
def test_a_run_goes_on_bit_for_bit_with_what_its_sums_had_lost(name: str, tmp_path: Path) -> None:
    made, given = program(name, MIXED), batches(4)

    def steps(worker: Worker, some: list[tuple[Tensor, Tensor]]) -> list[float]:
        return [float(worker.step(*part_of(worker, batch, made.plan.local_batches))) for batch in some]

    def at_once(worker: Worker) -> Any:
        steps(worker, given[:2])
        worker.save(tmp_path)
        return steps(worker, given[2:]), run_state(worker)

    def resumed(worker: Worker) -> Any:
        assert worker.resume(tmp_path) == 2
        roles = (role for each in run_state(worker)["features"] for role in each.get("roles", ()))
        kept = sum(float(value.norm()) for role in roles for value in role.values())
        return steps(worker, given[2:]), run_state(worker), kept

    before = on_workers(made, at_once, optimizer=sgd)
    after = on_workers(made, resumed, optimizer=sgd)
    assert sum(kept for *_, kept in after) > 0
    for (losses, state), (again, state_again, _) in zip(before, after, strict=True):
        assert losses == again
        assert_equal(state_again, state)


@pytest.mark.slow
@pytest.mark.processes
def test_processes_train_within_the_bound() -> None:
    for name, form in (
        ("modulo_shard(mp=2,scheme=B/K)", "bf16"),
        ("data_parallel", "fp8"),
        ("parameter_server", MIXED),
    ):
        made = planned(2, name, global_batch=64, wire=parse_wire(form))
        result = made.verify(steps=2, examples=64, processes=True)
        assert result.bounded and result.gradient_error > 1e-4, str(result)
