"""Lists with an element for each example, whose sizes differ: images of detection with their boxes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.compiled import CompiledProgram
from splitc.errors import CaptureError, LaunchError, PlacementError
from splitc.runtime.worker import Worker
from tests.support.compiled import CLUSTER
from tests.support.ranks import assert_same, on_workers
from tests.support.sampling import sampled

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


class Detector(nn.Module):
    """Images of any sizes, and their boxes with labels -> losses.  whole: means over the boxes of all images."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.conv, self.pool, self.whole = nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(2), whole
        self.box, self.label = nn.Linear(16, 4), nn.Linear(16, 5)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        found = [self.pool(F.relu(self.conv(image[None]))).flatten(1) for image in images]
        boxes, labels = ([each[key] for each in targets] for key in ("boxes", "labels"))
        if self.whole:
            found, boxes, labels = self.joined(found, boxes), [torch.cat(boxes)], [torch.cat(labels)]
        of_boxes = [F.l1_loss(self.box(h).expand_as(box), box) for h, box in zip(found, boxes, strict=True)]
        of_labels = [F.cross_entropy(self.label(h).expand(len(n), 5), n) for h, n in zip(found, labels, strict=True)]
        return {"boxes": torch.stack(of_boxes).mean(), "labels": torch.stack(of_labels).sum()}

    def joined(self, found: list[Tensor], boxes: list[Tensor]) -> list[Tensor]:
        return [torch.cat([h.expand(len(box), -1) for h, box in zip(found, boxes, strict=True)])]


def image(k: int, boxes: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    number = 1 + k % 3 if boxes is None else boxes
    target = {"boxes": torch.rand(number, 4), "labels": torch.randint(0, 5, (number,)), "id": torch.tensor([k])}
    return torch.randn(3, 6 + k % 4, 7 + k % 3), target


IMAGES = [image(k) for k in range(12)]


def collate(some: list[Any]) -> Batch:
    images, targets = zip(*some, strict=True)
    return list(images), list(targets)


def made(model: nn.Module, world: int = 2, example: Any = None, strategy: str = "data_parallel") -> CompiledProgram:
    example = collate(IMAGES[:6]) if example is None else example
    program = splitc.compile(model, world, example, cluster=CLUSTER, strategy=strategy, global_batch=6)
    assert isinstance(program, CompiledProgram)
    return program


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.slow
@sampled("world", [3, 2], one_in=2)
def test_lists_of_images_of_different_sizes_train_as_in_one_process(world: int) -> None:
    model = Detector()
    program = made(copy.deepcopy(model), world)
    assert program.plan.roles == {"all": tuple(range(world))}
    assert program.verify(dtype=torch.float64).holds

    def run(worker: Worker) -> tuple[list[float], Any, float]:
        loader = worker.loader(IMAGES, shuffle=False, collate_fn=collate)
        losses = [float(worker.step(*batch)) for _ in range(2) for batch in loader]
        own, each = worker.data_rank or 0, 6 // world
        for first in (0, 6):
            part = collate(IMAGES[first + own * each : first + (own + 1) * each])
            losses.append(float(worker.step(*part) if first else worker.step(images=part[0], targets=part[1])))
        return losses, worker.state_dict(), float(worker.evaluate(loader))

    losses, state, mean = on_workers(program, run, optimizer=sgd)[0]
    optimizer, expected = sgd(model.parameters()), list[float]()
    for first in (0, 6) * 3:
        optimizer.zero_grad()
        loss = torch.stack([*model(*collate(IMAGES[first : first + 6])).values()]).sum()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_same(state, model.state_dict())
    each = [float(torch.stack([*model(*collate(IMAGES[k : k + 6])).values()]).sum().detach()) for k in (0, 6)]
    assert mean == pytest.approx(sum(each) / 2, rel=1e-5)


class Pictures(nn.Module):
    """Images of any sizes -> a row of scores for each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, images: list[Tensor]) -> Tensor:
        return self.out(torch.stack([F.relu(self.conv(each)).mean((1, 2)) for each in images]))


@pytest.mark.slow
def test_a_list_of_images_may_have_a_target_and_a_loss_apart() -> None:
    images, classes = tuple(collate(IMAGES[:6])[0]), torch.arange(6) % 3
    program = splitc.compile(Pictures(), 2, (images,), classes, F.cross_entropy, cluster=CLUSTER, strategy="auto")
    assert isinstance(program, CompiledProgram)
    assert program.verify(dtype=torch.float64).holds


@pytest.mark.slow
def test_lists_train_by_servers_and_are_refused_where_they_would_be_moved() -> None:
    assert made(Detector(), strategy="parameter_server").verify(dtype=torch.float64).holds
    with pytest.raises(PlacementError, match="a function divides the examples"):
        made(Detector(), strategy="data_parallel(microbatches=2)")


REFUSED: list[tuple[nn.Module, Any, str]] = [
    (Detector(whole=True), collate(IMAGES[:6]), "getitem is .* neither their sum nor their mean"),
    (
        Detector(),
        collate([(each, {**boxes, "id": 5}) for each, boxes in IMAGES[:6]]),
        "elements of targets.id hold int: give tensors",
    ),
    (Detector(), collate(IMAGES[:2]), "2 examples are divided: give an example with 3 or more"),
    (Detector(), (collate(IMAGES[:6])[0], collate(IMAGES[:5])[1]), "disagree about the batch"),
]


@pytest.mark.parametrize(("model", "example", "why"), REFUSED)
def test_lists_that_ranks_cannot_train_on_apart_are_refused_by_name(model: nn.Module, example: Any, why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        made(model, example=example)


@pytest.mark.slow
def test_tensors_of_one_size_in_the_example_have_it_in_training() -> None:
    """So a mean over all boxes is one over images: with other numbers of boxes it is none, and is refused."""
    program = made(Detector(whole=True), example=collate([image(k, boxes=2) for k in range(6)]))

    def run(worker: Worker) -> None:
        own = [0, 1, 2] if worker.data_rank else [3, 4, 5]
        worker.step(*collate([image(k, boxes=2) for k in own]))
        with pytest.raises(LaunchError, match=r"\(2, 4\), .* compile with one in which they differ"):
            worker.step(*collate([image(k) for k in own]))
        with pytest.raises(LaunchError, match=r"targets_list_dicts_boxes_list_rows is \(3, 3, 4\)"):
            worker.step(*collate([image(k, boxes=3) for k in own]))

    on_workers(program, run, optimizer=sgd)
