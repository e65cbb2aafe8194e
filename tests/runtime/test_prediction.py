"""What `worker.predict` gives: the model's output in evaluation mode for a reader's examples, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled, with_files
from tests.support.every_strategy import images, planned
from tests.support.models import CLASSES, labels, made, vectors
from tests.support.ranks import on_workers, part_of
from tests.support.sampling import along, sampled
from tests.support.subnet_networks import INPUTS, normed


def predicted(
    program: CompiledProgram, batch: Sequence[Tensor], sizes: Sequence[int], steps: int = 0
) -> tuple[list[Any], dict[str, Tensor]]:
    """What each reader predicts of a batch after some steps, and the state that it was predicted with."""

    def run(worker: Worker) -> tuple[Any, dict[str, Tensor] | None]:
        worker.use_sizes(sizes)
        own = part_of(worker, batch, sizes)
        for _ in range(steps):
            worker.step(*own)
        return worker.predict(*own), worker.state_dict()

    found = on_workers(program, run)
    state = found[0][1]
    assert state is not None
    outputs = [output for output, _ in found]
    assert [k for k, output in enumerate(outputs) if output is None] == [
        k for k in range(program.plan.world) if k not in program.plan.roles[program.plan.reader]
    ]
    return [output for output in outputs if output is not None], state


def smaller(program: CompiledProgram) -> list[int]:
    """Sizes of a last batch: a reader has one example less than compiled, where it has several."""
    first, *rest = program.plan.local_batches
    return [first - (first > 2), *rest]


@dataclass
class Returned:
    """Like an output of transformers."""

    loss: Tensor
    logits: Tensor
    hidden: tuple[Any, ...]
    layers: int = 3


class ReturnsItsLoss(nn.Module):
    """Dropout and BatchNorm, nested outputs, and one of a layer on which the loss does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()
        self.b, self.c, self.apart = nn.Linear(8, 6), nn.Linear(6, CLASSES), nn.Linear(6, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Returned:
        first = self.drop(self.norm(self.a(x)))
        second = torch.relu(self.b(first))
        scores = self.c(second)
        loss = F.cross_entropy(scores, labels)
        return Returned(loss, scores, (first, {"second": second, "apart": self.apart(second)}, scores.mean()))


NESTED = {
    "data_parallel": 2,
    "layer_separation(ranks=1+1+1)": 3,
    "layer_separation(microbatches=2)": 3,
    "modulo_shard(scheme=B/K)": 4,
    "modulo_shard(microbatches=2)": 4,
    "parameter_server": 3,
    "single_device": 2,
    "local_sgd": 2,
}


@pytest.mark.slow
@sampled("strategy", NESTED, one_in=7)
def test_nested_outputs_come_back_as_the_model_gives_them(strategy: str) -> None:
    torch.manual_seed(0)
    model = ReturnsItsLoss()
    x, y = torch.randn(6, 8), torch.randint(CLASSES, (6,))
    program = compiled(model, {"x": x, "labels": y}, None, None, NESTED[strategy], strategy)
    sizes = program.plan.local_batches
    batch = torch.randn(sum(sizes), 8), torch.randint(CLASSES, (sum(sizes),))
    outputs, state = predicted(program, batch, sizes, steps=1)
    model.load_state_dict(state)
    expected = model.eval()(*batch)
    for got, wanted in (
        ([each.logits for each in outputs], expected.logits),
        ([each["hidden"][0] for each in outputs], expected.hidden[0]),
        ([each.hidden[1].second for each in outputs], expected.hidden[1]["second"]),
    ):
        torch.testing.assert_close(torch.cat(got), wanted, rtol=1e-6, atol=1e-6)
    first = outputs[0]
    assert first.loss is None and first.hidden[2] is None  # no batch dimension
    assert first.hidden[1].apart is None  # no rank has its parameters
    assert first.layers == 3
    with pytest.raises(AttributeError, match="the model returned loss, logits, hidden, layers, no scores"):
        _ = first.scores


class Apart(nn.Module):
    """Returns values that the loss does not read, of which an example has rows that lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.b(torch.relu(self.a(x)))
        if self.training:
            return {"scores": scores}
        best = scores.transpose(0, 1).argmax(-1).flatten()  # time first
        return {"scores": scores, "best": best, "views": torch.cat([scores, 2 * scores])}


class ApartInTraining(Apart):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {**super().forward(x), "twice": torch.cat([x, 2 * x]).softmax(-1), "none": x.new_zeros(len(x), 2)}


def first_scores(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["scores"][:, 0], target)


@pytest.mark.slow
@along(
    2,
    strategy=["modulo_shard", "hybrid_single", "data_parallel", "layer_separation(n_c=2, n_f=1)"],
    kind=[Apart, ApartInTraining],
)
def test_outputs_whose_rows_lie_apart_come_back_in_the_order_of_one_process(kind: type[Apart], strategy: str) -> None:
    torch.manual_seed(0)
    model, x, y = kind(), torch.randn(4, 3, 8), torch.randint(CLASSES, (4,))
    program = compiled(model, x, y, first_scores, 3, strategy)
    sizes = smaller(program)
    batch = torch.randn(sum(sizes), 3, 8), torch.randint(CLASSES, (sum(sizes),))
    outputs, _ = predicted(program, batch, sizes)
    for got, own in zip(outputs, batch[0].split(sizes), strict=True):
        for name, wanted in model.eval()(own).items():
            torch.testing.assert_close(got[name], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (lambda h: h - h.mean(0), "the model's output couples examples: sub is no linear function of mean"),
        (lambda h: torch.arange(len(h)), "which rows of arange an example has is not known"),
    ],
)
def test_outputs_of_which_no_rank_has_its_part_are_refused_where_the_batch_is_divided(returned: Any, why: str) -> None:
    class Model(Apart):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.b(self.a(x))
            return {"scores": h, "other": returned(h)}

    model, x, y = Model(), torch.randn(4, 3, 8), torch.randint(CLASSES, (4,))
    with pytest.raises(LaunchError, match=f"cannot be predicted: test_prediction.py:.*{why}"):
        predicted(compiled(model, x, y, first_scores, 2, "hybrid_single"), (torch.randn(8, 3, 8), y), [4, 4])
    outputs, _ = predicted(compiled(model, x, y, first_scores, 2, "layer_separation"), (x, y), [4])
    torch.testing.assert_close(outputs[0]["other"], model(x)["other"], rtol=1e-5, atol=1e-5)


def scores_in_evaluation(m: Any, x: Tensor) -> Any:
    h = m.fc(m.b(m.a(x)))
    return h if m.training else h.softmax(1)


def another_layer(m: Any, x: Tensor) -> Any:
    h = m.b(m.a(x))
    return m.fc(h) if m.training else m.own(m.fc(2 * h))


@pytest.mark.slow
@along(1, strategy=["layer_separation", "modulo_shard"], run=[another_layer, scores_in_evaluation])
def test_a_model_that_is_another_one_in_evaluation_predicts_as_that(run: Any, strategy: str) -> None:
    torch.manual_seed(0)
    children = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "fc": nn.Linear(8, CLASSES)}
    model = made(run, **children, own=nn.Linear(CLASSES, CLASSES))
    program = compiled(model, vectors()(), labels()(), F.cross_entropy, 4, strategy)
    sizes = smaller(program)
    batch = torch.randn(sum(sizes), 8), torch.randint(CLASSES, (sum(sizes),))
    outputs, _ = predicted(program, batch, sizes)
    torch.testing.assert_close(torch.cat(outputs), copy.deepcopy(model).eval()(batch[0]), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_subnets_predict_as_the_whole_model_with_its_recomputed_statistics() -> None:
    torch.manual_seed(0)
    model = normed(7).model
    x, y = torch.randn(4, INPUTS), torch.randint(0, 3, (4,))
    program = compiled(model, (x,), y, F.cross_entropy, 2, "independent_subnets(local_steps=2)")
    batch = torch.randn(8, INPUTS), torch.randint(0, 3, (8,))
    outputs, state = predicted(program, batch, [4, 4], steps=2)
    model.load_state_dict(state)
    torch.testing.assert_close(torch.cat(outputs), model.eval()(batch[0]), rtol=1e-5, atol=1e-5)


def test_the_targets_may_be_left_out_and_other_tensors_are_refused_before_anything_travels() -> None:
    program = planned(3, "layer_separation(n_c=2, n_f=1)")
    sizes = program.plan.local_batches
    batch = images(sum(sizes))

    def run(worker: Worker) -> tuple[Any, Any]:
        own = part_of(worker, batch, sizes)
        if own:
            with pytest.raises(LaunchError, match=r"images is \(1, 1, 8, 8\) torch.float32, this step needs \(4, 1"):
                worker.predict(own[0][:1])
            with pytest.raises(LaunchError, match=r"takes 1 tensors \(images\), got 0"):
                worker.predict()
        return worker.predict(*own), worker.predict(*own[:1])

    for both, alone in on_workers(program, run):
        assert (both is None and alone is None) or torch.equal(both, alone)


NESTED_INPUTS: dict[str, Any] = {"image": torch.randn(4, 8), "extra": [torch.randn(4, 8)]}


class TakesNested(nn.Module):
    """Takes a dict with a list."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        scores: Tensor = self.fc(batch["image"] + batch["extra"][0])
        return scores


def test_nested_inputs_are_given_as_the_model_takes_them() -> None:
    model, y = TakesNested(), torch.randint(CLASSES, (4,))
    program = compiled(model, (NESTED_INPUTS,), y, F.cross_entropy, 2, "data_parallel")

    def run(worker: Worker) -> Tensor:
        given = [worker.predict(NESTED_INPUTS), worker.predict(NESTED_INPUTS, y)]
        given.append(worker.predict(NESTED_INPUTS["image"], *NESTED_INPUTS["extra"], y))
        assert all(torch.equal(each, given[0]) for each in given)
        return given[0]

    for scores in on_workers(program, run):
        torch.testing.assert_close(scores, model(NESTED_INPUTS))


class OnlyLoss(nn.Module):
    """Returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.b(torch.relu(self.a(x))), labels)


def test_where_the_model_returns_its_loss_alone_predict_says_so_and_training_goes_on() -> None:
    x, y = torch.randn(4, 8), torch.randint(CLASSES, (4,))
    program = compiled(OnlyLoss(), {"x": x, "labels": y}, None, None, 2, "data_parallel")

    def run(worker: Worker) -> float:
        with pytest.raises(LaunchError, match="output cannot be predicted: the model returns nothing but its loss"):
            worker.predict(x)
        return float(worker.step(x, y))

    assert min(on_workers(program, run)) > 0


def test_a_build_from_before_predict_trains_and_refuses_to_predict() -> None:
    program = with_files(planned(2, "data_parallel"), all=("def predict(", "def _predict("))
    for rank in range(2):
        name = f"rank{rank}.py"
        program.files[name] = program.files[name].replace("predict, ", "").replace('"predict", ', "")
    assert not hasattr(load_rank(program.files, 0), "predict")
    batch = images(4)

    def run(worker: Worker) -> float:
        with pytest.raises(LaunchError, match=r"written before there was worker.predict; compile the model again"):
            worker.predict(*batch)
        return float(worker.step(*batch))

    assert min(on_workers(program, run)) > 0
