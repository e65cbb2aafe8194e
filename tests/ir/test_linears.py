"""Which layers count as linear: those whose own weight is read by products with (examples, ..., features) only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.ir.graph import copy_graph, info
from splitc.ir.linears import as_linear, as_table, linear_layers, parameter_nodes
from splitc.ir.program import Program
from tests.support.capturing import capture
from tests.support.models import CLASSES, Made, made


def captured(model: nn.Module, x: Tensor | None = None, loss: Callable[..., Tensor] = F.cross_entropy) -> Program:
    example = torch.randn(4, 8) if x is None else x
    return capture(model, (example,), torch.randint(CLASSES, (4,)), loss)


def linears(model: nn.Module, x: Tensor | None = None, loss: Callable[..., Tensor] = F.cross_entropy) -> set[str]:
    return set(linear_layers(captured(model, x, loss)))


def test_modules_are_linear_layers_with_and_without_a_bias() -> None:
    model = made(lambda m, x: m.fc(F.relu(m.a(x))), a=nn.Linear(8, 8, bias=False))
    found = linear_layers(captured(model))
    assert {name: [(u.weight, u.bias) for u in uses] for name, uses in found.items()} == {
        "a": [("a.weight", None)],
        "fc": [("fc.weight", "fc.bias")],
    }


def test_calls_of_the_function_are_too_where_weight_and_bias_are_parameters() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(F.linear(input=x, weight=m.w, bias=m.b))

    model = Made(run, fc=nn.Linear(8, CLASSES), w=nn.Parameter(torch.randn(8, 8)), b=nn.Parameter(torch.randn(8)))
    found = linear_layers(captured(model))
    ((use,),) = [uses for name, uses in found.items() if name != "fc"]
    assert (use.weight, use.bias) == ("w", "b")


def test_a_layer_that_is_used_twice_has_both_uses() -> None:
    found = linear_layers(captured(made(lambda m, x: m.fc(m.a(torch.tanh(m.a(x)))))))
    assert {name: len(uses) for name, uses in found.items()} == {"a": 2, "fc": 1}


class Scaled(nn.Linear):
    """A subclass may compute something else."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2.0, self.bias)


NOT: dict[str, nn.Module] = {
    "a weight that is computed from a parameter": made(lambda m, x: m.fc(F.linear(x, m.a.weight * 2.0, m.a.bias))),
    "a subclass with a forward of its own": made(lambda m, x: m.fc(m.a(x)), a=Scaled(8, 8)),
    "a weight that something else reads too": made(lambda m, x: m.fc(m.a(x)) + m.a.weight.sum()),
    "a product of matrices": made(lambda m, x: m.fc(x @ m.a.weight.t())),
    "a bilinear layer": made(lambda m, x: m.fc(m.a(x, x)), a=nn.Bilinear(8, 8, 8)),
    "a convolution of width one": made(lambda m, x: m.fc(m.a(x.unsqueeze(2)).squeeze(2)), a=nn.Conv1d(8, 8, 1)),
    "a layer with time before the examples": made(lambda m, x: m.fc(m.a(x.expand(3, *x.shape)).mean(0))),
    "a layer on features only": made(lambda m, x: m.fc(x + m.a(m.b)), b=nn.Parameter(torch.randn(8))),
}


def test_what_is_not_a_linear_layer() -> None:
    for name in NOT:
        assert linears(NOT[name]) == {"fc"}, name


def test_tied_layers_are_not_their_own() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(m.a(F.relu(m.b(x))))

    shared = nn.Linear(8, 8)
    twin = nn.Linear(8, 8)
    twin.weight = shared.weight
    assert linears(made(run, a=shared, b=twin)) == {"fc"}


def test_an_embedding_tied_to_the_output_is_not() -> None:
    embed, head = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES, bias=False)
    head.weight = embed.weight
    model = Made(lambda m, x: m.head(m.mid(m.embed(x).sum(1))), embed=embed, head=head, mid=nn.Linear(8, 8))
    assert linears(model, torch.randint(CLASSES, (4, 3))) == {"mid"}


def test_frozen_layers_and_layers_on_more_dims_are() -> None:
    model = made(lambda m, x: m.fc(m.a(x)).mean(1))
    model.get_submodule("a").requires_grad_(False)
    assert linears(model, torch.randn(4, 6, 8)) == {"a", "fc"}


def test_the_parameters_of_a_module_become_nodes_before_it() -> None:
    for bias in [True, False]:
        program = captured(made(lambda m, x: m.fc(m.a(x)), a=nn.Linear(8, 8, bias=bias)))
        graph, _ = copy_graph(program.graph)
        linear = next(found for node in graph.nodes if (found := as_linear(program, node)) is not None)
        weight, bias_node = parameter_nodes(graph, linear)
        assert (weight.op, weight.target) == ("get_attr", "a.weight"), bias
        assert (bias_node is not None) == bias, bias
        order = list(graph.nodes)
        assert order.index(weight) < order.index(linear.node) and info(weight).layer == "a", bias


def test_sums_and_means_of_an_examples_rows_are_what_is_read_of_a_table() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        twice = m.e(x)
        read = [m.e(x).sum(1), torch.mean(m.e(x), dim=-2), m.e(x).sum(-1), m.e(x).sum(1, True).squeeze(1)]
        return m.fc(torch.cat([*read, twice.sum(1), twice[:, 0]], 1))

    model = made(run, e=nn.Embedding(9, 8), fc=nn.Linear(43, CLASSES))
    program = captured(model, torch.randint(9, (4, 3)))
    tables = [found for node in program.graph.nodes if (found := as_table(program, node)) is not None]
    assert [found.options.get("pool") for found in tables] == [None, "sum", "mean", None, None]
    assert [found.output is found.node for found in tables] == [True, False, False, True, True]
