"""Modules that cannot be traced become regions: the smallest ones, with what they return, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.example.example import Example, Loss
from splitc.capture.regions.regions import importable
from splitc.capture.validate.validate import validate_capture
from splitc.errors import CaptureError
from splitc.ir.graph import info, region_of
from splitc.ir.program import Program, TensorSpec
from splitc.ir.regions import OwnCode, Unread, regions
from tests.support import untraceable
from tests.support.capturing import capture, validated
from tests.support.sampling import in_tiers
from tests.support.untraceable import CLASSES, FEATURES, Perceptron

X, Y = torch.randn(4, FEATURES), torch.randint(0, CLASSES, (4,))


def traced(model: nn.Module, loss: Loss = F.cross_entropy, **options: Any) -> Program:
    return capture(model, X, Y, loss, **options)


def found(program: Program) -> dict[str, OwnCode]:
    return {own.path: own for _, own in regions(program)}


def test_the_smallest_module_around_a_line_is_a_region_and_the_rest_is_traced() -> None:
    program = traced(Perceptron(untraceable.Gated()))
    assert [node.name for node in program.graph.nodes][2:6] == ["first", "relu", "middle_0", "last"]
    own = found(program)["middle.0"]
    assert own.why.startswith("untraceable.py:") and "item()" in own.why
    assert own.output == TensorSpec((1, FEATURES), torch.float32, 0, True)
    assert program.layer("middle.0").tensors == (
        "middle.0.gate",
        "middle.0.fc.weight",
        "middle.0.fc.bias",
        "middle.0.scale",
    )
    assert not program.tensors["middle.0.scale"].persistent


@pytest.mark.slow
def test_data_in_python_scripts_transforms_and_functions_are_regions() -> None:
    for kind in [
        untraceable.Rows,
        untraceable.Scripted,
        untraceable.Vectorised,
        untraceable.Normed,
        untraceable.KeptSign,
    ]:
        assert found(traced(Perceptron(kind()))).keys() == {"middle.0"}, kind


def test_modules_of_a_class_that_fail_at_one_line_are_regions_together() -> None:
    program = traced(Perceptron(*(untraceable.Gated() for _ in range(4))))
    assert list(found(program)) == [f"middle.{k}" for k in range(4)]


def test_a_region_that_is_called_with_several_shapes_returns_those_of_each() -> None:
    program = traced(untraceable.Shared())
    nodes = [node for node, own in regions(program) if own.path == "sign"]
    outputs = [own.output for node in nodes if (own := region_of(program, node))]
    assert [output.template() for output in outputs] == [(-1, FEATURES), (-1, 4 * FEATURES), (-1, 2, 2 * FEATURES)]
    assert [info(node).spec for node in nodes] == outputs


def test_calls_whose_shapes_cannot_be_told_apart_are_part_of_the_module_around() -> None:
    class Folding(untraceable.Shared):
        def forward(self, x: Tensor) -> Tensor:
            x = self.wide(self.sign(self.first(x))).unflatten(1, (4, FEATURES)).flatten(0, 1)
            return self.last(self.sign(x).unflatten(0, (-1, 4)).flatten(1)[:, : 2 * FEATURES])

    assert found(traced(Folding())).keys() == {""}


def test_a_region_may_return_containers() -> None:
    program = traced(Perceptron(untraceable.Outputs()))
    pair = found(program)["middle.0"].output["pair"]
    assert pair.sums == (TensorSpec((1,), torch.float32, 0, True), None)
    assert pair.left == TensorSpec((1, FEATURES), torch.float32, 0, True)


def test_a_region_may_read_expanded_tensors_of_which_several_numbers_are_one_in_memory() -> None:
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, FEATURES))
            self.own, self.last = untraceable.Gated(), nn.Linear(FEATURES, CLASSES)
            self.own.register_buffer("unit", torch.ones(1).expand(FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.own(self.token.expand(len(x), FEATURES)) + x)

    assert found(validated(Token(), X, Y, F.cross_entropy)).keys() == {"own"}


def test_the_module_around_is_the_region_where_a_call_cannot_be_a_node() -> None:
    class Number(nn.Module):
        def forward(self, x: Tensor) -> float:
            return x.sum().item()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number = Number()

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if self.number(x) < 1e9 else x

    assert found(traced(Perceptron(Around()))).keys() == {"middle.0"}


@pytest.mark.slow
def test_the_whole_model_may_be_a_region() -> None:
    program = traced(untraceable.Whole())
    assert found(program).keys() == {""}
    assert [layer.name for layer in program.layers] == ["model"]


def test_a_loss_may_be_a_region() -> None:
    losses: list[Any] = [untraceable.finite_loss, untraceable.FiniteLoss()]
    for loss in losses:
        own = found(traced(Perceptron(), loss))["loss"]
        assert own.is_function is not isinstance(loss, nn.Module), loss
        assert own.code == (None if isinstance(loss, nn.Module) else "tests.support.untraceable:finite_loss"), loss


def test_a_loss_that_cannot_be_traced_beside_an_attribute_of_its_name_is_refused_by_that_name() -> None:
    model = Perceptron()
    model.__dict__["loss"] = None
    with pytest.raises(CaptureError, match=r"no attribute 'loss'; rename that"):
        traced(model, untraceable.finite_loss)


def test_a_region_that_keeps_values_of_the_batch_runs_where_all_of_it_is() -> None:
    class Centre(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            y = untraceable.sign(x)
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return y - self.mean

    with pytest.raises(CaptureError, match=r"middle.0.mean keeps values of the batch"):
        validated(Perceptron(Centre()), X, Y, F.cross_entropy)


def test_a_region_that_writes_into_a_parameter_is_refused() -> None:
    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            return untraceable.sign(x) + F.embedding(x.abs().long().clamp(max=4)[:, 0], self.table.weight, max_norm=0.1)

    with pytest.raises(CaptureError, match=r"writes into middle.0.table.weight while the model runs"):
        traced(Perceptron(Bounded()))


def test_a_region_that_reads_parameters_of_other_modules_takes_these_in() -> None:
    class Reader(nn.Module):
        def __init__(self, others: list[Any]) -> None:
            super().__init__()
            self.others = others

        def forward(self, x: Tensor) -> Tensor:
            return untraceable.sign(x) * self.others[0].weight.sum()

    class Reading(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.middle.append(Reader([self.first]))

    assert found(traced(Reading())).keys() == {""}


def test_random_functions_that_cannot_be_seeded_are_named() -> None:
    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, torch.randperm(FEATURES)] if x.sum().item() < 1e9 else x

    assert found(traced(Perceptron(Shuffled())))["middle.0"].random == ("randperm",)


def test_code_that_can_be_imported_has_a_name() -> None:
    assert importable(untraceable.gated) == "tests.support.untraceable:gated"
    assert importable(nn.Linear) == "torch.nn.modules.linear:Linear"
    assert importable(lambda: None) is None


class Memory:
    """An object that a model returns for itself."""

    def __init__(self, kept: object) -> None:
        self.kept = kept


class Remembering(nn.Module):
    """A model that reads a number and returns an object, besides its result."""

    def __init__(self, keeps_tensor: bool) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.keeps_tensor = keeps_tensor

    def forward(self, x: Tensor) -> dict[str, Any]:
        noise = float(self.fc.weight.sum() > 1e9)
        return {"logits": self.out(self.fc(x).relu() + noise), "memory": Memory(x if self.keeps_tensor else [])}


@pytest.mark.parametrize("keeps_tensor", [False, True])
def test_an_object_that_a_region_returns_may_be_passed_on_but_not_used(keeps_tensor: bool) -> None:
    model = Remembering(keeps_tensor)
    program = validated(model, X, Y, lambda out, y: F.cross_entropy(out["logits"], y))
    assert found(program)[""].output["memory"] is Unread
    with pytest.raises(CaptureError, match="which a graph cannot hold"):
        traced(model, lambda out, y: F.cross_entropy(out["logits"], y) + len(out["memory"].kept))


class Mapped(nn.Module):
    """Applies a function that reads data."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def coupling(function: Callable[[Tensor], Tensor]) -> str:
    """Why a region in the middle of a model couples its examples; "" where it does not."""
    model = Perceptron(Mapped(function))
    program = capture(model, X, Y, F.cross_entropy)
    program = validate_capture(program, model, Example.bind(model, X, Y, F.cross_entropy))
    assert found(program).keys() == {"middle.0"}
    return program.coupled[0].why if program.coupled else ""


