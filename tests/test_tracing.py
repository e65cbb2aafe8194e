"""What models the tracer takes, at any batch size, and how it answers those that no graph can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.api import analyse
from splitc.errors import CaptureError
from splitc.fake import shapes_at
from splitc.program import TensorSpec
from tests.compiled import class_batch, compiled


class Linear(nn.Module):
    """A base for models that differ in their forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 10)


class Shapes(Linear):
    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = x.view(b, -1) if c == 3 else x.reshape(b, c * h * w)
        return self.fc(y) * (len(y.shape) - 1)


class InPlace(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x.flatten(1))
        y += 1
        return torch.relu_(y)


class NoGrad(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x.flatten(1))
        with torch.no_grad():
            scale = y.abs().mean(1, keepdim=True)
        return y / (1 + scale)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 12))
        self.keys = nn.Module()  # names that nn.ModuleDict keeps for itself
        self.keys.values = nn.Linear(10, 10)
        self.register_buffer("shift", torch.randn(10), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.keys.values(F.linear(x.flatten(1), self.weight)) + self.shift


class Twice(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.same(self.same(self.fc(x.flatten(1)).relu()).relu())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 8, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x.flatten(2))
        return self.head(out[:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(12, 10)
        self.register_buffer("mask", torch.triu(torch.full((3, 3), float("-inf")), 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.flatten(2)).chunk(3, dim=-1)
        positions = torch.arange(3, device=x.device)
        scores = q @ k.transpose(1, 2) / q.size(-1) ** 0.5 + self.mask[positions]
        return self.head((scores.softmax(-1) @ v).flatten(1))


MODELS = [Shapes, InPlace, NoGrad, Custom, Twice, Recurrent, Attention]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_captured_for_every_batch_size(model: Callable[[], nn.Module]) -> None:
    x, y = class_batch((4, 3, 2, 2))
    program = analyse(model(), (x,), y, F.cross_entropy)  # confirmed against the model: loss and every gradient
    for batch in (1, 3, 7):
        assert shapes_at(program, batch) == []
    for node in program.graph.nodes:
        if node.op == "call_module":
            assert isinstance(node.meta["spec"], TensorSpec | tuple)
            assert node.meta["source"].startswith("test_tracing.py:")


@pytest.mark.parametrize("model", MODELS)
def test_what_was_captured_trains_as_the_model_does_on_ranks(model: Callable[[], nn.Module]) -> None:
    x, y = class_batch((4, 3, 2, 2), dtype=torch.float64)
    result = compiled(model().double(), (x,), y, F.cross_entropy, 3, "data_parallel", global_batch=7).verify()
    assert result.holds, str(result)


class STE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Baked(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.view(4, -1))


class Looped(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.fc(x[i].flatten()) for i in range(x.size(0))])


class Branching(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1) if x.sum() > 0 else -x.flatten(1))


class Item(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1)) * x.max().item()


class StraightThrough(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return STE.apply(self.fc(x.flatten(1)))


class Star(Linear):
    def forward(self, *xs: Tensor) -> Tensor:
        return self.fc(xs[0].flatten(1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Baked, r"test_tracing\.py:\d+.*batch size 4 is baked"),
        (Looped, r"test_tracing\.py:\d+.*(batch size|changes with the batch)"),
        (Branching, r"test_tracing\.py:\d+.*(torch\.where|masks)"),
        (Item, r"test_tracing\.py:\d+.*item"),
        (StraightThrough, r"test_tracing\.py:\d+.*STE.*detach"),
        (Star, r"\*xs"),
    ],
)
def test_what_no_graph_can_hold_is_refused_with_line_and_remedy(model: Callable[[], nn.Module], message: str) -> None:
    x, y = class_batch((4, 3, 2, 2))
    with pytest.raises(CaptureError, match=message):
        analyse(model(), (x,), y, F.cross_entropy)


def masked(out: Tensor, target: Tensor) -> Tensor:
    keep = target != 3
    return (F.cross_entropy(out, target, reduction="none") * keep).sum() / keep.sum().clamp(min=1)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[str]]] = {
    "weighted": (nn.CrossEntropyLoss(torch.linspace(0.5, 2, 10), ignore_index=3, label_smoothing=0.1), ["weighted"]),
    "mean": (lambda o, t: F.mse_loss(o, F.one_hot(t, 10).float()), ["mean"]),
    "sum": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), ["sum"]),
    "two terms": (lambda o, t: F.cross_entropy(o, t) + 0.1 * o.square().sum(), ["weighted", "sum"]),
    "masked": (masked, ["sum", "sum denominator"]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_taken_apart_into_what_adds_up(name: str) -> None:
    loss, kinds = LOSSES[name]
    x, y = class_batch((6, 3, 2, 2))
    assert [term.kind for term in analyse(Shapes(), (x,), y, loss).loss_terms] == kinds


@pytest.mark.parametrize("name", LOSSES)
def test_every_kind_of_loss_trains_alike_on_unequal_ranks(name: str) -> None:
    loss, _ = LOSSES[name]
    loss = loss.double() if isinstance(loss, nn.Module) else loss
    x, y = class_batch((6, 3, 2, 2), dtype=torch.float64)
    result = compiled(Shapes().double(), (x,), y, loss, 3, "data_parallel", global_batch=10).verify()
    assert result.holds, str(result)


@pytest.mark.parametrize(
    "loss", [lambda o, t: F.cross_entropy(o @ o.T, torch.arange(o.shape[0])), lambda o, t: o.std()]
)
def test_a_loss_that_couples_examples_is_refused(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = class_batch((6, 3, 2, 2))
    with pytest.raises(CaptureError, match="couples examples"):
        analyse(Shapes(), (x,), y, loss)


def test_layers_own_parameters_and_what_follows_them() -> None:
    x, y = class_batch((4, 1, 8, 8))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(36, 10))
    program = analyse(model, (x,), y, F.cross_entropy)
    assert [layer.name for layer in program.layers] == ["0", "5"]
    kept = [node.target.__name__ for node in program.graph.nodes if node.op == "call_function"]
    assert kept[-1] == "cross_entropy" and len(program.layer("0").nodes) == 5


def test_tied_and_frozen_parameters_are_known() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.mid = nn.Linear(8, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight
            self.mid.requires_grad_(False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.mid(self.embed(ids)))

    ids = torch.randint(0, 20, (4,))
    program = analyse(Tied(), (ids,), ids, F.cross_entropy)
    assert program.holdings["embed.weight"].names == ("embed.weight", "head.weight")
    assert program.frozen_layers == ("mid",)
    assert program.inputs[0].high == 20
    assert compiled(Tied().double(), (ids,), ids, F.cross_entropy, 2, "data_parallel").verify().holds


def test_a_class_or_a_function_stands_for_the_model_it_gives() -> None:
    import splitc
    from splitc.api import CompiledProgram

    x, y = class_batch((4, 3, 2, 2))
    program = splitc.compile(Shapes, 2, x, y, F.cross_entropy, strategy="data_parallel", cluster="v100-10gbe")
    assert isinstance(program, CompiledProgram) and program.program.name == "Shapes"


def test_verify_says_how_much_of_the_batch_it_took_and_which_groups_it_replayed() -> None:
    class Normed(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(10)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.fc(x.flatten(1)))

    x, y = class_batch((16, 3, 2, 2))
    notes = compiled(Normed(), (x,), y, F.cross_entropy, 2, "data_parallel").verify().notes
    assert "with 16 of the plan's 32 examples a step, in its proportions" in notes
    assert any("groups of 8+8" in note for note in notes)
