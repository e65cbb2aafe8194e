"""What a rank says that it does: the worker's method, the line of the build, and the user's lines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitc.runtime.hangs import state
from splitc.runtime.hangs.state import where
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.live import Waits
from splitc.runtime.transport.torch_transport import TorchTransport

WORKER = """
def save(wait):
    _inside(wait)

def _inside(wait):
    wait()
"""
BUILD = {"rank0.py": "def step(save, wait):\n    save(lambda: wait(1))  # of layer fc\n"}


def seen(run: Callable[[Callable[..., None]], Any], program: object = None) -> tuple[str, str, tuple[str, ...]]:
    """What is seen of a thread that is in `run`, which calls what it is given."""
    inside, over = threading.Event(), threading.Event()

    def wait(*_: int) -> None:
        inside.set()
        over.wait(60.0)

    thread = threading.Thread(target=run, args=(wait,), daemon=True)
    thread.start()
    assert inside.wait(60.0) and thread.ident is not None
    found = where(thread.ident, program)
    over.set()
    return found


def test_the_method_of_the_worker_and_the_innermost_line_of_the_build_are_told() -> None:
    worker: dict[str, Any] = {}
    exec(compile(WORKER, state._WORKER[0], "exec"), worker)
    program = load_rank(BUILD, 0)
    doing, line, own = seen(lambda wait: program.step(worker["save"], wait), program)
    assert doing == "save"
    assert line == "rank0.py, line 2: save(lambda: wait(1)) # of layer fc"
    assert [each.partition(":")[0].partition(", in ")[2] for each in own] == ["wait", "<lambda>"]


def test_of_the_users_code_the_innermost_lines_are_told_without_those_of_libraries() -> None:
    def deep(wait: Callable[..., None], times: int) -> Any:
        if times:
            sorted([1], key=lambda _: str(deep(wait, times - 1)))
        else:
            wait()

    doing, line, own = seen(lambda wait: deep(wait, 9))
    assert (doing, line) == ("", "") and len(own) == 4
    assert own[0].startswith("test_state.py, line ") and own[0].endswith(", in wait: over.wait(60.0)")
    assert not any("threading.py" in each for each in own)


def test_a_transport_notes_the_operation_that_it_is_in_on_nccl_the_last_one_while_the_stream_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = object.__new__(TorchTransport)
    transport.waits, transport._gpu = Waits(), None
    with transport.losing_peers("barrier", (0, 1)):
        assert transport.waits.now[:2] == ("barrier", (0, 1)) and transport.is_blocked()
    assert transport.waits.now[:2] == ("", ()) and not transport.is_blocked()
    transport._gpu, transport.device, idle = torch.device("cuda", 0), torch.device("cuda", 0), [False, True]
    stream = SimpleNamespace(query=lambda: idle.pop(0))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    with transport.losing_peers("all_reduce", (0, 1)):
        pass
    assert transport.waits.now[:2] == ("all_reduce", (0, 1))
    assert transport.is_blocked() and not transport.is_blocked()
