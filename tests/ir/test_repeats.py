"""What a graph repeats runs once: its middle is left out where parts are alike, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.cost_models.compute import flops
from splitc.ir import interpreter
from splitc.ir.graph import copy_graph, tensor_spec, update_info
from splitc.ir.interpreter import shapes_at
from splitc.ir.repeats import without_repeats
from tests.support.capturing import capture, node

DEPTH = 7


class Blocks(nn.Module):
    """So many residual blocks, as `run` says.  widths: of the hidden layer of each."""

    def __init__(self, run: Callable[..., Tensor], widths: tuple[int, ...] = (5,) * DEPTH, tied: bool = False) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(4, width) for width in widths)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths)
        self.down = nn.ModuleList(nn.Linear(width, 4) for width in widths)
        self.scale, self.run = nn.Parameter(torch.ones(4)), run
        for layer in self.down if tied else ():
            layer.weight = self.down[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def plain(model: Blocks, x: Tensor) -> Tensor:
    for up, norm, down in zip(model.up, model.norms, model.down, strict=True):
        x = x + down(F.dropout(F.relu(norm(up(x))), 0.1))
    return x


def scaled(model: Blocks, x: Tensor) -> Tensor:
    """All blocks read one value and one parameter."""
    gate = torch.sigmoid(x)
    for up, norm, down in zip(model.up, model.norms, model.down, strict=True):
        x = model.scale * x + gate * down(norm(up(x)))
    return x


def collected(model: Blocks, x: Tensor) -> Tensor:
    """What follows reads the result of every block."""
    found = []
    for up, norm, down in zip(model.up, model.norms, model.down, strict=True):
        x = x + down(norm(up(x)))
        found.append(x)
    return torch.stack(found).sum(0)


def program_of(model: nn.Module) -> Any:
    return capture(model, torch.randn(6, 4), torch.randint(4, (6,)), F.cross_entropy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (Blocks(plain), 5),
        (Blocks(scaled), 5),
        (Blocks(plain, tied=True), 5),
        (Blocks(plain, (5, 5, 5, 6, 5, 5, 5)), 7),
        (Blocks(collected), 7),
    ],
    ids=["alike", "one value for all", "one weight for all", "one that is wider", "all are read"],
)
def test_a_layer_costs_what_it_costs_where_nothing_is_left_out(
    model: Blocks, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(model)
    shorter, stands_for = without_repeats(program.root, program.graph)
    assert sum(str(each.target).startswith("up.") for each in shorter.nodes) == blocks
    assert {each.name for each in program.graph.nodes} == {each.name for each in shorter.nodes} | stands_for.keys()
    counted = flops.layer_costs(program)
    monkeypatch.setattr(flops, "without_repeats", lambda root, graph: (graph, {}))
    assert counted == flops.layer_costs(program)


def test_of_alike_blocks_one_with_another_shape_is_still_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(Blocks(plain))
    graph, mapping = copy_graph(program.graph)
    fourth = mapping[node(program, "up_3")]
    update_info(fourth, spec=tensor_spec(mapping[node(program, "down_3")]))
    object.__setattr__(program, "graph", graph)
    assert [line.partition(" is (")[0].rpartition(" ")[2] for line in shapes_at(program, 7)] == ["up_3"]
    monkeypatch.setattr(interpreter, "without_repeats", lambda root, graph: (graph, {}))
    assert len(shapes_at(program, 7)) == 1