def _ids(x: Tensor) -> Tensor:
    return (x[:, 0].abs() * 40).long().clamp(max=98)


def _counted(x: Tensor) -> Tensor:
    return x * 3 if sum(row.mean().item() > 0 for row in x) > 2 else x


def _averaged(x: Tensor) -> Tensor:
    scores = [float(row.mean()) for row in x]
    return x * 3 if sum(scores) / len(scores) > 1e2 else x


def _listed(x: Tensor) -> Tensor:
    return x * 3 if torch.tensor([row[0].tolist() for row in x]).mean() > 1e2 else x


class Clipped(torch.autograd.Function):
    """A backward that few batches fall on both sides of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branches: bool) -> Tensor:
        ctx.branches = branches
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        large = gradient.norm() > 1e9
        if ctx.branches:
            return (gradient / gradient.norm() if large else gradient), None
        return torch.where(large, gradient / gradient.norm(), gradient), None


MIXED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "float": ("a number", lambda x: x * 3 if float(x.mean()) > 1e9 else x),
    "bool": ("a number", lambda x: x * 3 if (x > 1e9).any() else x),
    "index": ("a number", lambda x: x + 0 * x[int(x[:, 0].argmax())]),
    "equal": ("a number", lambda x: x * 3 if torch.equal(x, x + 1) else x),
    "allclose": ("a number", lambda x: x * 3 if torch.allclose(x, x + 1) else x),
    "tensors in a list": ("a number", lambda x: x * 3 if torch.tensor([r.mean() for r in x]).mean() > 1e9 else x),
    "numpy": ("numpy()", lambda x: x * 3 if x.detach().numpy().mean() > 1e9 else x),
    "tolist": ("tolist()", lambda x: x * 3 if max(x[:, 0].tolist()) > 1e9 else x),
    "a length": ("a size", lambda x: x * 3 if len(x[x.mean(1) > 1e9]) > 3 else x),
    "a shape": ("a size", lambda x: x * 3 if torch.nonzero(x > 1e9).shape[0] else x),
    "a view of it": ("a number", lambda x: x * 3 if float(x.flatten().sum(0, keepdim=True)[0]) > 1e9 else x),
    "a branch of a backward": ("a number", lambda x: Clipped.apply(x, True)),  # type: ignore[no-untyped-call]
    "a backward": ("what middle_0 makes", lambda x: Clipped.apply(x, False)),  # type: ignore[no-untyped-call]
    "a script": ("", lambda x: untraceable.scripted_by_sum(x)),
    "no branch": ("", lambda x: torch.where(x.mean() > 1e9, x * 3, x) + 0 * float(x[0, 0] > 1e9)),
    "sorted": ("", lambda x: x + 0 * x[x[:, 0].argsort()] + 0 * float(x[0, 0] > 1e9)),
    "counts of what it holds": (
        "",
        lambda x: untraceable.sign(x) * torch.bincount(_ids(x), minlength=99)[_ids(x)][:, None],
    ),
    "a histogram": ("", lambda x: untraceable.sign(x) * torch.histc(x[:, 0], 99, -5, 5)[_ids(x)][:, None]),
    "added by index": (
        "",
        lambda x: untraceable.sign(x) * torch.zeros(99).index_add(0, _ids(x), x[:, 1])[_ids(x)][:, None],
    ),
    "counted in Python": ("", _counted),
    "averaged in Python": ("", _averaged),
    "averaged again in a tensor": ("", _listed),
}


@pytest.mark.slow
@in_tiers("cases", MIXED, one_in=3)
def test_a_number_of_several_examples_that_leaves_tensors_couples_them_whatever_it_is_here(cases: list[Any]) -> None:
    for how in cases:
        what, function = MIXED[how]
        assert f"the loss couples examples: {what}" in coupling(function), how


def _dropped_by_route(x: Tensor) -> Tensor:
    out, expert = torch.zeros_like(x), (x[:, 0] > 0).long()
    for k in range(2):
        out[expert == k] = F.dropout(x[expert == k], 0.3)
    return out


DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "for one row at a time": lambda x: torch.stack([F.dropout(row, 0.3) if row.sum() > 0 else row for row in x]),
    "for some rows": lambda x: torch.stack([row + torch.rand(6) if row.sum() > 0 else row for row in x]),
    "for parts of two": lambda x: torch.cat([r + torch.rand(1, 6) + 0 * float(r[0, 0]) for r in x.split(2)]),
    "for the rows of a mask": _dropped_by_route,
    "in another order": lambda x: F.dropout(untraceable.sign(x).flip(0), 0.3).flip(0),
}


@pytest.mark.slow
def test_random_numbers_that_are_not_drawn_for_the_examples_in_order_couple_them() -> None:
    for how in DRAWN:
        assert "random numbers" in coupling(DRAWN[how]), how


class Teacher(nn.Module):
    """A moving average that begins as a copy of what it follows, moved in code that reads data."""

    def __init__(self, moved: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.fc, self.moved = nn.Linear(6, 6), moved
        self.slow = nn.Parameter(self.fc.weight.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.moved(self.slow, self.fc.weight)
        return self.fc(x) * (1 + 0 * float(x[0, 0])) + F.linear(x, self.slow)


MOVED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "lerp": lambda slow, fast: slow.lerp_(fast, 0.1),
    "copied": lambda slow, fast: slow.copy_(0.9 * slow + 0.1 * fast),
    "its data": lambda slow, fast: slow.data.mul_(0.9).add_(fast.data, alpha=0.1),
}


@pytest.mark.slow
def test_an_average_that_begins_as_a_copy_is_kept_for_the_next_batch() -> None:
    for how in MOVED:
        own = found(traced(Perceptron(Teacher(MOVED[how]))))["middle.0"]
        assert own.keeps == {"middle.0.slow"} and own.keeps_rows, how


def _written(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for k in range(x.shape[0]):
        out[k] = x[k] * 2 if x[k].sum() > 0 else x[k]
    return out


def _routed(x: Tensor) -> Tensor:
    out, expert = torch.zeros_like(x), (x[:, 0] > 0).long()
    for k in range(2):
        out[expert == k] = x[expert == k] * (k + 1)
    return out


APART: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: torch.stack([row * 3 if max(row.tolist()) > 0.5 else row for row in x]),
    "rows of a linear layer": lambda x: torch.stack(
        [row * 3 if float(row.mean()) > 0.2 else row for row in F.linear(x, torch.linspace(-1, 1, 36).view(6, 6))]
    ),
    "rows in place": _written,
    "dropout of the whole": lambda x: torch.stack([r if float(r.sum()) > 0 else r * 2 for r in F.dropout(x, 0.3)]),
    "dropout of channels": lambda x: F.dropout(untraceable.sign(x).view(-1, 2, 3).transpose(0, 1), 0.3)[0].repeat(1, 2),
    "routing by masks": _routed,
    "layers": lambda x: F.layer_norm(
        F.conv1d(untraceable.sign(x)[:, None], torch.ones(1, 1, 3), padding=1)[:, 0], (6,)
    ),
    "within an example": lambda x: untraceable.sign(x).sort(1)[0].gather(1, x.argsort(1)) * F.one_hot(x.argmax(1), 6),
    "complex numbers": lambda x: torch.fft.fft(untraceable.sign(x) * x).abs(),
    "attention": lambda x: (untraceable.sign(x)[:, :, None] @ x[:, None]).softmax(-1).sum(1),
}


@pytest.mark.slow
@in_tiers("cases", APART, one_in=3)
def test_numbers_of_single_examples_leave_tensors_freely(cases: list[Any]) -> None:
    for how in cases:
        assert coupling(APART[how]) == "", how


def test_a_forward_that_takes_gradients_is_known_however_it_takes_them() -> None:
    class Backward(untraceable.Force):
        def forward(self, x: Tensor) -> Tensor:
            at = x.detach().requires_grad_()
            torch.autograd.backward(self.fc(at).tanh().sum(), inputs=[at])
            return self.fc(x) + torch.zeros_like(x) if at.grad is None else self.fc(x) + at.grad

    for middle in (Backward(), untraceable.Gated()):
        (own,) = found(traced(Perceptron(middle))).values()
        assert own.differentiates == isinstance(middle, Backward)


TABLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda ids, table: F.embedding(ids, table, scale_grad_by_freq=True).mean(1),
    "embedding_bag": lambda ids, table: F.embedding_bag(ids, table, scale_grad_by_freq=True),
    "torch.embedding": lambda ids, table: torch.embedding(table, ids, -1, True).mean(1),
    "in a region": lambda ids, table: untraceable.sign(table[0]) + torch.embedding(table, ids, -1, True).mean(1),
    "sparse": lambda ids, table: untraceable.sign(table[0]) + F.embedding(ids, table, sparse=True).mean(1),
    "gather": lambda ids, table: torch.gather(table, 0, ids[:, :1].expand(-1, FEATURES), sparse_grad=True),
}


@pytest.mark.parametrize("how", TABLES)
def test_what_counts_indices_is_refused_by_name_however_seldom_they_meet(how: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = nn.Parameter(torch.randn(2000, FEATURES)), nn.Linear(FEATURES, CLASSES)

        def forward(self, ids: Tensor) -> Tensor:
            return self.fc(TABLES[how](ids, self.table))

    with pytest.raises(
        CaptureError, match=r"^test_regions.py:\d+: \w+ has (scale_grad_by_freq|sparse gradients).*leave"
    ):
        validated(Model(), torch.randint(0, 2000, (4, 3)), Y, F.cross_entropy)
