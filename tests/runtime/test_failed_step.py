"""Where a step failed."""

from __future__ import annotations

import types

import pytest

from splitc.runtime.failed_step import failed_step
from splitc.runtime.launch.loader import load_rank

FILES = {
    "rank0.py": "from conv import step\n",
    "conv.py": 'def step(wait):\n    first = wait()\n    return first  # "here"\n',
}


def lose() -> None:
    raise RuntimeError("a peer is gone")


def test_the_step_and_the_line_of_the_generated_file_are_noted() -> None:
    program = load_rank(FILES, 0)
    with pytest.raises(RuntimeError) as caught, failed_step(program, 12):
        program.step(lose)
    assert caught.value.__notes__ == ["in step 12, conv.py, line 2: first = wait()"]


def test_an_error_outside_the_build_has_its_step() -> None:
    with pytest.raises(RuntimeError) as caught, failed_step(types.ModuleType("own"), 3):
        lose()
    assert caught.value.__notes__ == ["in step 3"]
