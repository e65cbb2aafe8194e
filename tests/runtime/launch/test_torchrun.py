"""What is kept of torchrun's output."""

from __future__ import annotations

import pytest

from splitc.runtime.launch.torchrun import Ends, of_ranks
from tests.support.sampling import in_one

API = "torch/distributed/elastic/multiprocessing/api.py"
FAILED = """\
[W1123 05:37:02.617152207 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3
W1123 05:37:02.000000 1 torch/distributed/run.py:852] Setting OMP_NUM_THREADS environment variable
error: give --steps 4 or more
W1123 05:37:44.000000 1 {api}:1028] Sending process 2 closing signal SIGTERM
E1123 05:37:44.047000 1 {api}:1002] failed (exitcode: {code}) local_rank: 1 (pid: 3) of binary: python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
launch.py FAILED
"""


@in_one
@pytest.mark.parametrize(
    ("code", "more"),
    [
        (1, []),
        (3, []),
        (4, ["local rank 1 ended with exit status 4\n"]),
        (-9, ["local rank 1 was ended by SIGKILL (of the kernel, when memory runs out)\n"]),
        (-11, ["local rank 1 was ended by SIGSEGV\n"]),
    ],
)
def test_what_torchrun_says_of_a_failure_is_left_out(code: int, more: list[str]) -> None:
    lines = iter(FAILED.format(api=API, code=code).splitlines(keepends=True))
    ends = Ends()
    assert list(of_ranks(lines, ends)) == ["error: give --steps 4 or more\n", *more]
    assert next(lines, None) is None  # all were read
    assert ends == Ends(final=code == 3)


def test_other_lines_stay_as_they_are() -> None:
    lines = [
        "Traceback (most recent call last):\n",
        "  File\n",
        "ValueError: x\n",
        "50%|##   |\r",
        "W is a letter\n",
        "Traceback (\n",
    ]
    assert list(of_ranks(lines, Ends())) == lines


def test_ranks_that_stopped_for_a_signal_have_done_what_they_should_though_torchrun_fails() -> None:
    ends, line = Ends(), "stopped by SIGTERM after step 120; goes on: splitc run build --resume\n"
    lines = [
        line,
        "W1123 05:37:44.000000 1 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal\n",
    ]
    lines += ["Traceback (most recent call last):\n", '  File "<frozen runpy>", line 198, in _run_module_as_main\n']
    lines += ["torch.distributed.elastic.multiprocessing.api.SignalException: Process 2 got signal: 15\n"]
    assert list(of_ranks(iter(lines), ends)) == [line]
    assert list(of_ranks([line], Ends(asked="SIGINT"))) == [line.replace("SIGTERM", "SIGINT")]
    assert [ends.code(1), Ends().code(1), Ends(final=True).code(1), Ends().code(0)] == [0, 1, 3, 0]
