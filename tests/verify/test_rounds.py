"""What `verify` says of plans that train in rounds: right ones equal copies in one process, wrong ones do not."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitc.compiled import CompiledProgram
from tests.support.compiled import compiled


def network(norm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(12) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 12), middle, nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 4))


def local(period: int, world: int = 2, dtype: torch.dtype = torch.float64) -> CompiledProgram:
    batch = torch.randn(8, 6, dtype=dtype), torch.arange(8) % 4
    return compiled(network().to(dtype), batch[:1], batch[1], F.cross_entropy, world, f"local_sgd({period=})")


@pytest.mark.parametrize(("world", "period"), [(1, 2), (2, 1), (2, 2), (3, 2), (2, 5)])
def test_local_sgd_trains_as_copies_do_in_one_process(world: int, period: int) -> None:
    result = local(period, world).verify()
    assert result.holds and result.tolerance == 1e-9, result
    assert result.steps == (3 if period == 1 else 5)
    assert f"against one process that trains {world} copies in turn" in str(result) and "approximate" in str(result)
    assert any("rounds of 2 updates, where the plan has 5" in note for note in result.notes) == (period == 5)


def test_rounds_in_float32_begin_with_what_the_ranks_have() -> None:
    result = local(2, dtype=torch.float32).verify(steps=7)
    assert result.holds and result.tolerance == 1e-5 and result.steps == 7, result


def test_sizes_of_local_batches_weigh_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.compiled._scaled_down", lambda sizes, largest: (3, 7))
    result = local(2).verify()
    assert result.holds and result.examples == 10, result


BROKEN = {
    "units do not average": (r"comm\.average\(.*\)", "pass"),
    "a statistic is not averaged": (r'^ *"1\.running_var",\n', ""),
    "gradients are halved": (r"loss\.backward\(\)", "(loss / 2).backward()"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_round_that_is_wrong_is_noticed(name: str) -> None:
    made = local(2)
    edited = {file: re.sub(*BROKEN[name], text, flags=re.MULTILINE) for file, text in made.files.items()}
    assert edited != made.files
    made.__dict__["files"] = edited
    assert not made.verify().holds
