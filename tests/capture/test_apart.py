"""Examples that depend on each other are found, whatever the example looks like; those that do not are let through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.capturing import here, refusal, validated
from tests.support.models import CLASSES, made
from tests.support.sampling import in_tiers

MODELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "centred": lambda m, x: m.fc(x - x.mean(0)),
    "flipped": lambda m, x: m.fc(0.5 * x + 0.5 * x.flip(0)),
    "rolled": lambda m, x: m.fc(x + x.roll(1, 0)),
    "softmax": lambda m, x: m.fc(x.softmax(0)),
    "log_softmax": lambda m, x: m.fc(F.log_softmax(x, 0)),
    "normalize": lambda m, x: m.fc(F.normalize(x, dim=0)),
    "normalize_p1": lambda m, x: m.fc(F.normalize(x, p=1, dim=0)),
    "attention": lambda m, x: m.fc(F.scaled_dot_product_attention(x, x, x)),
    "attention_by_hand": lambda m, x: m.fc((x @ x.T).softmax(-1) @ x),
    "gate": lambda m, x: m.fc(torch.where(x.mean() > 0.3, x, 2 * x)),
    "far_gate": lambda m, x: m.fc(torch.where(x.mean() > 1e6, x, 2 * x)),
    "over_size": lambda m, x: m.fc(x / x.size(0)),
    "by_pairs_of_rows": lambda m, x: m.fc(x) * (1 + x.size(0) // 5),
    "over_number_of_rows": lambda m, x: m.fc(x / torch.ones_like(x[:, 0]).sum()),
    "standardised": lambda m, x: m.fc((x - x.mean(0)) / (x.std(0) + 1)),
    "over_largest": lambda m, x: m.fc(x / (x.abs().amax() + 1)),
    "cumulative": lambda m, x: m.fc(x.cumsum(0)),
    "largest_so_far": lambda m, x: m.fc(x.cummax(0)[0]),
    "sorted": lambda m, x: m.fc(x.sort(0)[0]),
    "ranked": lambda m, x: m.fc(x) * (1 + x.argsort(0)[:, :1].float()),
    "position": lambda m, x: m.fc(x + torch.arange(x.size(0))[:, None]),
    "convolved": lambda m, x: m.fc(F.avg_pool1d(x.T, 3, 1, 1).T),
    "previous": lambda m, x: m.fc(torch.cat([torch.zeros(1, x.size(1)), x]).cumsum(0)[1:]),
    "distances": lambda m, x: m.fc(x) * torch.cdist(x, x).sum(1, keepdim=True),
    "clamped_by_mean": lambda m, x: m.fc(torch.minimum(x, x.mean(0) + 1e3)),
    "fft": lambda m, x: m.fc(torch.fft.fft(x, dim=0).real),
    "mean_embedding": lambda m, x: m.fc(x) + m.fc(x.mean(0, keepdim=True)),
    "reshaped": lambda m, x: m.fc(x.T.reshape(x.shape) + x),
    "layer_norm": lambda m, x: m.fc(F.layer_norm(x.T, (x.size(0),)).T),
    "counted": lambda m, x: m.fc(x) * (x > 0).sum(),
    "filled": lambda m, x: m.fc(x) + torch.full_like(m.fc(x), 1.0) * x.amax(),
    "filled_by_mean": lambda m, x: m.fc(torch.full_like(x, 0.0) + x.new_full((6,), 2.0) * x.mean(0)),
    "interleaved": lambda m, x: m.fc(torch.cat([x, x]).view(2, -1, 6).transpose(0, 1).reshape(-1, 6)[: x.size(0)]),
    "product_of_sums": lambda m, x: m.fc(x @ (x.T @ x)),
    "all_pairs": lambda m, x: m.fc(x * torch.einsum("bi,ci->", x, x)),
    "any_far": lambda m, x: m.fc(torch.where((x > 1e6).any(0), x, 2 * x)),
    "triangle": lambda m, x: m.fc(torch.ones(x.size(0), x.size(0)).tril() @ x),
}


@pytest.mark.slow
@in_tiers("cases", MODELS, one_in=3)
def test_a_model_that_couples_examples_is_refused_on_a_constant_example(cases: list[Any]) -> None:
    for name in cases:
        model = made(MODELS[name], fc=nn.Linear(6, CLASSES))
        target = torch.zeros(8, dtype=torch.long)
        assert "couples examples" in refusal(model, torch.zeros(8, 6), target, F.cross_entropy), name


def test_the_line_where_examples_begin_to_depend_on_each_other_is_named() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.fc(x)
        h = h - h.mean(0)  # here
        return F.relu(h)

    said = refusal(made(run, fc=nn.Linear(6, CLASSES)), torch.zeros(8, 6), torch.zeros(8).long(), F.cross_entropy)
    assert said.startswith(f"{here(run)}: the loss couples examples: sub is no linear function of mean")


def test_what_fails_on_few_examples_is_told_by_line() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="none").topk(2)[0].mean()  # here

    said = refusal(nn.Linear(6, CLASSES), torch.randn(8, 6), torch.zeros(8).long(), loss)
    assert said.startswith(f"{here(loss)}: topk fails on 1 examples: ") or "topk is not known to be a sum" in said


SEPARATE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "picked": lambda m, x: m.fc(x).gather(1, m.fc(x).argmax(1, keepdim=True)).expand(-1, CLASSES),
    "indexed_by_position": lambda m, x: m.fc(x)[torch.arange(x.size(0)), m.fc(x).argmax(1)][:, None] * m.fc(x),
    "flat_index": lambda m, x: m.fc(x.flatten()[(torch.arange(x.size(0)) * x.size(1))[:, None] + x.topk(6, 1)[1]]),
    "time_first": lambda m, x: m.fc(
        F.relu(x.reshape(-1, 3, 2).transpose(0, 1).reshape(-1, 2)).view(3, -1, 2).transpose(0, 1).reshape(-1, 6)
    ),
    "batch_norm": lambda m, x: m.fc(m.bn(x)),
    "functional_batch_norm": lambda m, x: m.fc(F.batch_norm(x, None, None, training=True)),
    "mask_of_sizes": lambda m, x: m.fc(x * x.new_ones(x.size(0), 1)),
    "identity_matrix": lambda m, x: m.fc(torch.eye(x.size(0)) @ x),
    "table_like_data": lambda m, x: m.fc(x + torch.arange(6).to(x).type_as(x)),
    "bias_like_data": lambda m, x: m.fc(x) + m.fc.bias.expand_as(m.fc(x)),
    "cancelling": lambda m, x: m.fc(x + (x - 2 * x + x)),
    "dropped": lambda m, x: m.fc(F.dropout(x, 0.5, m.training)),
}


@in_tiers("cases", SEPARATE, one_in=3)
def test_a_model_that_treats_examples_apart_is_let_through(cases: list[Any]) -> None:
    for name in cases:
        model = made(SEPARATE[name], fc=nn.Linear(6, CLASSES), bn=nn.BatchNorm1d(6))
        program = validated(model, torch.zeros(8, 6), torch.zeros(8, dtype=torch.long), F.cross_entropy)
        assert not program.coupled and program.notes == () and [t.kind for t in program.loss_terms] == ["weighted"], (
            name
        )
