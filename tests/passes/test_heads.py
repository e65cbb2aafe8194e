"""Heads of many classes that a group divides by classes: margins, labels of several classes, losses of each element."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError
from splitc.ir.graph import info
from splitc.ir.placements import Placement
from splitc.ir.program import TensorSpec
from splitc.ir.transitions import shard, slice_features
from splitc.runtime.collectives.layouts import State
from splitc.runtime.transport.base import Transport
from tests.support.compiled import compiled
from tests.support.ranks import on_ranks, train, worker_of

CLASSES, WIDTH, MARGIN = 13, 6, 0.3
Margin = Callable[[Tensor, Tensor], Tensor]


def cosface(cosine: Tensor, y: Tensor) -> Tensor:
    return cosine - MARGIN * F.one_hot(y, CLASSES)


def cosface_of_zeros(cosine: Tensor, y: Tensor) -> Tensor:
    margins = torch.zeros_like(cosine)
    margins.scatter_(1, y.unsqueeze(1), MARGIN)
    return cosine - margins


def cosface_of_equal_numbers(cosine: Tensor, y: Tensor) -> Tensor:
    return cosine - MARGIN * (y.unsqueeze(1) == torch.arange(CLASSES)).to(cosine.dtype)


def cosface_of_a_mask(cosine: Tensor, y: Tensor) -> Tensor:
    return cosine.masked_fill(F.one_hot(y, CLASSES).bool(), 0.0) + (cosine - MARGIN) * F.one_hot(y, CLASSES)


def arcface_of_roots(cosine: Tensor, y: Tensor) -> Tensor:
    sine = torch.sqrt((1.0 - torch.pow(cosine, 2)).clamp(0, 1))
    phi = cosine * math.cos(MARGIN) - sine * math.sin(MARGIN)
    phi = torch.where(cosine > math.cos(math.pi - MARGIN), phi, cosine - math.sin(math.pi - MARGIN) * MARGIN)
    one_hot = torch.zeros(cosine.size(), device=cosine.device, dtype=cosine.dtype)
    one_hot.scatter_(1, y.view(-1, 1).long(), 1)
    return (one_hot * phi) + ((1.0 - one_hot) * cosine)


def arcface_of_angles(cosine: Tensor, y: Tensor) -> Tensor:
    angles = torch.acos(cosine.clamp(-0.999, 0.999))
    return torch.where(F.one_hot(y, CLASSES).bool(), torch.cos(angles + MARGIN), cosine)


def arcface_by_index(cosine: Tensor, y: Tensor) -> Tensor:
    rows = torch.arange(cosine.size(0), device=cosine.device)
    angle = torch.acos(cosine[rows, y].clamp(-0.999, 0.999))
    cosine = cosine.clone()
    cosine[rows, y] = torch.cos(angle + MARGIN)
    return cosine


def arcface_by_gather(cosine: Tensor, y: Tensor) -> Tensor:
    target = cosine.gather(1, y.view(-1, 1)).clamp(-0.999, 0.999)
    phi = target * math.cos(MARGIN) - torch.sqrt(1 - target * target) * math.sin(MARGIN)
    return cosine.scatter(1, y.view(-1, 1), phi)


MARGINS: tuple[Margin, ...] = (
    cosface,
    cosface_of_zeros,
    cosface_of_equal_numbers,
    cosface_of_a_mask,
    arcface_of_roots,
    arcface_of_angles,
    arcface_by_index,
    arcface_by_gather,
)


class Cosines(nn.Module):
    """Cosines between features and the weights of classes."""

    def __init__(self, classes: int, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.weight = nn.Parameter(torch.randn((WIDTH, classes) if transposed else (classes, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        if self.transposed:
            return F.normalize(x) @ (self.weight / self.weight.norm(dim=0, keepdim=True).clamp(min=1e-9))
        return F.linear(F.normalize(x), F.normalize(self.weight))


class Recogniser(nn.Module):
    """A layer, then scaled cosines with a margin for the class of the target."""

    def __init__(self, margin: Margin, classes: int = CLASSES, transposed: bool = False) -> None:
        super().__init__()
        self.fc, self.head, self.margin = nn.Linear(8, WIDTH), Cosines(classes, transposed), margin

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(30 * self.margin(self.head(self.fc(x)), y), y)


def divided(model: nn.Module, batch: tuple[Any, ...], world: int, layer: str, **options: Any) -> CompiledProgram:
    """A program whose head is divided by columns over all ranks; nothing of all classes is ever whole."""
    torch.manual_seed(0)
    pins = {"*": Placement(group=world), layer: Placement(None, "sharded", group=world, split="columns")}
    program = compiled(model.double(), batch, None, None, world, "mixed", pins=pins, **options)
    graph = program.program.graph
    assert not any(node.target in (shard, slice_features) and len(_shape(node)) > 1 for node in graph.nodes)
    whole = {node.name for node in graph.nodes if _shape(node)[1:] == (CLASSES,) and not _is_part(node)}
    assert whole <= {"y", "sent_y", "y_head"}, f"but the labels that a rank reads, its own examples: {whole}"
    return program


def _shape(node: Any) -> tuple[int, ...]:
    spec = info(node).spec
    return spec.shape if isinstance(spec, TensorSpec) and spec.batch_dim is not None else ()


def _is_part(node: Any) -> bool:
    return info(node).state is State.FEATURES


def holds(program: CompiledProgram, steps: int = 2) -> None:
    result = program.verify(steps=steps)
    assert result.holds, str(result)


def numbers(rows: int = 8, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8, dtype=torch.float64), torch.randint(classes, (rows,))


@pytest.mark.slow
@pytest.mark.parametrize("margin", [cosface, arcface_by_index])
def test_a_margin_head_is_divided_by_classes_and_trains_as_one_process_does(margin: Margin) -> None:
    holds(divided(Recogniser(margin), numbers(), 4, "head"))


@pytest.mark.slow
@pytest.mark.parametrize("margin", MARGINS)
def test_every_way_to_write_a_margin_is_exact(margin: Margin) -> None:
    holds(divided(Recogniser(margin), numbers(), 3, "head"))


@pytest.mark.slow
def test_a_weight_may_have_its_classes_along_its_columns_and_its_own_words_for_norms() -> None:
    program = divided(Recogniser(cosface, transposed=True), numbers(), 3, "head")
    holds(program)
    (stage,) = (stage for stage in program.program.stages if stage.role == "head")
    assert dict(stage.shards) == {"head.weight": 1}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_optimizers_with_state_train_the_parts_as_they_train_the_whole(optimizer: Any) -> None:
    model, batch = Recogniser(arcface_by_gather), numbers()
    program = divided(model, tuple(each[:2] for each in batch), 4, "head")

    def rank(transport: Transport) -> tuple[list[float], dict[str, Tensor] | None]:
        return train(worker_of(program, transport, optimizer), [batch] * 3)

    (losses, state), *_ = on_ranks(4, rank)
    own, expected = optimizer(model.parameters()), []
    for _ in range(3):
        own.zero_grad()
        loss = model(*batch)
        loss.backward()
        own.step()
        expected.append(float(loss.detach()))
    assert state is not None and losses == pytest.approx(expected, rel=1e-8)
    torch.testing.assert_close(state, {**model.state_dict()}, rtol=1e-8, atol=1e-8)


# -- labels of several classes -----------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A linear layer whose labels are numbers for each class."""

    def __init__(self, run: Callable[[Any, Tensor, Tensor], Tensor], classes: int = CLASSES) -> None:
        super().__init__()
        self.fc, self.run = nn.Linear(8, classes), run
        self.register_buffer("rare", torch.rand(classes) + 0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.run(self, self.fc(x), y)


def of_each(**options: Any) -> Callable[[Any, Tensor, Tensor], Tensor]:
    return lambda net, h, y: F.binary_cross_entropy_with_logits(h, y, **options)


def rare(net: Any, h: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(h, y, pos_weight=net.rare, weight=net.rare)


def focal(net: Any, h: Tensor, y: Tensor) -> Tensor:
    each = F.binary_cross_entropy_with_logits(h, y, reduction="none")
    likely = torch.sigmoid(h) * y + (1 - torch.sigmoid(h)) * (1 - y)
    return (each * (1 - likely) ** 2).sum(1).mean()


TAGGERS = {
    "mean": of_each(),
    "sum": of_each(reduction="sum"),
    "weights": rare,
    "focal": focal,
    "rows": lambda net, h, y: ((h - y).sum(1, keepdim=True) * h).square().mean(),
    "centred": lambda net, h, y: (h - h.mean(-1, keepdim=True)).square().mean() + (h * y).sum() / y.sum(),
}


def labels(rows: int = 8, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8, dtype=torch.float64), (torch.rand(rows, classes) < 0.4).double()


def test_labels_of_each_class_go_to_the_rank_that_has_it() -> None:
    holds(divided(Tagger(rare), labels(), 4, "fc"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TAGGERS)
def test_losses_of_each_element_and_sums_of_features_are_exact(name: str) -> None:
    holds(divided(Tagger(TAGGERS[name]), labels(), 3, "fc"))


# -- limits ------------------------------------------------------------------------------------------------------------


def squared(net: Any, h: Tensor, y: Tensor) -> Tensor:
    return h.scatter(1, y.view(-1, 1), h.gather(1, y.view(-1, 1)) - MARGIN).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(("run", "batch"), [(of_each(), labels(8, 3)), (squared, numbers(8, 3))])
def test_a_rank_may_have_no_class(run: Any, batch: tuple[Tensor, ...]) -> None:
    holds(divided(Tagger(run, 3), batch, 4, "fc"))


def test_a_computed_weight_is_not_divided_by_rows() -> None:
    pins = {"*": Placement(group=2), "head": Placement(None, "sharded", group=2, split="rows")}
    with pytest.raises(PlacementError, match=r"multiplies by what is computed of head.weight.*use columns"):
        compiled(Recogniser(cosface).double(), numbers(), None, None, 2, "mixed", pins=pins)


@pytest.mark.slow
def test_what_others_read_of_a_weight_keeps_it_whole() -> None:
    class Regularised(Recogniser):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            weight = F.normalize(self.head.weight)
            return F.cross_entropy(F.linear(F.normalize(self.fc(x)), weight), y) + (weight @ weight.t()).mean()

    pins = {"*": Placement(group=2), "head*": Placement(None, "sharded", group=2, split="columns")}
    with pytest.raises(PlacementError, match="only linear layers"):
        compiled(Regularised(cosface).double(), numbers(), None, None, 2, "mixed", pins=pins)


# -- 50,000 classes ----------------------------------------------------------------------------------------------------

MANY = 50_000


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that an op makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        found = (each for each in tree_leaves(made) if isinstance(each, Tensor))
        self.numbers = max(self.numbers, *(each.untyped_storage().nbytes() // each.itemsize for each in found), 0)
        return made


class Language(nn.Module):
    """A language model of one table and a head of as many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.fc = nn.Embedding(MANY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, MANY, bias=False)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        logits = self.lm_head(torch.tanh(self.fc(self.wte(ids))))
        return F.cross_entropy(logits.view(-1, MANY), y.view(-1))


def many(head: str) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, str]]:
    if head == "language model":
        ids = torch.randint(MANY, (8, 4))
        return Language(), (ids, ids.roll(1, 1)), {"wte": "rows", "lm_head": "columns"}
    if head == "labels":
        return Tagger(rare, MANY), labels(32, MANY), {"fc": "columns"}
    return Recogniser(arcface_by_gather, MANY), numbers(32, MANY), {"head": "columns"}


@pytest.mark.slow
@pytest.mark.parametrize("head", ["margin", "labels", "language model"])
def test_no_rank_makes_a_tensor_of_more_than_its_part_of_50000_classes(head: str) -> None:
    """Each of four ranks has 8 of 32 rows of 50,000 logits in all, or 32 rows of 12,500 of them."""
    model, batch, split = many(head)
    pins = {name: Placement(None, "sharded", group=4, split=how) for name, how in split.items()}
    own = [each[: len(each) // 4] for each in batch]
    program = compiled(model.double(), tuple(own), None, None, 4, "mixed", pins={"*": Placement(group=4), **pins})

    def step(transport: Transport) -> tuple[float, int]:
        worker, size = worker_of(program, transport), len(own[0])
        rows = [each[transport.rank * size : (transport.rank + 1) * size].clone() for each in batch]
        with Largest() as largest:
            loss = worker.step(*rows)
        return float(loss.detach()), largest.numbers

    expected, found = float(model(*batch).detach()), on_ranks(4, step)
    assert [loss for loss, _ in found] == pytest.approx([expected] * 4, rel=1e-9)
    assert max(largest for _, largest in found) <= 32 * MANY // 4, found
