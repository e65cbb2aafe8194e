"""Print a small program before and after a pass: `printed(program_after(ScaleLoss, placed(two_layers(), 2, "auto")))`.

Tests compare it with golden text of their own, inside `inspect.cleandoc`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from difflib import ndiff
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.cost_models.clusters.named import load_cluster
from splitc.ir.graph import info
from splitc.ir.pass_manager import Pass, run_pass
from splitc.ir.placements import Placement
from splitc.ir.printer import print_program
from splitc.ir.program import PlacedProgram, Program
from splitc.passes.place import Place
from splitc.passes.planner.strategy import parse_strategy
from splitc.passes.rewriting import ON_THE_GRAPH, ON_THE_STAGES
from splitc.passes.split_ranks import SplitRanks
from tests.support.compiled import CLUSTER, analysed

_REWRITES: tuple[Pass[Any, Any], ...] = (*ON_THE_GRAPH, SplitRanks(), *ON_THE_STAGES)
_DEFAULT = re.compile(r", (\w+=None|ignore_index=-100|label_smoothing=0\.0)(?=[,)])")


def two_layers(middle: nn.Module | None = None) -> nn.Module:
    """Linear layers fc1 (8 -> 6) and fc2 (6 -> 5) with a ReLU, or another module, between them."""
    return nn.Sequential(OrderedDict(fc1=nn.Linear(8, 6), middle=middle or nn.ReLU(), fc2=nn.Linear(6, 5)))


def placed(
    model: nn.Module,
    world: int,
    strategy: str,
    *,
    target: Tensor | None = None,
    loss: Any = F.mse_loss,
    pins: Mapping[str, str | Placement] | None = None,
) -> PlacedProgram:
    """Capture a model of inputs (4, 8) and outputs (4, 5) and place it: what the first rewriting pass takes."""
    program = analysed(model, torch.randn(4, 8), torch.randn(4, 5) if target is None else target, loss)
    return run_pass(Place(load_cluster(CLUSTER), world, parse_strategy(strategy), pins or {}), program)


def program_before(pass_type: type[Pass[Any, Any]], program: PlacedProgram) -> Any:
    """Run the rewriting passes that come before the one of `pass_type`, with their checks."""
    rewritten: Program = program
    for each in _REWRITES[: _position(pass_type)]:
        rewritten = run_pass(each, rewritten)
    return rewritten


def program_after(pass_type: type[Pass[Any, Any]], program: PlacedProgram) -> Any:
    """Run the rewriting passes up to and including the one of `pass_type`, with their checks."""
    return run_pass(_REWRITES[_position(pass_type)], program_before(pass_type, program))


def changes(pass_type: type[Pass[Any, Any]], program: PlacedProgram) -> str:
    """The lines that a pass takes away and those that it adds, in their order."""
    texts = (printed(each) for each in (program_before(pass_type, program), program_after(pass_type, program)))
    before, after = ([" ".join(line.split()) for line in text.splitlines()] for text in texts)
    return "\n".join(line for line in ndiff(before, after) if line.startswith(("+", "-")))


def printed(program: Program) -> str:
    """Print a program without source lines and without the default arguments of torch's functions."""
    header, *lines = print_program(program).splitlines()
    nodes = [node for node in program.graph.nodes if node.op != "output"]
    rows = [line.removesuffix(info(node).source).split("  # ") for line, node in zip(lines, nodes, strict=False)]
    statements = [_DEFAULT.sub("", statement).rstrip() for statement, _ in rows]
    width = min(max(map(len, statements)), 72)
    body = [f"{text:<{width}}  # {note.strip()}" for text, (_, note) in zip(statements, rows, strict=True)]
    return "\n".join((header, *body, *lines[len(nodes) :]))


def _position(pass_type: type[Pass[Any, Any]]) -> int:
    return next(k for k, each in enumerate(_REWRITES) if isinstance(each, pass_type))
