"""Pins that make groups of the ranks of a separation's roles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError
from splitc.ir.placements import Grouping, Placement
from tests.support.compiled import compiled

COLUMNS = Placement(group=2, split="columns")
ROWS = Placement(group=2, split="rows")


class Headed(nn.Module):
    """A trunk, and a head of three layers with numbers of features that 2 does not divide."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.trunk, self.a, self.b, self.c = nn.Linear(12, 9), nn.Linear(9, 9), nn.Linear(9, 7), nn.Linear(7, 5)
        self.drop = nn.Dropout(0.3)
        if tied:
            self.trunk = nn.Linear(9, 9)
            self.a.weight = self.trunk.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.trunk(x))
        x = self.drop(torch.relu(self.a(x)))
        x = self.drop(torch.relu(self.b(x)))
        return self.c(x)


def separated(n_c: int, n_f: int, tied: bool = False, strategy: str = "", **pins: Any) -> CompiledProgram:
    world = n_c + n_f
    strategy = strategy or f"layer_separation(n_c={n_c}, n_f={n_f})"
    x, y = torch.randn(7, 9 if tied else 12, dtype=torch.float64), torch.randint(5, (7,))
    return compiled(Headed(tied).double(), (x,), y, F.cross_entropy, world, strategy, pins={"trunk": "trunk", **pins})


@pytest.mark.slow
@pytest.mark.parametrize(("n_c", "n_f"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_layers_of_head_ranks_are_divided_over_their_groups(n_c: int, n_f: int) -> None:
    program = separated(n_c, n_f, a=ROWS, b=Placement(state="batch"), c=COLUMNS)
    assert program.plan.groups == {"head": Grouping(2, "BK")}
    places = {layer: (p.role, p.holding, p.split, p.state, p.sync) for layer, p in program.plan.placements.items()}
    shards = "none" if n_f == 2 else "all_reduce"  # one rank of each group
    assert places["a"] == ("head", "sharded", "rows", None, shards)
    assert places["b"] == ("head", "replicated", None, "batch", "all_reduce")
    assert places["c"] == ("head", "sharded", "columns", None, shards)
    result = program.verify(steps=2)
    assert result.holds, str(result)


@pytest.mark.slow
def test_the_roles_of_three_stages_have_groups_of_their_own() -> None:
    program = separated(2, 4, strategy="layer_separation(ranks=2+2+2)", a=ROWS, b="stage1", c=COLUMNS)
    assert program.plan.groups == {"stage1": Grouping(2, "BK"), "stage2": Grouping(2, "BK")}
    result = program.verify(steps=2)
    assert result.holds, str(result)


@pytest.mark.slow
def test_a_division_of_the_world_is_chosen_in_which_the_groups_fit() -> None:
    pins: dict[str, Any] = {"[abc]": COLUMNS}
    program = separated(2, 3, strategy="layer_separation", **pins)
    assert len(program.plan.roles["head"]) in (2, 4)


@pytest.mark.slow
def test_under_auto_separations_follow_pins_of_groups_too() -> None:
    plan = separated(2, 2, strategy="auto", a=COLUMNS).plan
    assert next(c for c in plan.candidates if "sep" in c.strategy).feasible
    assert plan.placements["a"].holding == "sharded" and plan.placements["a"].split == "columns"


REFUSED: dict[str, tuple[int, int, dict[str, Any], str]] = {
    "groups that do not fit": (1, 3, {"a": COLUMNS}, "groups of 2 ranks, which those of head cannot form"),
    "groups of two sizes": (2, 4, {"a": COLUMNS, "b": Placement(group=4)}, "groups of 4 of b, but here all groups"),
    "groups of those that read": (2, 2, {"trunk": COLUMNS}, "no cut of the layers"),
    "a layer that cannot be divided": (1, 2, {"a": ROWS, "cross_entropy": Placement(split="rows")}, "cross_entropy"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_a_separation_cannot_have_are_refused(name: str) -> None:
    n_c, n_f, pins, words = REFUSED[name]
    with pytest.raises(PlacementError, match=words):
        separated(n_c, n_f, **pins)


@pytest.mark.slow
def test_a_parameter_that_roles_share_is_refused_in_groups() -> None:
    with pytest.raises(PlacementError, match=r"trunk\.weight is used in several roles"):
        separated(2, 2, tied=True, a=COLUMNS)
