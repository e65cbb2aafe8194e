"""Bags that offsets divide, as DLRM writes them: those of one size are rows, which every rank can divide."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.capture.example.division import with_bags
from splitc.capture.example.example import Example
from splitc.compiled import CompiledProgram
from splitc.errors import CaptureError
from splitc.runtime.bags import are_divided, divided, whole
from splitc.runtime.data import as_tuple
from splitc.runtime.errors import LaunchError
from splitc.runtime.worker import Worker
from tests.support.capturing import captured
from tests.support.compiled import CLUSTER
from tests.support.ranks import assert_same, on_workers, one_process

ROWS, WIDTH, EACH = (40, 7, 5), 4, 3


class Bags(nn.Module):
    """Look-ups (batch, 3) whose offsets forward makes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.EmbeddingBag(9, WIDTH, mode="sum", include_last_offset=how == "bounds")
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, flat = x.size(0), x.flatten()
        if self.how == "function":
            found = F.embedding_bag(flat, self.table.weight, torch.arange(n) * EACH, mode="sum")
        elif self.how == "weights":
            found = self.table(flat, torch.arange(0, x.numel(), EACH), (flat + 1.0) / 9)
        elif self.how == "unlike":
            ends = torch.arange(n).unsqueeze(1) * EACH + torch.tensor([0, 1])
            found = self.table(flat, ends.flatten()).view(n, 2, WIDTH).sum(1)
        else:
            found = self.table(flat, torch.full((n + (self.how == "bounds"),), EACH).cumsum(0) - EACH)
        return self.head(found).squeeze(1)


@pytest.mark.parametrize("how", ["module", "bounds", "function", "weights"])
def test_bags_of_one_size_are_rows_whatever_makes_their_offsets(how: str) -> None:
    program = captured(Bags(how), (torch.randint(9, (5, EACH)),), torch.rand(5), F.mse_loss)
    (bag,) = (node for node in program.graph.nodes if node.target is F.embedding_bag)
    assert [n.name for n in bag.all_input_nodes if "offset" in n.name or "arange" in n.name or "cumsum" in n.name] == []
    assert list(bag.kwargs) == ["mode", *["per_sample_weights"] * (how == "weights")]


def test_bags_of_other_sizes_that_no_data_change_stay_as_they_are() -> None:
    program = captured(Bags("unlike"), (torch.randint(9, (5, EACH)),), torch.rand(5), F.mse_loss)
    (bag,) = (node for node in program.graph.nodes if node.target is F.embedding_bag)
    assert len(bag.all_input_nodes) == 3


@pytest.mark.parametrize("has_end", [False, True])
def test_offsets_and_look_ups_travel_as_rows_and_come_back(has_end: bool) -> None:
    flat = torch.randint(9, (2, 4 * EACH))
    offsets = torch.arange(0, 4 * EACH + has_end, EACH, dtype=torch.int32).expand(2, -1)
    key = f"bag_{'bounds' if has_end else 'starts'}_{EACH}"
    rows, none = divided(flat, f"bag_rows_{EACH}"), divided(offsets, key)
    assert rows is not None and none is not None and (rows.shape, none.shape) == ((2, 4, EACH), (2, 4, 0))
    assert torch.equal(whole(rows, f"bag_rows_{EACH}"), flat) and torch.equal(whole(none, key), offsets)  # type: ignore[arg-type]
    assert are_divided([(key, none)]) and not are_divided([(key, offsets)])
    paths = {"x": ("x", f"bag_rows_{EACH}"), "o": ("o", key), "y": ("y",)}
    batch = as_tuple((flat, offsets, flat), paths)
    assert [tuple(each.shape) for each in batch] == [(2, 4, EACH), (2, 4, 0), (2, 4 * EACH)]
    assert all(map(torch.equal, as_tuple(batch, paths), batch))
    for wrong in ((flat[:, 1:], f"bag_rows_{EACH}"), (offsets + 1, key)):
        with pytest.raises(LaunchError, match=r"every bag of the example has 3 look-ups, .* rows, .* padding_idx=0"):
            divided(*wrong)


class DLRM(nn.Module):
    """Dense features, offsets of each table's bags and their look-ups -> the logit of a click."""

    def __init__(self, has_end: bool = False, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, WIDTH), nn.ReLU())
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, WIDTH, mode="sum", include_last_offset=has_end, sparse=sparse) for rows in ROWS
        )
        if tied:
            self.tables[2].weight = self.tables[1].weight
        pairs = len(ROWS) * (len(ROWS) + 1) // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, offsets: Any, indices: list[Tensor]) -> Tensor:
        x = self.bottom(dense)
        found = [table(indices[k], offsets[k]) for k, table in enumerate(self.tables)]
        fields = torch.cat([x, *found], 1).view(len(x), -1, WIDTH)
        first, second = torch.tril_indices(len(ROWS) + 1, len(ROWS) + 1, offset=-1)
        return self.top(torch.cat([x, (fields @ fields.mT)[:, first, second]], 1)).squeeze(1)


