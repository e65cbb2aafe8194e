"""Models, examples and losses that cannot be captured are refused before or after the trace, with a remedy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.capturing import refusal, validated
from tests.support.models import BATCH, CLASSES, Made, labels, made, vectors


def linear(m: Any, x: Tensor) -> Tensor:
    return m.fc(x)


def small(**children: Any) -> Any:
    return Made(linear, **{"fc": nn.Linear(8, CLASSES), **children})


def scripted() -> nn.Module:
    with pytest.warns(DeprecationWarning):
        return torch.jit.script(nn.Sequential(nn.Linear(8, CLASSES)))


def hooked(kind: str) -> nn.Module:
    model = small()
    if kind == "module":
        model.fc.register_full_backward_hook(lambda module, before, after: None)
    else:
        model.fc.weight.register_hook(lambda gradient: gradient * 2)
    return model


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return small(fc=nn.utils.weight_norm(nn.Linear(8, CLASSES)))


def unlucky_name() -> nn.Module:
    model = small()
    model.type = nn.Linear(8, 8)
    return model


def same_memory(share: Callable[[Any], Any]) -> nn.Module:
    model = small(a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    share(model)
    return model


def test_parameters_that_are_parts_of_one_memory_are_captured() -> None:
    model, flat = small(a=nn.Linear(8, 8), b=nn.Linear(8, 8)), torch.randn(128)
    model.a.weight.data, model.b.weight.data = flat[:64].view(8, 8), flat[64:].view(8, 8)
    validated(model, vectors()(), labels()(), F.cross_entropy)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "data_parallel": (
        lambda: nn.DataParallel(small()),
        "DataParallel hides the model: give compile() what is inside it, model.module",
    ),
    "compiled": (
        lambda: cast(nn.Module, torch.compile(small(), backend="eager")),
        "OptimizedModule hides the model: give compile() what is inside it, model._orig_mod",
    ),
    "scripted": (scripted, "RecursiveScriptModule has no Python to trace: give compile() the model it was made from"),
    "gradient_hook": (lambda: hooked("tensor"), "fc.weight has a gradient hook, which a graph would lose; remove it"),
    "lazy": (lambda: small(fc=nn.LazyLinear(5)), "fc.weight has no shape yet; run one batch through the model first"),
    "max_norm": (
        lambda: small(e=nn.Embedding(9, 8, max_norm=1.0)),
        "e has max_norm, which writes into its weight: ranks would differ",
    ),
    "by_frequency": (
        lambda: small(e=nn.EmbeddingBag(9, 8, scale_grad_by_freq=True)),
        "e has scale_grad_by_freq, which counts indices over the whole batch: ranks would differ; use nn.EmbeddingBag",
    ),
    "same_memory": (
        lambda: same_memory(lambda m: setattr(m.b.weight, "data", m.a.weight.data)),
        "a.weight and b.weight are two tensors in the same memory, which ranks would train apart; make them one",
    ),
    "part_of_the_memory": (
        lambda: same_memory(lambda m: m.register_buffer("first", m.a.weight.detach()[0])),
        "first and a.weight are two tensors in the same memory",
    ),
    "attribute_in_the_memory": (
        lambda: same_memory(lambda m: setattr(m, "copied", m.a.weight.detach()[1:])),
        "copied are two tensors in the same memory",
    ),
    "sync_batchnorm": (
        lambda: small(n=nn.SyncBatchNorm(8)),
        "n is an nn.SyncBatchNorm, which talks to process groups of its own",
    ),
    "old_weight_norm": (
        old_weight_norm,
        "fc.weight was computed from parameters outside of forward, so the model cannot be copied",
    ),
    "name": (unlucky_name, "Made has a child named 'type', which hides nn.Module.type; rename it"),
    "lock": (
        lambda: small(lock=threading.Lock()),
        "Made cannot be copied: TypeError: cannot pickle '_thread.lock' object",
    ),
    "nothing_to_train": (
        lambda: small().requires_grad_(False),
        "Made has no trainable parameter that its loss depends on",
    ),
}


def test_a_model_that_a_graph_cannot_hold_is_refused_with_a_remedy() -> None:
    for name in REFUSED:
        make, text = REFUSED[name]
        assert text in refusal(make(), vectors()(), labels()(), F.cross_entropy), name


def test_all_that_is_wrong_with_a_model_is_said_at_once() -> None:
    model = small(e=nn.Embedding(9, 8, max_norm=1.0), n=nn.SyncBatchNorm(8))
    text = refusal(model, vectors()(), labels()(), F.cross_entropy)
    assert text.splitlines()[0] == "Made cannot be captured:" and text.count("\n  - ") == 2


EXAMPLES = {
    "too_many": (
        small(),
        (vectors()(), vectors()()),
        "the example does not fit Made.forward(x: 'Any') -> 'Any': too many positional",
    ),
    "unknown_name": (small(), {"y": vectors()()}, "the example does not fit Made.forward"),
    "no_tensor": (small(), (3,), "the example has no tensor; give example=(tensor, ...)"),
    "number": (small(), torch.tensor(1.0), "the input x is a 0-d tensor; dim 0 of every input must be the batch"),
    "time_first": (
        small(),
        torch.randn(7, 3, 8),
        "disagree about the batch: x has 7, target has 4 rows, and no other size is in all of them; dim 0 must be the",
    ),
    "empty": (small(), torch.randn(0, 8), "disagree about the batch: x has 0, target has 4 rows"),
    "too_wide": (
        small(),
        torch.randn(BATCH, 9),
        "fc fails: RuntimeError: a and b must have same reduction dim, but got [4, 9] X [8, 5]",
    ),
}


def test_an_example_that_does_not_fit_is_told_how_it_should_look() -> None:
    for name in EXAMPLES:
        model, example, text = EXAMPLES[name]
        assert text in refusal(model, example, labels()(), F.cross_entropy), name


def test_loss_and_target_go_together() -> None:
    assert "a target is given but no loss" in refusal(small(), vectors()(), labels()(), None)
    assert "a loss is given but no target" in refusal(small(), vectors()(), None, F.cross_entropy)


def test_what_is_no_loss_is_named_by_its_shape() -> None:
    assert "returns a tensor of shape (-1, 5), not a loss" in refusal(small(), vectors()())
    none = Made(lambda m, x: {"logits": m.fc(x), "hidden": x}, fc=nn.Linear(8, CLASSES))
    assert "the model returns a dict of logits, hidden, no 0-d tensor in it, so the loss is not" in refusal(
        none, vectors()()
    )
    two = Made(lambda m, x: (m.fc(x), m.fc(x).sum(), m.fc(x).mean()), fc=nn.Linear(8, CLASSES))
    assert "the model returns a tuple of 0, 1, 2, 2 of them 0-d, so the loss is not known" in refusal(two, vectors()())


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(CLASSES))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(out * self.w, y)

    text = refusal(small(), vectors()(), labels()(), Margin())
    assert "the loss has parameters of its own (w)" in text and "make it part of the model" in text


def test_a_buffer_that_forward_registers_anew_in_another_shape_is_named() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        if m.table.size(0) < 9:
            m.register_buffer("table", torch.arange(9.0))
        return m.fc(x + m.table[:8])

    said = refusal(made(run, table=nn.Buffer(torch.zeros(8))), torch.randn(BATCH, 8), labels()(), F.cross_entropy)
    assert said.startswith("the buffer table differs")
