"""A communication op is a row, a method and its insertion: a patch of these three makes one that is priced and counted.

It gathers the terms of a loss's denominator, which are all-reduced without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.patched import run_patched, touched

PATCH = Path(__file__).parent / "all_gather_scalar.patch"

COUNT = """
import torch
from splitc.ir.transitions import Collective
from splitc.ir.wire import wire
from tests.support.compiled import compiled
from tests.support.models import mlp
from tests.support.wire_bytes import assert_defined

def masked(scores, target):
    mask = (target > 0).to(scores.dtype)
    return (torch.nn.functional.cross_entropy(scores, target, reduction="none") * mask).sum() / (mask.sum() + 1)

batch = torch.randn(6, 8), torch.arange(6) % 3
program = compiled(mlp(), *batch, masked, 3, "data_parallel", global_batch=6)
assert any("comm.all_gather_scalar(" in text for text in program.files.values())
(op,) = (op for op in wire(program.program, 1) if op.algorithm == Collective.ALL_GATHER)
assert (op.shape, op.sent, op.ranks) == ((3,), 2 * 4, (0, 1, 2)), op
assert_defined(program, batch)
pieces = compiled(mlp(), *batch, masked, 2, "data_parallel(microbatches=3)", global_batch=6)
assert all(each.verify(steps=2, dtype=torch.float64).holds for each in (program, pieces))
"""


def test_the_patch_touches_the_table_the_runtime_and_a_pass() -> None:
    assert touched(PATCH) == ["passes/scale_loss.py", "splitc/ir/comm_ops.py", "splitc/runtime/comm/sums.py"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_an_op_of_a_row_a_method_and_its_insertion_is_written_priced_and_counted(tmp_path: Path) -> None:
    run_patched(PATCH, COUNT, tmp_path)
