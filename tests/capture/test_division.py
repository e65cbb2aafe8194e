"""Batches that a user says how to divide: tensors that are whole on every rank, and jagged ones, by a function."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.compiled import CompiledProgram
from splitc.errors import ArgumentError, CaptureError, PlacementError
from splitc.runtime.worker import Worker
from tests.support.compiled import CLUSTER
from tests.support.ranks import assert_same, on_workers, one_process


class Bag(nn.Module):
    """Bags of words, each of any number -> scores."""

    def __init__(self, last: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.words, self.scores = nn.EmbeddingBag(30, 6, include_last_offset=last), nn.Linear(6, 4)
        self.drop = nn.Dropout(drop)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return self.scores(self.drop(self.words(indices, offsets)))


def bags(lengths: list[int], last: bool = False) -> tuple[Tensor, Tensor]:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.randint(0, 30, (sum(lengths),)), offsets if last else offsets[:-1]


def of_bags(batch: Any, a: int, b: int) -> Any:
    """Examples of (indices, offsets, target)."""
    indices, offsets, target = batch
    ends = torch.cat([offsets, torch.tensor([len(indices)])])
    return indices[ends[a] : ends[b]], offsets[a:b] - offsets[a], target[a:b]


def of_bags_alone(batch: Any, a: int, b: int) -> Any:
    """Examples of inputs by name, whose last offset is included."""
    ends = batch["offsets"]
    return {"indices": batch["indices"][ends[a] : ends[b]], "offsets": ends[a : b + 1] - ends[a]}


class Graphs(nn.Module):
    """Several graphs in one: nodes, edges, and the graph of each node -> a row for each graph."""

    def __init__(self, norm: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.norm, self.drop = nn.BatchNorm1d(6) if norm else nn.Identity(), nn.Dropout(drop)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
        h = self.drop(self.norm(self.first(x)))
        h = F.relu(h.index_add(0, edge_index[1], h[edge_index[0]]))
        number = int(graph.max()) + 1
        return self.last(h.new_zeros(number, 6).index_add(0, graph, h))


def graphs(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    edges = [start + torch.randint(0, n, (2, n + 1)) for start, n in zip(starts, sizes, strict=True)]
    return torch.randn(sum(sizes), 5), torch.cat(edges, 1), graph


def of_graphs(batch: Any, a: int, b: int) -> Any:
    x, edges, graph, target = batch
    own = (graph >= a) & (graph < b)
    return x[own], edges[:, own[edges[0]]] - int(own.nonzero()[0]), graph[own] - a, target[a:b]


class Nodes(nn.Module):
    """Messages over one graph, and the scores of some of its nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor, seeds: Tensor) -> Tensor:
        h = F.dropout(F.relu(self.norm(self.first(x))), 0.3, self.training)
        return self.last(h.index_add(0, edge_index[1], h[edge_index[0]]))[seeds]


