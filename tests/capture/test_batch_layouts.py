"""The batch dimension of every input is found, also of models that take sequences time first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.example.example import Example
from splitc.errors import LaunchError
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.ranks import on_workers
from tests.support.sampling import sampled


class Tagger(nn.Module):
    """Words (time, batch) -> scores of tags, by an LSTM as it is by default."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.words, self.lstm, self.hidden = nn.Embedding(20, 8), nn.LSTM(8, 8), nn.Linear(8, 6)
        self.tags, self.last = nn.Linear(6, 5), last

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.tags(self.hidden(self.lstm(self.words(words))[0]).relu())
        return scores[-1] if self.last else scores


def each_word(scores: Tensor, tags: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), tags.flatten())


def of(rows: int, last: bool) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 20, (7, rows)), torch.randint(0, 5, (rows,) if last else (7, rows))


@pytest.mark.slow
@sampled(("strategy", "last"), [("layer_separation", False), ("hybrid_single", True)], one_in=2)
def test_sequences_with_time_first_train_as_in_one_process(strategy: str, last: bool) -> None:
    program = compiled(Tagger(last), *of(4, last), F.cross_entropy if last else each_word, 2, strategy)
    assert [i.spec.batch_dim for i in program.program.inputs] == [1, 0 if last else 1]
    assert program.verify(dtype=torch.float64).holds


@pytest.mark.slow
def test_workers_take_their_columns_of_a_batch() -> None:
    model, (words, tags) = Tagger(last=False), of(8, last=False)
    program = compiled(model, *of(4, last=False), each_word, 2, "data_parallel")
    expected = float(each_word(model(words), tags).detach())

    def run(worker: Worker) -> float:
        own = slice(4 * (worker.data_rank or 0), 4 * (worker.data_rank or 0) + 4)
        with pytest.raises(LaunchError, match=r"words is \(4, 7\) torch.int64, this step needs \(7, 4\)"):
            worker.step(words[:, own].t(), tags[:, own])
        return float(worker.step(words[:, own], tags[:, own]))

    losses = on_workers(program, run, optimizer=lambda params: torch.optim.SGD([p for _, p in params], 0.1))
    assert losses == pytest.approx([expected] * 2, rel=1e-5)


class Viewed(nn.Module):
    """Takes views of (time, batch), as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.next = nn.Embedding(20, 8), nn.Linear(8, 6), nn.Linear(6, 20)

    def forward(self, words: Tensor) -> Tensor:
        seen = self.words(words.view(-1)).view(*words.shape, 8).cumsum(0)
        return self.next(self.hidden(seen).relu()).view(-1, 20)


def next_word(scores: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(scores, words.view(-1))


@pytest.mark.slow
@pytest.mark.parametrize(("time", "strategy"), [(5, "data_parallel"), (4, "hybrid_single(microbatches=2)")])
def test_views_are_taken_of_drawn_batches_of_parts_and_of_microbatches(time: int, strategy: str) -> None:
    torch.manual_seed(0)
    model, (words, after) = Viewed(), torch.randint(0, 20, (2, time, 8)).unbind()
    parts, expected = words[:, :4].contiguous(), next_word(model(words), after).detach()
    program = compiled(model, parts, after[:, :4].contiguous(), next_word, 2, strategy)
    assert [i.spec.batch_dim for i in program.program.inputs] == [1, 1]
    text = "The batch is dim 1 of words and target, 4 examples; not dim 0 of words and target, since "
    assert any(note.startswith(text) for note in program.program.notes)
    assert program.verify(dtype=torch.float64).holds

    def run(worker: Worker) -> float:
        own = slice(4 * (worker.data_rank or 0), 4 * (worker.data_rank or 0) + 4)
        return float(worker.step(*(() if worker.data_rank is None else (words[:, own], after[:, own]))))

    if "separation" not in strategy:  # which has one reader
        assert on_workers(program, run) == pytest.approx([float(expected)] * 2, rel=1e-5)


def test_rows_are_taken_along_the_batch() -> None:
    words, tags = of(4, last=True)
    bound = Example.bind(Tagger(last=True), words, tags, F.cross_entropy)
    taken: Any = bound.rows([3, 1])
    assert (
        bound.batch == 4
        and torch.equal(taken["words"], words[:, [3, 1]])
        and torch.equal(taken["target"], tags[[3, 1]])
    )
