"""State of examples that goes from batch to batch in attributes of modules: the same as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.errors import CaptureError, PlacementError
from splitc.ir.program import Program
from splitc.ir.regions import regions
from splitc.runtime.worker import Worker
from tests.support.capturing import validated
from tests.support.compiled import analyse, compiled
from tests.support.ranks import assert_same, on_workers, sgd
from tests.support.sampling import sampled

Batch = tuple[Tensor, Tensor]


class Recurrent(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=first)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor
        y, state = self.rnn(x, self.state)
        self.state = [h.detach() for h in state]
        return y


class Remembering(nn.Module):
    """Attends to the segment before."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, Tensor] = {}
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.memory.get("x", x), x], 1)
        self.memory["x"] = x.detach()
        return x + F.scaled_dot_product_attention(self.query(x), self.key(both), both)


class Language(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.inner, self.decode = nn.Embedding(20, 8), nn.Sequential(*inner), nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Any:
        return self.decode(self.inner(self.embed(x)))


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.decode = nn.Embedding(20, 8), nn.GRUCell(8, 8), nn.Linear(8, 20)
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        first = self.embed(x[:, 0])
        if self.h is None or self.h.shape[0] != x.shape[0]:
            self.h = first.new_zeros(x.shape[0], 8)
        h = self.cell(first, self.h)
        self.h = h.detach()
        return self.decode(h).unsqueeze(1).expand(-1, x.shape[1], -1)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def batch_of(size: int, dim: int = 0) -> Batch:
    x = torch.randint(0, 20, (2, size, 7))
    return (x[0], x[1]) if dim == 0 else (x[0].T.contiguous(), x[1].T.contiguous())


def assert_trains_alike(
    model: nn.Module, program: CompiledProgram, batches: list[Batch], dim: int, kept: list[str]
) -> None:
    """Every third batch is evaluated, which changes the state too."""

    def on_rank(worker: Worker) -> Any:
        whole, losses = [b - a for a, b in pairwise(worker.rank.spec.batch_offsets)], []
        for k, batch in enumerate(batches):
            size = batch[0].shape[dim]
            sizes: Sequence[int] = [size * own // sum(whole) for own in whole]
            worker.use_sizes(sizes if sum(whole) != size else None)
            reader = worker.data_rank
            part = [] if reader is None else [t.split(list(sizes), dim)[reader] for t in batch]
            losses.append(float(worker.evaluate(*part) if k % 3 == 2 else worker.step(*part)))
        return losses, worker.state_dict()

    expected, model = list[float](), copy.deepcopy(model)
    updates = sgd(list(model.named_parameters()))
    for k, (x, y) in enumerate(batches):
        loss = loss_of(model.train(k % 3 != 2)(x), y)
        if k % 3 != 2:
            updates.zero_grad()
            loss.backward()
            updates.step()
        expected.append(float(loss.detach()))
    losses, state = on_workers(program, on_rank)[0]
    assert [own.path for _, own in regions(program.program) if own.keeps] == kept
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_same(state, model.state_dict(), 1e-4)


@cache
def known(dim: int) -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    model = Language(Recurrent(dim == 0))
    return model, analyse(model, *batch_of(8, dim), loss_of)


def planned(strategy: str, dim: int, world: int = 2) -> CompiledProgram:
    model, program = known(dim)
    return compiled(model, *batch_of(8, dim), loss_of, world, strategy, analysed=program)


@pytest.mark.slow
@sampled(
    ("strategy", "dim"), [("layer_separation", 0), ("data_parallel", 1), ("auto", 0), ("hybrid_single", 0)], one_in=4
)
def test_a_language_model_that_keeps_its_hidden_state_trains_as_in_one_process(strategy: str, dim: int) -> None:
    program = planned(strategy, dim, 3 if strategy == "layer_separation" else 2)
    batches = [batch_of(program.plan.global_batch, dim) for _ in range(9)]
    assert_trains_alike(known(dim)[0], program, batches, dim, ["inner.0"])
    assert strategy != "data_parallel" or program.verify(dtype=torch.float64).holds


def cell() -> tuple[nn.Module, list[str]]:
    return Cell(), [""]


def used_cell() -> tuple[nn.Module, list[str]]:
    model = Cell()
    model(batch_of(8)[0])
    return model, [""]


def memories() -> tuple[nn.Module, list[str]]:
    return Language(Remembering(), Remembering()), ["inner.0", "inner.1"]


@pytest.mark.slow
@pytest.mark.parametrize("make", [used_cell, cell, memories])
def test_state_of_other_kinds_and_from_before_goes_from_batch_to_batch(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, kept = make()
    program = compiled(model, *batch_of(8), loss_of, 2, "data_parallel", global_batch=8)
    sizes = [8, 8, 8] if isinstance(model, Language) else [8, 8, 4, 4, 8, 8]
    batches = [batch_of(size) for size in sizes]
    assert_trains_alike(model, program, batches, 0, kept)
    assert program.verify(dtype=torch.float64).holds


class Cached(nn.Module):
    """Keeps a table that is not of the batch, and a value that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table: Tensor | None = None
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1], device=x.device).to(x.dtype).cos()
        y = self.linear(x * self.table[:, None])
        self.last = y.detach()
        return torch.relu(y)


def test_a_table_and_a_value_that_nothing_reads_are_no_state() -> None:
    program = validated(Language(Cached()), *batch_of(4), loss_of)
    assert not program.coupled
    assert not list(regions(program))


@pytest.mark.slow
def test_what_kept_state_does_not_allow_is_said_by_name() -> None:
    report = planned("data_parallel", 0).report()
    assert "inner.0.state goes from batch to batch" in " ".join(report.split())
    for strategy in ("data_parallel(microbatches=2)", "local_sgd(period=2)"):
        with pytest.raises(PlacementError, match=r"whole batch at once: take 1|unlike values in inner.0.state"):
            planned(strategy, 0)
    model = Language(Recurrent(True))
    model(batch_of(5)[0])
    with pytest.raises(CaptureError, match=r"Expected hidden\[0\] size \(1, 8, 8\), got \[1, 5, 8\]"):
        compiled(model, *batch_of(8), loss_of, 2, "data_parallel")