class Pairs(nn.Module):
    """Each of some nodes against each other one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)

    def forward(self, x: Tensor, seeds: Tensor) -> Tensor:
        h = self.first(x)[seeds]
        return h @ h.t()


NODES = torch.randn(9, 5), torch.randint(0, 9, (2, 20)), torch.tensor([1, 4, 2, 7, 8, 0])
BAGS = bags([3, 1, 4, 2, 5, 2])
NAMED = dict(zip(("indices", "offsets"), bags([3, 1, 4, 2, 5, 2], True), strict=True))


def made(
    model: nn.Module, example: Any, batch: Any, strategy: str = "data_parallel", **options: Any
) -> CompiledProgram:
    classes = torch.arange(6) % 3
    program = splitc.compile(
        model, 2, example, classes, F.cross_entropy, cluster=CLUSTER, strategy=strategy, batch=batch, **options
    )
    assert isinstance(program, CompiledProgram)
    return program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "example", "batch"),
    [
        pytest.param(Bag(drop=0.5), BAGS, of_bags, marks=pytest.mark.slow),
        pytest.param(Bag(last=True), NAMED, of_bags_alone, marks=pytest.mark.slow),
        (Graphs(), graphs([3, 2, 4, 3, 5, 2]), of_graphs),
        pytest.param(Nodes(), NODES, {"x": None, "edge_index": None}, marks=pytest.mark.slow),
    ],
    ids=["dropout", "by name", "graphs", "nodes"],
)
def test_what_is_divided_as_the_user_says_trains_as_one_process(model: nn.Module, example: Any, batch: Any) -> None:
    program = made(model, example, batch)
    assert program.plan.roles == {"all": (0, 1)}
    assert program.verify(dtype=torch.float64).holds


@pytest.mark.slow
def test_jagged_batches_of_any_sizes_train_and_evaluate_as_in_one_process() -> None:
    model = Bag()
    program = made(copy.deepcopy(model), BAGS, of_bags, global_batch=4)
    examples = [(torch.randint(0, 30, (n,)), torch.tensor(n % 4)) for n in (2, 5, 1, 3, 3, 4, 1)]

    def collate(some: list[Any]) -> tuple[Tensor, ...]:
        offsets = torch.tensor([0, *(len(words) for words, _ in some)]).cumsum(0)[:-1]
        return torch.cat([words for words, _ in some]), offsets, torch.stack([target for _, target in some])

    def run(worker: Worker) -> tuple[list[float], Any, float]:
        loader = worker.loader(examples, shuffle=False, drop_last=False, collate_fn=collate)
        losses = [float(worker.step(*batch)) for batch in loader]
        return losses, worker.state_dict(), float(worker.evaluate(loader))

    (found, state, mean), _ = on_workers(program, run)
    losses, trained = one_process(model, [collate(examples[:4]), collate(examples[4:])])
    assert found == pytest.approx(losses, rel=1e-5)
    assert_same(state, trained)
    *inputs, target = collate(examples)
    assert mean == pytest.approx(float(F.cross_entropy(model(*inputs), target).detach()), rel=1e-5)


def test_a_rank_without_jagged_examples_takes_part() -> None:
    model = Bag()
    program = made(copy.deepcopy(model), BAGS, of_bags)
    batch = torch.tensor([3, 9]), torch.tensor([0]), torch.tensor([2])

    def run(worker: Worker) -> tuple[float, Any]:
        worker._sizes, worker._is_tail = (1, 0), True  # as a loader sets them
        return float(
            worker.step(*(batch if worker.data_rank == 0 else [each[:0] for each in batch]))
        ), worker.state_dict()

    found, state = on_workers(program, run)[0]
    losses, trained = one_process(model, [batch])
    assert [found] == pytest.approx(losses, rel=1e-5)
    assert_same(state, trained)


class Scored(nn.Module):
    """Returns its loss.  words: a mean over the words of all bags."""

    def __init__(self, words: bool = False) -> None:
        super().__init__()
        self.bag, self.of_words = Bag(), words

    def forward(self, indices: Tensor, offsets: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(self.bag(indices, offsets), target)
        return self.bag.words(indices, torch.arange(len(indices))).square().mean() if self.of_words else loss


def losses_of(model: nn.Module, lengths: list[int]) -> CompiledProgram:
    example = (*bags(lengths), torch.arange(6) % 3)
    program = splitc.compile(model, 2, example, cluster=CLUSTER, strategy="data_parallel", batch=of_bags)
    assert isinstance(program, CompiledProgram)
    return program


@pytest.mark.slow
def test_losses_that_a_divided_model_returns_are_measured() -> None:
    assert losses_of(Scored(), [3, 1, 4, 2, 5, 2]).verify(dtype=torch.float64).holds
    for lengths, why in (
        ([2, 2, 2, 2, 2, 1], "neither their sum nor their mean"),
        ([2, 2, 2, 2, 2, 2], r"indices of the size \(2,\), so that a loss over all of them cannot be told"),
    ):
        with pytest.raises(CaptureError, match=why):
            losses_of(Scored(words=True), lengths)


def wrong_words(batch: Any, a: int, b: int) -> Any:
    indices, offsets, target = of_bags(batch, a, b)
    return (indices if b - a == 6 else (indices + 1) % 30), offsets, target


REFUSED: list[tuple[nn.Module, Any, Any, str]] = [
    (Bag(), BAGS, wrong_words, r"for which Bag returns something else: of examples 0 to 3 and 3 to 6 it .* by \d"),
    (Bag(), BAGS, lambda batch, a, b: 1 / 0, "fails on example 0 of the batch: ZeroDivisionError"),
    (Bag(), BAGS, lambda batch, a, b: batch[0], "gives no tensor indices like the example's"),
    (Bag(), BAGS, lambda batch, a, b: of_bags(batch, a, min(b, 5)), r"another indices for all 6 examples, \(15,\)"),
    (Bag(), BAGS, {"indices": None}, "offsets divide what is read here into bags by the data. Give bags as rows"),
    (Pairs(), NODES[::2], {"x": None}, "as batch=, or lists, divide the examples, a rank cannot train on its part"),
    (Graphs(norm=True), graphs([3, 2, 4, 3, 5, 2]), of_graphs, "rows that BatchNorm counts follow from the data"),
    (Graphs(drop=0.5), graphs([3, 2, 4, 3, 5, 2]), of_graphs, "dropout of jagged rows"),
    (Nodes(), NODES, {"x": None, "edge": None}, "names edge, and the example has x, edge_index, seeds, target"),
    (Nodes(), NODES, {"x": None, "edge_index": "all"}, "edge_index is 'all'; it must be a whole number"),
    (Nodes(), NODES, {"edge_index": None}, "x has 9, seeds has 6, target has 6 rows; give batch= for each"),
    (Nodes(), NODES, dict.fromkeys(("x", "edge_index", "seeds", "target")), "leaves no examples to divide"),
    (Nodes(), NODES, 3, "batch is 3; it must be a table or a function"),
    (Nodes(), NODES, None, "disagree about the batch.* batch= says how others are divided"),
]


@pytest.mark.parametrize(("model", "example", "batch", "why"), REFUSED)
def test_a_division_that_cannot_be_is_refused_by_name(
    model: nn.Module, example: Any, batch: dict[str, int] | Callable[..., Any] | None, why: str
) -> None:
    with pytest.raises((CaptureError, ArgumentError), match=why):
        made(model, example, batch)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["layer_separation", "data_parallel(microbatches=2)"])
def test_strategies_that_would_move_jagged_tensors_are_refused_and_auto_finds_another(strategy: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(strategy.partition("(")[0])):
        made(Bag(), BAGS, of_bags, strategy)
    assert made(Bag(), BAGS, of_bags, "auto").plan.strategy in ("data_parallel", "single_device")
