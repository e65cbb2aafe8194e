"""Which neurons can be dealt to ranks, and which layers stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.ir.subnets.neurons import Dealing, find_neurons
from tests.support.capturing import capture
from tests.support.models import made

RANKS = 3
X, TOKENS, Y = torch.randn(4, 8), torch.randint(0, 9, (4, 5)), torch.randint(0, 5, (4,))


def dealing(model: nn.Module, x: Tensor = X, ranks: int = RANKS) -> Dealing:
    program = capture(model, (x,), Y, F.cross_entropy)
    return find_neurons(program, program.graph, ranks)


def found(model: nn.Module, x: Tensor = X, ranks: int = RANKS) -> dict[str, list[tuple[int, str]]]:
    """Parameter -> (dim, the layers whose neurons lie along it)."""
    return {
        name: [(dim, "+".join(run.layer or "-" for run in runs)) for dim, runs in sorted(dims.items())]
        for name, dims in dealing(model, x, ranks).tensors.items()
        if not name.endswith(("running_mean", "running_var"))
    }


def net(run: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> nn.Module:
    modules.setdefault("norm", nn.BatchNorm1d(12))
    modules.setdefault("out", nn.Linear(12, 5))
    return made(run, **modules)


@pytest.mark.slow
def test_weights_are_dealt_by_rows_and_columns_and_vectors_with_their_neurons() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(F.dropout(F.gelu(m.norm2(m.fc2(F.relu(m.norm(m.fc1(x)))))), 0.1, m.training))

    model = net(run, fc1=nn.Linear(8, 12), fc2=nn.Linear(12, 7), norm2=nn.BatchNorm1d(7), out=nn.Linear(7, 5))
    assert found(model) == {
        "fc1.weight": [(0, "fc1")],
        "fc1.bias": [(0, "fc1")],
        "norm.weight": [(0, "fc1")],
        "norm.bias": [(0, "fc1")],
        "fc2.weight": [(0, "fc2"), (1, "fc1")],
        "fc2.bias": [(0, "fc2")],
        "norm2.weight": [(0, "fc2")],
        "norm2.bias": [(0, "fc2")],
        "out.weight": [(1, "fc2")],
    }
    assert dealing(model).splits == {"fc1": "columns", "norm": "columns", "fc2": "columns", "norm2": "columns"} | {
        "out": "rows"
    }


WHOLE: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, nn.Module]]] = {
    "a softmax reads all features": (lambda m, x: m.out(m.fc(x).softmax(1)), {"fc": nn.Linear(8, 12)}),
    "a sum with features that all ranks have": (
        lambda m, x: m.out(m.norm(m.fc(x)) + x.repeat(1, 2)[:, :12]),
        {"fc": nn.Linear(8, 12)},
    ),
    "a maximum is taken over features": (
        lambda m, x: m.out(h := m.norm(m.fc(x))) + h.max(1).values[:, None] * x[:, :5],
        {"fc": nn.Linear(8, 12)},
    ),
    "features are parted": (
        lambda m, x: m.out(torch.cat(m.norm(m.fc(x)).chunk(2, 1)[::-1], 1)),
        {"fc": nn.Linear(8, 12)},
    ),
    "features are sliced": (lambda m, x: m.out(m.norm(m.fc(x))[:, :12]), {"fc": nn.Linear(8, 13)}),
    "features are divided by heads": (
        lambda m, x: m.out(m.fc(x).view(-1, 3, 4).tanh().reshape(-1, 12)),
        {"fc": nn.Linear(8, 12)},
    ),
    "a layer is used twice": (
        lambda m, x: m.out(m.norm(m.fc(m.fc(x)))),
        {"fc": nn.Linear(8, 8), "out": nn.Linear(8, 5)},
    ),
    "a normalisation of features": (
        lambda m, x: m.out(m.ln(m.fc(x))),
        {"fc": nn.Linear(8, 12), "ln": nn.LayerNorm(12)},
    ),
    "a scale of all features": (
        lambda m, x: m.out(m.fc(x) * m.gain.weight),
        {"fc": nn.Linear(8, 12), "gain": nn.Linear(12, 1)},
    ),
    "there are fewer neurons than ranks": (
        lambda m, x: m.out(m.fc(x).relu()),
        {"fc": nn.Linear(8, 2), "out": nn.Linear(2, 5)},
    ),
    "the loss reads it": (lambda m, x: m.fc(x), {"fc": nn.Linear(8, 5)}),
}


@pytest.mark.slow
def test_a_layer_stays_whole_where() -> None:
    for why in WHOLE:
        run, modules = WHOLE[why]
        if "twice" in why or "sliced" in why:
            modules = {**modules, "norm": nn.BatchNorm1d(8 if "twice" in why else 13)}
        assert not found(net(run, **modules)), why


@pytest.mark.slow
def test_layers_whose_values_are_added_are_dealt_alike_and_concatenated_ones_apart() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        a, b = m.na(m.a(x)), m.nb(m.b(x))
        both = torch.cat([a.relu(), b.relu(), x], 1)
        return m.out(m.norm(m.c(both)) + m.nd(m.d(both)))

    modules: dict[str, nn.Module] = {name: nn.Linear(8, 4) for name in "ab"}
    modules |= {f"n{name}": nn.BatchNorm1d(4) for name in "ab"} | {name: nn.Linear(16, 12) for name in "cd"}
    dealt = found(net(run, **modules, nd=nn.BatchNorm1d(12)))
    assert dealt["c.weight"] == dealt["d.weight"] == [(0, "c"), (1, "a+b+-")]
    assert dealt["out.weight"] == [(1, "c")]


@pytest.mark.slow
def test_a_layer_whose_value_meets_a_concatenation_is_dealt_as_its_parts() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        both = torch.cat([m.na(m.a(x)), m.nb(m.b(x))], 1)
        return m.out(both + m.norm(m.c(both)))

    modules: dict[str, nn.Module] = {"a": nn.Linear(8, 5), "b": nn.Linear(8, 7), "c": nn.Linear(12, 12)}
    dealt = found(net(run, **modules, na=nn.BatchNorm1d(5), nb=nn.BatchNorm1d(7)))
    assert dealt["c.weight"] == [(0, "a+b"), (1, "a+b")]
    assert dealt["out.weight"] == [(1, "a+b")]


def test_embeddings_are_dealt_by_features_as_modules_and_functions() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(m.norm(m.bag(x)) + m.norm2(F.embedding_bag(x, m.other.weight)))

    model = net(run, bag=nn.EmbeddingBag(9, 12), other=nn.Embedding(9, 12), norm2=nn.BatchNorm1d(12))
    dealt = found(model, TOKENS)
    assert dealt["bag.weight"] == dealt["other.weight"] == [(1, "bag")] or dealt["other.weight"] == [(1, "other")]
    assert dealt["out.weight"][0][0] == 1


def test_hidden_layers_need_a_normalisation_after_them_and_the_last_does_not() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(F.relu(m.fc2(F.relu(m.norm(m.fc1(x))))))

    found = dealing(net(run, fc1=nn.Linear(8, 12), fc2=nn.Linear(12, 12)))
    assert [node.name for node in found.bare] == ["fc2"]
    assert [node.name for node in found.final] == ["out"]


@pytest.mark.slow
def test_a_block_of_a_transformer_needs_its_output_normalised() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.e(x)
        h = h + m.down(F.gelu(m.up(m.ln(h))))
        return m.head(h.mean(1))

    parts: dict[str, nn.Module] = {"e": nn.Embedding(9, 8), "ln": nn.LayerNorm(8), "head": nn.Linear(8, 5)}
    found = dealing(net(run, **parts, up=nn.Linear(8, 12), down=nn.Linear(12, 8)), TOKENS)
    assert sorted(node.name for node in found.bare) == ["down", "up"]
    assert {name: set(dims) for name, dims in found.tensors.items()} == {"up.weight": {0}, "up.bias": {0}} | {
        "down.weight": {1}
    }
