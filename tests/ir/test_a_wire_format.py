"""What one transition sends in another dtype is said of the transition, then sent, counted and priced: four files.

The patch lets groups gather the examples of each other in bfloat16; they compute with them, and sum, in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.patched import run_patched, touched

PATCH = Path(__file__).parent / "narrow_gather.patch"

COUNT = """
import torch
from splitc.ir.wire import wire
from tests.support.compiled import compiled
from tests.support.models import CASES
from tests.support.wire_bytes import assert_defined

model, images, labels, loss = CASES["alexnet"].make(torch.float32)
images, labels = torch.cat([images, -images]), torch.cat([labels, labels])
for options in ("scheme=B/K", "scheme=BK,microbatches=2"):
    program = compiled(model, images, labels, loss, 4, f"modulo_shard(mp=2,{options})", global_batch=8)
    sent = [op for op in wire(program.program, 1) if op.payload.name.startswith("cut") and op.algorithm != "all_reduce"]
    dtypes = {(str(op.algorithm), op.dtype) for op in sent}
    assert dtypes == {("all_gather", torch.bfloat16), ("reduce_scatter", torch.float32)}, dtypes
    assert_defined(program, (images, labels))
    done = program.verify()
    assert 1e-5 < done.gradient_error < 1e-2, str(done)
    assert program.verify(dtype=torch.float64).holds
"""


def test_the_patch_touches_the_table_the_runtime_the_wire_and_a_price() -> None:
    assert touched(PATCH) == [
        "passes/planner/moves.py",
        "splitc/ir/wire.py",
        "splitc/runtime/collectives/layouts.py",
        "splitc/runtime/collectives/model_parallel.py",
    ]


@pytest.mark.slow
def test_a_transition_of_another_dtype_on_the_wire_is_sent_and_counted(tmp_path: Path) -> None:
    run_patched(PATCH, COUNT, tmp_path)
