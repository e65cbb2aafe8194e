"""A strategy is one file and one line of the registry: a patch of these two makes one that compiles and verifies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.patched import run_patched, touched

PATCH = Path(__file__).parent / "every_second_rank.patch"

VERIFY = """
import splitc, torch
from tests.support.models import CASES

model, images, labels, loss = CASES["alexnet"].make(torch.float64)
asked = dict(world=4, example=images, target=labels, loss=loss, cluster="v100-10gbe")
program = splitc.compile(model, strategy="every_second_rank(microbatches=1)", **asked)
assert program.plan.roles == {"all": (0, 2)}, program.plan.roles
done = program.verify(dtype=torch.float64)
assert done.holds, str(done)
assert "every_second_rank" in [each.strategy for each in splitc.compile(model, **asked).plan.candidates]
"""


def test_the_patch_touches_the_file_of_the_strategy_and_the_registry() -> None:
    assert touched(PATCH) == ["splitc/strategies/every_second_rank.py", "passes/planner/registry.py"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_strategy_of_one_file_and_one_line_compiles_verifies_and_is_compared(tmp_path: Path) -> None:
    run_patched(PATCH, VERIFY, tmp_path)
