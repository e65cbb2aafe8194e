"""DivideRoles: in microbatches the transitions of groups are entries of further roles, on the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.ir.placements import Placement
from splitc.ir.plan import Plan
from splitc.ir.schedule.actions import print_actions
from splitc.specialise import Settings, specialise
from tests.support.compiled import CLUSTER, analyse, compiled
from tests.support.delays import delays

ROWS = Placement(holding="sharded", split="rows", state="features")
EXAMPLE = torch.randn(6, 8), torch.randint(5, (6,))


class Net(nn.Module):
    """A skip connection over two layers, a layer that is used twice, and weights that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 5)
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.a(x)))
        y = x + torch.tanh(self.b(torch.sigmoid(self.b(x))))
        return self.head(y - self.c(y))


def divided(world: int, number: int = 2, schedule: str = "all_forward", **options: Any) -> CompiledProgram:
    strategy = f"modulo_shard(mp={world},microbatches={number},schedule={schedule})"
    model: Any = options.pop("model", Net())
    return compiled(model, *EXAMPLE, F.cross_entropy, world, strategy, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "schedule"), [(2, "1f1b"), pytest.param(3, "all_forward", marks=pytest.mark.slow)])
def test_transitions_between_roles_train_as_one_process_does(world: int, schedule: str) -> None:
    program = divided(world, 3, schedule, global_batch=world * 5 + 1)
    with delays(seed=world):
        assert program.verify(dtype=torch.float64).holds


@pytest.mark.slow
def test_a_piece_is_computed_while_the_transition_of_another_one_travels() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))
    program = divided(2, model=model, pins={"[02]": ROWS, "4": Placement(holding="sharded", split="rows")})
    text = print_actions(program.program.rank_programs[0].actions)
    forward = [line for line in text.splitlines() if line.startswith(("head_2: ", "head: forward"))]
    assert forward[:4] == [
        "head: forward",
        "head_2: reduce_scatter cut0",
        "head: forward [1]",
        "head_2: reduce_scatter cut0 [1]",
    ]
    assert program.verify(dtype=torch.float64).holds


@pytest.mark.slow
def test_the_plan_stays_as_it_was_decided() -> None:
    program = divided(2)
    lowered, read = program.program.plan, Plan.from_json(program.files["plan.json"])
    assert len(lowered.roles) > len(read.roles) == 2 and lowered.hash == read.hash
    assert set(program.files) >= {"trunk_head.py", "rank0.py", "rank1.py"}
    again = specialise(analyse(Net(), *EXAMPLE, F.cross_entropy), Settings(2, cluster=CLUSTER), plan=read)
    assert again.plan.roles == lowered.roles and again.plan.hash == read.hash


@pytest.mark.slow
def test_a_model_that_is_another_one_in_evaluation_stays_whole() -> None:
    class Modal(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if self.training else F.softmax(y, -1)

    program = divided(2, model=Modal())
    assert len(program.program.plan.roles) == 2
    assert program.verify(dtype=torch.float64).holds


def test_without_microbatches_nothing_is_divided() -> None:
    assert divided(2, 1).program.plan.part_of == {}
