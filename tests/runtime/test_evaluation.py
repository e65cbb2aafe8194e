"""What `worker.evaluate` computes: the model in evaluation mode, as one process would, and training is not changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from splitc.ir.program import LoweredProgram
from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_resume import assert_equal
from tests.support.compiled import compiled
from tests.support.models import CLASSES, labels, made, vectors
from tests.support.ranks import on_workers, part_of
from tests.support.sampling import along, sampled

Run = Callable[[Any, Tensor], Tensor]


def as_in_training(m: Any, x: Tensor) -> Tensor:
    return m.fc(m.b(m.drop(m.norm(m.a(x)))))


def another_branch(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.fc(m.b(2 * h if m.training else h))


def without_a_layer(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.fc(m.b(h) if m.training else h)


def with_a_layer_of_its_own(m: Any, x: Tensor) -> Tensor:
    h = m.fc(m.b(m.a(x)))
    return h if m.training else m.calibration(h) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(m.training):
        h = m.b(m.a(x))
    return m.fc(h if m.training else h + 1)


def counting(m: Any, x: Tensor) -> Tensor:
    m.steps.add_(1)
    return m.fc(m.b(m.a(x)) * m.steps)


def with_recurrent_dropout(m: Any, x: Tensor) -> Tensor:
    return m.fc(m.b(m.rnn(m.a(x).unflatten(1, (2, 4)))[0].flatten(1)))


SHARED = [as_in_training, counting, with_recurrent_dropout]
OWN = [another_branch, without_a_layer, with_a_layer_of_its_own, without_gradient]
STRATEGIES = {"layer_separation": 3, "modulo_shard(scheme=B/K)": 4, "parameter_server": 3}
PINS = {"a": "trunk", "norm": "trunk", "b": "head", "fc": "head"}


def program_of(run: Run, strategy: str) -> tuple[nn.Module, CompiledProgram]:
    torch.manual_seed(0)
    children = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "fc": nn.Linear(8, CLASSES), "drop": nn.Dropout(0.5)}
    children["rnn"] = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)
    more = {"norm": nn.BatchNorm1d(8), "calibration": nn.Linear(CLASSES, CLASSES), "steps": nn.Buffer(torch.ones(()))}
    model: Any = made(run, **children, **more)
    model.norm.running_mean.normal_()
    used = PINS if run is as_in_training else {name: role for name, role in PINS.items() if name != "norm"}
    pins = used if strategy == "layer_separation" else {}
    program = compiled(model, vectors()(), labels()(), F.cross_entropy, STRATEGIES[strategy], strategy, pins=pins)
    return model, program


def losses(program: CompiledProgram, batch: tuple[Tensor, ...], sizes: list[int]) -> list[float]:
    """Of two evaluations, of a step, of an evaluation."""

    def run(worker: Worker) -> list[float]:
        worker.use_sizes(sizes)
        own = part_of(worker, batch, sizes)
        calls = (worker.evaluate, worker.evaluate, worker.step, worker.evaluate)
        return [float(call(*own)) for call in calls]

    return on_workers(program, run)[0]


@along(2, run=[*SHARED, *OWN], strategy=STRATEGIES)
def test_evaluation_is_that_of_one_process_on_uneven_batches(run: Run, strategy: str) -> None:
    model, program = program_of(run, strategy)
    sizes = [program.plan.local_batches[0] - 1, *program.plan.local_batches[1:]]
    batch = (torch.randn(sum(sizes), 8), torch.randint(CLASSES, (sum(sizes),)))
    first, second, _, after = losses(program, batch, sizes)
    expected = F.cross_entropy(copy.deepcopy(model).eval()(batch[0]), batch[1])
    assert first == second == pytest.approx(float(expected.detach()), rel=1e-5)
    assert after != first


@pytest.mark.slow
def test_a_dropout_that_stays_on_draws_the_same_masks_in_every_layout() -> None:
    found = []
    for strategy in STRATEGIES:
        _, program = program_of(lambda m, x: m.fc(F.dropout(m.b(m.drop(m.a(x))), 0.5, True)), strategy)
        size = program.plan.global_batch
        torch.manual_seed(1)
        batch = (torch.randn(16, 8)[:size], torch.randint(CLASSES, (16,))[:size])
        first, second, _, _ = losses(program, batch, list(program.plan.local_batches))
        assert first == second
        found.append((size, first))
    ((_, one), (_, other)) = [each for each in found if each[0] == found[0][0]]
    assert one == pytest.approx(other, rel=1e-5)


def read_again_in_the_head(m: Any, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    return m.fc(h if m.training else m.a(h))


def branch_on_data(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.fc(m.b(h if m.training or h.mean() > 0 else 2 * h))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "text"),
    [(branch_on_data, "a branch needs the value of gt"), (read_again_in_the_head, "evaluation reads a.weight in role")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_evaluation_that_cannot_be_compiled_is_refused_and_training_goes_on(run: Run, text: str) -> None:
    _, program = program_of(run, "layer_separation")
    batch = (torch.randn(program.plan.global_batch, 8), torch.randint(CLASSES, (program.plan.global_batch,)))

    def both(worker: Worker) -> tuple[str, float]:
        own = part_of(worker, batch, program.plan.local_batches)
        with pytest.raises(LaunchError) as error:
            worker.evaluate(*own)
        return str(error.value), float(worker.step(*own))

    for said, loss in on_workers(program, both):
        assert text in said and loss > 0


def test_a_module_that_was_set_to_evaluation_stays_so() -> None:
    _, program = program_of(as_in_training, "layer_separation")
    batch = (torch.randn(program.plan.global_batch, 8), torch.randint(CLASSES, (program.plan.global_batch,)))

    def modes(worker: Worker) -> list[bool]:
        first = next(worker.stage.children())
        first.eval()
        worker.evaluate(*part_of(worker, batch, program.plan.local_batches))
        return [first.training, worker.stage.training]

    assert on_workers(program, modes) == [[False, True]] * 3


def dropping(m: Any, x: Tensor) -> Tensor:
    return m.fc(F.dropout(m.b(m.a(x)), 0.5, training=True))


@pytest.mark.slow
@sampled("run", [with_recurrent_dropout, another_branch, *SHARED[:2], *OWN[1:], dropping], one_in=8)
def test_a_model_that_never_asks_for_its_mode_is_traced_once_and_another_forward_is_written(run: Run) -> None:
    _, program = program_of(run, "parameter_server")
    assert program.program.reads_mode == (run not in SHARED)
    if run is not dropping:
        assert ("forward_evaluating" in program.files["worker.py"]) == (run in OWN)
        assert isinstance(program.program.evaluation, LoweredProgram) == (run in OWN)


@along(1, strategy=STRATEGIES)
def test_buffers_travel_once_a_loader_and_those_of_the_same_ranks_together(strategy: str) -> None:
    _, program = program_of(as_in_training, strategy)
    sizes = list(program.plan.local_batches)
    batch = torch.randn(sum(sizes), 8), torch.randint(CLASSES, (sum(sizes),))

    def run(worker: Worker, at_once: bool) -> tuple[list[int], list[Tensor], dict[str, Tensor]]:
        transport: Any = worker.rank.transport
        counts, broadcast = [0], transport.broadcast

        def counted(tensor: Tensor, *where: Any) -> Any:
            counts[-1] += 1
            return broadcast(tensor, *where)

        transport.broadcast = counted
        own = part_of(worker, batch, sizes)
        found = []
        for _ in range(2):
            worker.step(*own)
            for _ in range(3):
                worker._evaluation.alike &= at_once
                found.append(worker.evaluate(*own))
                worker.predict(*own)
            counts.append(0)
        return counts, found, dict(worker.stage.named_buffers())

    for once, each in zip(
        on_workers(program, lambda worker: run(worker, True)),
        on_workers(program, lambda worker: run(worker, False)),
        strict=True,
    ):
        assert_equal(once[1:], each[1:])
        kinds = 2 if each[0][0] else 0  # the statistics, and the count of batches
        assert once[0] == [kinds, kinds, 0] and each[0] == [3 * kinds, 3 * kinds, 0]
