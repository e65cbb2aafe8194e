"""A worker's share of a dataset, and its evaluation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from splitc.errors import LaunchError
from splitc.runtime.data import order
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.ranks import (
    Net,
    assert_same,
    batch_of,
    batches_for,
    compile_net,
    on_workers,
    one_process,
    part_of,
    plain,
    train,
)
from tests.support.sampling import along, sampled

# -- shard -------------------------------------------------------------------------------------------------------------


def test_an_epoch_of_shard_is_that_of_one_process_with_its_tail() -> None:
    model, program = plain()
    dataset = TensorDataset(*batch_of(21))
    batches = [dataset[k : k + 8] for k in (0, 8, 16)]

    def run(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        losses = [float(worker.step(*batch)) for batch in worker.shard(dataset, shuffle=False, drop_last=False)]
        return losses, worker.state_dict()

    results = on_workers(program, run)
    losses, state = one_process(copy.deepcopy(model), batches)
    for got, _ in results:
        assert got == pytest.approx(losses, rel=1e-5)
    assert_same(results[0][1], state)


def test_an_evaluation_inside_a_training_loop_leaves_its_batch_sizes_alone() -> None:
    _, program = plain()
    training, held_out = TensorDataset(*batch_of(20)), TensorDataset(*batch_of(9))

    def run(worker: Worker) -> int:
        for batch in worker.shard(training, batch_size=2):
            worker.step(*batch)
            break  # which leaves the sizes as compiled
        steps = 0
        worker.step(*part_of(worker, batch_of(8), (4, 4)))
        for batch in worker.shard(training, batch_size=2):
            for other in worker.shard(held_out, batch_size=3, drop_last=False):
                worker.evaluate(*other)
            worker.step(*batch)
            steps += 1
        worker.step(*part_of(worker, batch_of(8), (4, 4)))  # after the loops: as compiled again
        return steps

    assert on_workers(program, run) == [5, 5, 5]


def test_a_batch_size_below_one_is_refused_at_once() -> None:
    _, program = plain()

    def run(worker: Worker) -> None:
        with pytest.raises(LaunchError, match="batch_size=0"):
            worker.shard(TensorDataset(*batch_of(8)), batch_size=0)

    on_workers(program, run)


def test_a_dataset_without_a_single_step_is_refused_on_every_rank() -> None:
    _, program = plain("layer_separation(n_c=1, n_f=2)")
    dataset = TensorDataset(*batch_of(1))

    def run(worker: Worker) -> None:
        for drop_last in (True, False):
            with pytest.raises(LaunchError, match="has 1 examples and a global batch 4, so an epoch has no step"):
                list(worker.shard(dataset, drop_last=drop_last))

    on_workers(program, run)


# -- evaluation --------------------------------------------------------------------------------------------------------


def test_evaluation_uses_the_first_replicas_buffers_and_one_process_agrees() -> None:
    model = Net(drop=0.5)
    program = compile_net(model, "data_parallel", 2)
    batches, held_out = batches_for(program), batch_of(8)

    def run(worker: Worker) -> tuple[float, dict[str, Tensor] | None, Tensor, bool]:
        train(worker, batches)
        before = worker.stage.get_buffer("features.1.running_mean").clone()
        loss = worker.evaluate(*part_of(worker, held_out, (4, 4)))
        assert not loss.requires_grad
        return float(loss), worker.state_dict(), before, worker.stage.training

    (loss, state, mean, training), (other_loss, _, other_mean, _) = on_workers(program, run)
    assert not torch.equal(mean, other_mean)
    assert state is not None
    assert torch.equal(state["features.1.running_mean"], mean)
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        assert loss == other_loss == pytest.approx(float(F.cross_entropy(model(held_out[0]), held_out[1])), rel=1e-5)
    assert training


@pytest.mark.parametrize("number", [9, 21])
def test_the_loss_of_a_whole_dataset_counts_every_example_once(number: int) -> None:
    model, program = plain("layer_separation(n_c=2, n_f=1)")
    images, labels = batch_of(number)

    def run(worker: Worker) -> tuple[float, int]:
        loader = worker.loader(TensorDataset(images, labels), shuffle=False, drop_last=False)
        return float(worker.evaluate(loader)), loader.dropped or 0

    model.eval()
    with torch.no_grad():
        expected = float(F.cross_entropy(model(images), labels))
    for got, dropped in on_workers(program, run):
        assert got == pytest.approx(expected, rel=1e-6)
        assert dropped == 0


class Stream(IterableDataset[Any]):
    """The examples of a dataset, one after another."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[k] for k in range(len(self.dataset)))