def batch(n: int, seed: int, size: int = EACH, has_end: bool = False, listed: bool = False) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(0, n * size + has_end, size).repeat(len(ROWS), 1)
    indices = [torch.randint(5, (n * size,), generator=generator) for _ in ROWS]
    clicks = torch.randint(2, (n,), generator=generator).double()
    dense = torch.randn(n, 6, dtype=torch.float64, generator=generator)
    return dense, list(offsets) if listed else offsets, indices, clicks


def made(model: nn.Module, given: tuple[Any, ...]) -> CompiledProgram:
    *inputs, target = given
    loss = F.binary_cross_entropy_with_logits
    found = splitc.compile(model, 2, tuple(inputs), target, loss, cluster=CLUSTER, strategy="late_multiply")
    assert isinstance(found, CompiledProgram)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "has_end", "listed", "options"),
    [(EACH, False, True, {}), (EACH, True, False, {"tied": True}), (1, False, False, {"sparse": True})],
    ids=str,
)
def test_a_model_given_offsets_trains_and_predicts_as_in_one_process(
    size: int, has_end: bool, listed: bool, options: dict[str, bool]
) -> None:
    def model() -> DLRM:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return DLRM(has_end, **options).double()

    def updates(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    parts = [[batch(4, 2 * step + rank, size, has_end, listed) for rank in range(2)] for step in range(3)]
    program = made(model(), parts[0][0])
    late = {name for name, place in program.plan.placements.items() if place.sync == "late_multiply"}
    assert late >= {"tables.0", "tables.1", *["tables.2"] * (not options.get("tied"))}  # one layer of two tied tables
    predicted = model()(*parts[0][1][:-1])

    def run(worker: Worker) -> Any:
        rank = worker.data_rank or 0
        found = worker.predict(*parts[0][rank][:-1])
        losses = [float(worker.step(*both[rank])) for both in parts]
        with pytest.raises(LaunchError, match="this batch has others"):
            worker.step(*batch(4, 0, size + 1, has_end, listed))
        return found, losses, worker.state_dict()

    got = on_workers(program, run, optimizer=updates)
    torch.testing.assert_close(got[1][0], predicted.detach())
    whole = []
    for one, two in parts:
        joined = [torch.cat(pair) for pair in zip(one[2], two[2], strict=True)]
        whole.append((torch.cat([one[0], two[0]]), batch(8, 0, size, has_end)[1], joined, torch.cat([one[3], two[3]])))
    losses, state = one_process(model(), whole, updates, F.binary_cross_entropy_with_logits)  # type: ignore[arg-type]
    torch.testing.assert_close(got[0][1], losses, rtol=1e-8, atol=1e-8)
    assert_same(got[0][2], state, 1e-8)


class ReadsTwice(nn.Module):
    """Reads what could be offsets as rows of a table too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.users = nn.EmbeddingBag(9, WIDTH), nn.Embedding(9, WIDTH)

    def forward(self, bags: Tensor, users: Tensor) -> Tensor:
        return (self.table(bags, users) + self.users(users)).sum(1)


def test_numbers_in_equal_steps_are_no_offsets_beside_bags_that_are_rows_already() -> None:
    given = {"bags": torch.randint(9, (4, 2)), "users": torch.arange(4), "dense": torch.randn(4)}
    assert with_bags(given) == given
    found = with_bags({"x": torch.randint(9, (4,)), "o": torch.arange(4), "w": torch.randn(4)})
    assert list(found["o"]) == ["bag_starts_1"] and found["x"].shape == (4,)


def test_bags_of_other_sizes_are_refused_with_what_to_write() -> None:
    rows = re.escape("Give bags as rows, (batch, most look-ups), to nn.EmbeddingBag(..., padding_idx=0)")
    dense, offsets, indices, clicks = batch(4, 0)
    ragged = offsets + torch.tensor([0, 1, 0, 1])
    for given in (ragged, list(ragged)):
        with pytest.raises(CaptureError, match=f"disagree about the batch: .*{rows}"):
            Example.bind(DLRM(), (dense, given, indices), clicks, F.binary_cross_entropy_with_logits)
    x = torch.tensor([3, 8, 2, 4])
    with pytest.raises(CaptureError, match=f"offsets divide what is read here into bags by the data. {rows}"):
        captured(ReadsTwice(), (x, torch.tensor([0, 1, 1, 3])), torch.rand(4), F.mse_loss)
    with pytest.raises(CaptureError, match=r"users counts in equal steps in the example, .* read as something else"):
        captured(ReadsTwice(), (x, torch.arange(4)), torch.rand(4), F.mse_loss)
