"""Two linear layers and a squared error, whose programs print in about ten lines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from textwrap import dedent

import torch
import torch.nn.functional as F
from torch import nn

from splitc.ir.graph import copy_graph
from splitc.ir.placements import Placement
from splitc.ir.program import LoweredProgram, PlacedProgram, Program
from tests.support.compiled import analysed
from tests.support.printed import placed, printed


def pair() -> nn.Module:
    """Linear layers a (8 -> 6) and b (6 -> 5)."""
    return nn.Sequential(OrderedDict(a=nn.Linear(8, 6), b=nn.Linear(6, 5)))


def analysed_pair() -> Program:
    """Capture the pair on four examples and price its layers."""
    return analysed(pair(), torch.randn(4, 8), torch.randn(4, 5), F.mse_loss)


def placed_pair(world: int, strategy: str, pins: Mapping[str, str | Placement] | None = None) -> PlacedProgram:
    """Capture and place the pair."""
    return placed(pair(), world, strategy, pins=pins)


def printed_stage(program: LoweredProgram, role: str) -> str:
    """Print the nodes of a stage."""
    graph, _ = copy_graph(program.stage(role).graph)
    *_, last, output = graph.nodes
    output.args = (last,)  # a stage without the loss returns nothing, which no program does
    whole = Program(**{each.name: getattr(program, each.name) for each in fields(Program)} | {"graph": graph})
    return dedent("\n".join(printed(whole).splitlines()[1:-1]))