# -- loader ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_goes_on_in_the_middle_of_an_epoch_on_other_ranks(tmp_path: Path, stream: bool) -> None:
    _, three = plain()
    _, two = plain("data_parallel")
    examples = TensorDataset(*batch_of(44))
    dataset = Stream(examples) if stream else examples

    def trained(worker: Worker, folder: Path | None) -> tuple[list[float], dict[str, Any]]:
        loader, losses = worker.loader(dataset), []
        if folder is not None:
            worker.resume(folder)
        while loader.epoch < 2:
            for batch in loader:
                losses.append(float(worker.step(*batch)))
                if worker.steps == 7:
                    worker.save(tmp_path)
        return losses, loader.state_dict()

    (whole, position), *_ = on_workers(three, lambda worker: trained(worker, None))
    (rest, end), *_ = on_workers(two, lambda worker: trained(worker, tmp_path))
    assert len(whole) == 10
    assert rest == pytest.approx(whole[7:], rel=1e-5)
    assert position == end


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the checkpoint was made with global batches of")
@along(
    1,
    strategy=["modulo_shard", "data_parallel", "late_multiply", "layer_separation(n_c=3, n_f=1)"],
    stream=[True, False],
)
def test_the_tail_of_an_epoch_is_trained_after_a_change_to_more_readers_than_examples_are_left(
    tmp_path: Path, strategy: str, stream: bool
) -> None:
    model, two = plain("data_parallel")
    four, examples = compile_net(model, strategy, 4), TensorDataset(*batch_of(5))

    def trained(worker: Worker, batch: int, resumes: bool) -> tuple[list[float], dict[str, Tensor] | None]:
        loader = worker.loader(Stream(examples) if stream else examples, batch_size=batch, drop_last=False)
        if resumes:
            worker.resume(tmp_path)
        losses = []
        for each in loader:
            losses.append(float(worker.step(*each)))
            if not resumes:
                worker.save(tmp_path)
                break
        assert (loader.epoch, worker.steps) == ((1, 2) if resumes else (0, 1))
        return losses, worker.state_dict()

    first, *_ = on_workers(two, lambda worker: trained(worker, 2, False))
    then, *_ = on_workers(four, lambda worker: trained(worker, 4, True))
    indices = range(5) if stream else order(5, True, 0, 0).tolist()
    batches = [tuple(tensor[list(part)] for tensor in examples.tensors) for part in (indices[:3], indices[3:])]
    losses, state = one_process(copy.deepcopy(model), batches)
    assert first[0] + then[0] == pytest.approx(losses, rel=1e-5)
    assert_same(then[1], state)


class Gate(nn.Module):
    """What no graph can hold, and of no examples cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 if float(row.detach()[0]) > 0 else row for row in self.layer(x)])


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(8, 12), Gate(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.gate(self.first(x.view(x.size(0), -1))))
        return scores


@pytest.mark.slow
@sampled("strategy", ["late_multiply", "data_parallel", "hybrid_single"], one_in=3)
def test_a_rank_without_examples_runs_views_and_regions(strategy: str) -> None:
    model, target = Gated(), torch.tensor([2])
    program = compiled(model, torch.rand(4, 2, 4), torch.randint(0, 3, (4,)), F.cross_entropy, 3, strategy)
    x = torch.rand(1, 2, 4)

    def run(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        worker._sizes, worker._is_tail = (1, 0, 0), True  # as a loader sets them
        return [float(worker.step(*part_of(worker, (x, target), (1, 0, 0))))], worker.state_dict()

    found = on_workers(program, run)[0]
    losses, state = one_process(copy.deepcopy(model), [(x, target)])
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert_same(found[1], state)


def test_rank_0_says_once_how_many_examples_an_epoch_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    _, program = plain()
    dataset = TensorDataset(*batch_of(21))

    def run(worker: Worker) -> int | None:
        return worker.loader(dataset).dropped

    assert on_workers(program, run) == [5, 5, 5]
    said = (
        "splitc: an epoch leaves out 5 of 21 examples, which fill no global batch of 8; drop_last=False takes them in\n"
    )
    assert capsys.readouterr().err == said


# -- batches by name ---------------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """Its inputs are of one shape: an order taken from elsewhere would go unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(ids * mask), labels.argmax(1))


def test_a_batch_may_be_a_dict_or_arguments_by_name_and_extra_names_are_told() -> None:
    batch = {"labels": torch.rand(4, 3), "mask": torch.rand(4, 4), "ids": torch.rand(4, 4)}
    own = dict(reversed(batch.items()))
    program = compiled(Scores(), own, None, None, 2, "data_parallel")

    def run(worker: Worker) -> list[float]:
        ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            (tuple(own.values()), {}),
            ((batch,), {}),
            ((), batch),
            ((batch["ids"],), {name: batch[name] for name in ("labels", "mask")}),
        ]
        losses = [float(worker.evaluate(*given, **named)) for given, named in ways]
        losses += [float(worker.step(batch)), float(worker.step(**batch))]
        with pytest.raises(
            LaunchError, match="the batch has length; the program's inputs are ids, mask, labels; leave"
        ):
            worker.step({**batch, "length": torch.zeros(4)})
        return losses

    first, second = on_workers(program, run)
    assert first == second
    assert len(set(first[:5])) == 1 > first[5] - first[4]
