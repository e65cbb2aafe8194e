"""The loss is linear in what is summed over examples, or it is refused: by structure, not by what data show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.capturing import captured, refusal, validated
from tests.support.models import CLASSES, made
from tests.support.sampling import in_tiers

CE = F.cross_entropy
Loss = Callable[..., Tensor]


def mse(o: Tensor, y: Tensor) -> Tensor:
    return (o - y).pow(2).mean()


def each(o: Tensor, y: Tensor) -> Tensor:
    return (o - y).pow(2).mean(1)


def macro(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    classes = F.one_hot(y.argmax(1), CLASSES).float()
    return (classes.T @ each(o, y) / classes.sum(0).clamp(min=1)).mean()


def same_class_pairs(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    label = y.argmax(1)
    return ((label[:, None] == label[None]) * torch.cdist(o, o)).mean()


def balance(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    gates = o.softmax(-1)
    return mse(o, y) + (F.one_hot(gates.argmax(-1), CLASSES).float().mean(0) * gates.mean(0)).sum()


COUPLED: dict[str, Loss] = {
    "clamp": lambda o, y, m: mse(o, y).clamp(max=1.2),
    "far_clamp": lambda o, y, m: mse(o, y).clamp(max=1e6),
    "flooding": lambda o, y, m: (mse(o, y) - 0.9).abs() + 0.9,
    "relu": lambda o, y, m: F.relu(mse(o, y) - 1),
    "relu_of_more": lambda o, y, m: F.relu(mse(o, y) + 1),
    "leaky_relu": lambda o, y, m: F.leaky_relu(mse(o, y)),
    "maximum": lambda o, y, m: torch.maximum(mse(o, y), torch.zeros(())),
    "where": lambda o, y, m: torch.where(mse(o, y) > 0, mse(o, y), 2 * mse(o, y)),
    "nan_to_num": lambda o, y, m: mse(o, y).nan_to_num(),
    "abs": lambda o, y, m: mse(o, y).abs(),
    "addcdiv": lambda o, y, m: torch.addcdiv(torch.zeros(()), (each(o, y) * m).sum(), m.sum()),
    "normalize": lambda o, y, m: (each(o, y) * F.normalize(m, p=1, dim=0)).sum(),
    "nanmean": lambda o, y, m: each(o, y).nanmean(),
    "product": lambda o, y, m: mse(o, y) * o.abs().sum(),
    "square": lambda o, y, m: mse(o, y) * mse(o, y),
    "macro": macro,
    "pairs": same_class_pairs,
    "balance": balance,
    "log_of_exp": lambda o, y, m: mse(o, y).exp().log(),
    "vector_relu": lambda o, y, m: F.relu((o - y).pow(2).mean(0)).sum(),
    "smooth_l1_of_mean": lambda o, y, m: F.smooth_l1_loss((o - y).mean(0), torch.zeros(CLASSES)),
    "matrix_norm": lambda o, y, m: torch.linalg.norm(o - y),
    "median": lambda o, y, m: each(o, y).median(),
    "own_weights": lambda o, y, m: (each(o, y) * each(o, y).softmax(0)).sum(),
    "rounded": lambda o, y, m: torch.div(mse(o, y), 1e-9, rounding_mode="floor") * mse(o, y),
    "power": lambda o, y, m: mse(o, y) ** 1.0,
    "lerp": lambda o, y, m: torch.lerp(mse(o, y), mse(o, y).detach(), 0.5),
    "hypot": lambda o, y, m: torch.hypot(mse(o, y), torch.zeros(())),
    "logsumexp": lambda o, y, m: each(o, y).logsumexp(0),
    "deviation": lambda o, y, m: mse(o, y) + o.var(0).mean(),
    "correlation": lambda o, y, m: 1 - F.cosine_similarity(o.flatten(), y.flatten(), dim=0),
    "sum_without_size": lambda o, y, m: mse(o, y) + each(o, y).sum() / o.size(0) ** 2,
    "denominator_of_model": lambda o, y, m: each(o, y).sum() / o.abs().sum(),
    "denominator_that_is_a_term": lambda o, y, m: (each(o, y) * m).sum() / (n := m.sum()) + n,
    "gradient_penalty_free_ratio": lambda o, y, m: (each(o, y) * m).sum() / (m / m.sum()).pow(2).sum(),
}


@pytest.mark.slow
@in_tiers("cases", COUPLED, one_in=3)
def test_a_loss_that_is_not_linear_over_examples_is_refused_on_a_constant_example(cases: list[Any]) -> None:
    for name in cases:
        said = refusal(
            nn.Linear(6, CLASSES), torch.zeros(8, 6), (torch.zeros(8, CLASSES), torch.ones(8)), COUPLED[name]
        )
        assert "couples examples" in said, name


QUOTIENTS: dict[str, Loss] = {
    "divided": lambda o, y, m: (each(o, y) * m).sum() / m.sum(),
    "divide": lambda o, y, m: torch.divide((each(o, y) * m).sum(), m.sum()),
    "true_divide": lambda o, y, m: torch.true_divide((each(o, y) * m).sum(), m.sum()),
    "method": lambda o, y, m: (each(o, y) * m).sum().div(m.sum()),
    "reciprocal": lambda o, y, m: (each(o, y) * m).sum() * m.sum().reciprocal(),
    "power": lambda o, y, m: (each(o, y) * m).sum() * m.sum() ** -1,
    "pow": lambda o, y, m: m.sum().pow(-1) * (each(o, y) * m).sum(),
    "one_over": lambda o, y, m: (each(o, y) * m).sum() * (1 / m.sum()),
    "clamped": lambda o, y, m: (each(o, y) * m).sum() / m.sum().clamp(min=1e-3),
    "weights_of_each": lambda o, y, m: (each(o, y) * (m / m.sum())).sum(),
    "root": lambda o, y, m: (each(o, y) * m).sum() / m.sum().sqrt(),
    "columns": lambda o, y, m: (((o - y).pow(2) * m[:, None]).sum(0) / m.sum()).mean(),
    "detached": lambda o, y, m: (each(o, y) * m).sum() / each(o, y).detach().mean(),
    "rare": lambda o, y, m: each(o, y).sum() / ((m > 1e6).sum() + 1),
}


@pytest.mark.slow
@in_tiers("cases", QUOTIENTS, one_in=4)
def test_a_denominator_is_found_however_it_is_written(cases: list[Any]) -> None:
    for name in cases:
        program = captured(
            nn.Linear(6, CLASSES), torch.randn(8, 6), (torch.randn(8, CLASSES), torch.rand(8)), QUOTIENTS[name]
        )
        assert program.loss_terms[0].kind == "sum", name
        assert any(term.kind.endswith("denominator") for term in program.loss_terms), name


def test_a_numerator_of_parameters_counts_once_over_a_denominator_of_the_batch() -> None:
    model = nn.Linear(6, CLASSES)

    def loss(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
        return mse(o, y) + 0.1 * model.weight.pow(2).sum() / m.sum()

    program = validated(model, torch.zeros(8, 6), (torch.zeros(8, CLASSES), torch.ones(8)), loss)
    assert [term.kind for term in program.loss_terms] == ["mean", "mean", "sum denominator"]


LOSSES: dict[str, tuple[Loss, list[str]]] = {
    "scaled_in_each": (lambda o, y, m: (each(o, y) / o.size(0)).sum(), ["mean"]),
    "scaled_sum": (lambda o, y, m: 0.5 * each(o, y).sum() / o.size(0), ["mean"]),
    "over_elements": (lambda o, y, m: (o - y).pow(2).sum() / o.numel(), ["mean"]),
    "over_more_than_size": (lambda o, y, m: each(o, y).sum() / (m.sum() + o.size(0)), ["sum", "sum denominator"]),
    "stacked": (lambda o, y, m: torch.stack([mse(o, y), each(o, y).sum()]).sum(), ["mean", "sum"]),
    "columns": (lambda o, y, m: (o - y).pow(2).mean(0).sum(), ["mean"]),
    "focal": (lambda o, y, m: ((1 - o.sigmoid()) ** 2 * o.sigmoid().log() * y).mean(), ["mean"]),
    "huber": (lambda o, y, m: F.huber_loss(o, y), ["mean"]),
    "hinge": (lambda o, y, m: (1 - o * y).clamp(min=0).mean(), ["mean"]),
    "never_reached": (lambda o, y, m: mse(o, y) + F.relu(o - 1e4).mean(0).sum(), ["mean", "mean"]),
    "einsum": (lambda o, y, m: torch.einsum("bi,b->", (o - y).pow(2), m), ["sum"]),
    "dot": (lambda o, y, m: each(o, y) @ m, ["sum"]),
    "plus_number": (lambda o, y, m: mse(o, y) + 1.0, ["mean"]),
    "half_of_two": (lambda o, y, m: 0.5 * (mse(o, y) + each(o, y).mean()), ["mean", "mean"]),
    "per_class_sum": (lambda o, y, m: torch.zeros(CLASSES).index_add(0, y.argmax(1), each(o, y)).sum(), ["sum"]),
    "twice_the_same": (lambda o, y, m: (a := mse(o, y)) * 0.5 + a * 0.25, ["mean"]),
}


@in_tiers("cases", LOSSES, one_in=3)
def test_a_sum_or_a_mean_is_let_through(cases: list[Any]) -> None:
    for name in cases:
        loss, kinds = LOSSES[name]
        program = validated(nn.Linear(6, CLASSES), torch.zeros(8, 6), (torch.zeros(8, CLASSES), torch.ones(8)), loss)
        assert [term.kind for term in program.loss_terms] == kinds, name


def test_coupled_nodes_are_recorded_in_the_order_of_the_graph() -> None:
    from splitc.capture.example.example import Example
    from splitc.capture.validate.validate import validate_capture
    from tests.support.capturing import capture

    model = made(lambda m, x: m.fc(x - x.mean(0)).flip(0), fc=nn.Linear(6, CLASSES))
    x, y = torch.randn(8, 6), torch.zeros(8, dtype=torch.long)
    program = validate_capture(capture(model, x, y, CE), model, Example.bind(model, x, y, CE))
    assert [each.node for each in program.coupled] == ["sub"] and program.loss_terms == ()
