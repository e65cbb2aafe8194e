"""What launch.py trains on: a Dataset by epochs, a user's batches, where a resumed run goes on in them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from splitc.errors import LaunchError
from splitc.runtime.launch.feed import Batches, _right, evaluated, evaluation
from splitc.runtime.launch.main import resume
from splitc.runtime.worker import Worker
from tests.support.launched import BATCH, WORLD, Examples, Perceptron, program
from tests.support.ranks import on_workers

HERE = "tests.runtime.launch.test_feed"


def args(**given: Any) -> Namespace:
    return Namespace(**{"steps": None, "epochs": None, "data": None, "eval_data": None, "seed": 0, **given})


def dataset(worker: Worker) -> Dataset[Any]:
    return Examples()


def two_batches(worker: Worker) -> Iterator[tuple[Tensor, ...]]:
    for _ in range(2):
        yield Examples()[:BATCH]


def test_a_dataset_is_read_in_epochs_each_in_an_order_of_its_own() -> None:
    def run(worker: Worker) -> list[Tensor]:
        batches = Batches(worker, args(data=f"{HERE}:dataset", epochs=3))
        assert len(batches) == 6
        return [x for x, _ in batches]

    shares = on_workers(program("data_parallel"), run)
    epochs = [torch.cat([share[2 * e + k] for k in range(2) for share in shares]) for e in range(3)]
    examples = {tuple(row.tolist()) for row in Examples()[:][0]}
    assert all({tuple(row.tolist()) for row in epoch} == examples for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.slow
@pytest.mark.parametrize("data", [None, f"{HERE}:dataset", "tests.support.launched:batches"])
def test_a_resumed_run_goes_on_behind_the_batches_that_were_trained_on(data: str | None, tmp_path: Path) -> None:
    def train(worker: Worker, steps: int, at: int) -> list[float]:
        batches = Batches(worker, args(data=data, steps=steps))
        if at:
            assert worker.resume(tmp_path) == at
        return [float(worker.step(*batch)) for batch in batches]

    def first(worker: Worker) -> list[float]:
        losses = train(worker, 3, 0)
        worker.save(tmp_path)
        return losses

    whole = on_workers(program("data_parallel"), lambda worker: train(worker, 7, 0))[0]
    assert (
        on_workers(program("data_parallel"), first)[0]
        + on_workers(program("data_parallel"), lambda worker: train(worker, 7, 3))[0]
        == whole
    )


def test_batches_that_end_early_and_epochs_of_what_has_no_length_are_named() -> None:
    def early(worker: Worker) -> str:
        with pytest.raises(LaunchError) as caught:
            list(Batches(worker, args(data=f"{HERE}:two_batches", steps=4)))
        with pytest.raises(LaunchError, match="two_batches gives is no Dataset with a length; give --steps"):
            Batches(worker, args(data=f"{HERE}:two_batches", epochs=1))
        return str(caught.value)

    texts = on_workers(program("data_parallel"), early)
    assert texts == [f"the data of rank {rank} ended after 2 of 4 steps" for rank in range(WORLD)]


def test_the_evaluation_is_the_mean_over_a_dataset() -> None:
    x, y = Examples()[:]
    expected = F.cross_entropy(Perceptron()(x), y).item()

    def run(worker: Worker) -> float:
        assert evaluation(worker, args()) is None
        with pytest.raises(LaunchError, match="two_batches gives a generator; let it give a Dataset"):
            evaluation(worker, args(eval_data=f"{HERE}:two_batches"))
        return float(worker.evaluate(evaluation(worker, args(eval_data=f"{HERE}:dataset"))))

    assert on_workers(program("data_parallel"), run) == pytest.approx([expected] * WORLD)


def test_resuming_where_there_is_no_checkpoint_begins_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_workers(program("data_parallel"), lambda worker: resume(worker, Namespace(checkpoints=tmp_path)))
    on_workers(program("data_parallel"), lambda worker: worker.save(tmp_path))
    on_workers(program("data_parallel"), lambda worker: resume(worker, Namespace(checkpoints=tmp_path)))
    said = capsys.readouterr().out.splitlines()
    assert said == [f"no checkpoint in {tmp_path}: training begins", f"goes on after step 0, from {tmp_path}"]


@pytest.mark.parametrize("strategy", ["data_parallel", "layer_separation(n_c=1, n_f=1)"])
def test_accuracy_is_that_of_the_whole_model_on_all_examples(strategy: str) -> None:
    asked = args(eval_data=f"{HERE}:dataset", accuracy=True)

    def run(worker: Worker) -> list[str]:
        loader = evaluation(worker, asked)
        assert loader is not None
        return [evaluated(worker, loader, asked) for _ in range(2)]

    x, y = Examples()[:]
    right = (Perceptron()(x).argmax(1) == y).double().mean()
    for texts in on_workers(program(strategy), run):
        assert [text.partition("  ")[2] for text in texts] == [f"accuracy {right:.4f}"] * 2


def test_accuracy_of_outputs_that_are_no_scores_of_classes_is_refused_on_every_rank() -> None:
    assert _right(torch.rand(4, 3), (torch.zeros(4, 3),)) is None
    assert _right(torch.eye(3)[None], (torch.rand(1, 3, 2), torch.tensor([[0, 2, -100]]))) == (1, 2)  # tokens
