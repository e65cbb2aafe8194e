"""A further wire format is a row of one table: it is sent, counted, priced, asked for and verified by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.patched import run_patched, touched

PATCH = Path(__file__).parent / "e5m2.patch"

COUNT = """
from splitc.ir.short_wire import parse_wire
from splitc.ir.wire import wire
from tests.support.every_strategy import images, planned
from tests.support.wire_bytes import assert_defined

for strategy in ("data_parallel", "layer_separation(n_c=1, n_f=1)", "late_multiply", "parameter_server"):
    program = planned(2, strategy, global_batch=64, wire=parse_wire("e5m2"))
    assert sum(sum(op.cast) for op in wire(program.program, 0) if op.form == "e5m2") > 0
    assert_defined(program, images(64))
    done = program.verify(steps=2, examples=64)
    assert done.bounded and 1e-3 < done.gradient_error, str(done)
"""


def test_the_patch_touches_the_table() -> None:
    assert touched(PATCH) == ["splitc/runtime/transport/formats.py"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_format_of_the_table_is_sent_counted_and_priced(tmp_path: Path) -> None:
    run_patched(PATCH, COUNT, tmp_path)
