"""Ranks that meet before they wait for each other: the refusal of one is raised on all, and the next program is met."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import HashStore

from splitc.errors import CaptureError, LaunchError
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.meeting import Call, Meeting, described
from splitc.runtime.transport.simulated import run_ranks
from tests import ROOT

Step = Callable[[Meeting], None]


def called(number: int, model: str = "Net 1") -> Call:
    return Call(number, {"the model": model})


def refuse(call: Call) -> Step:
    return lambda meeting: meeting.tell(call, CaptureError("bad line"))


def meet(call: Call) -> Step:
    return lambda meeting: meeting.meet(call)


def on_meetings(*steps: list[Step]) -> list[list[str]]:
    """What each rank raised in each of its steps; "" where it met the others."""
    store = HashStore()

    def run(transport: Transport) -> list[str]:
        meeting, found = Meeting(store, transport.rank, transport.world, 20.0), list[str]()
        for step in steps[transport.rank]:
            try:
                step(meeting)
                found.append("")
            except (CaptureError, LaunchError) as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    return run_ranks(len(steps), run)


TOLD = "CaptureError: rank {} could not compile the program: CaptureError: bad line"


def test_what_one_rank_refuses_is_raised_on_all_and_the_next_program_is_met() -> None:
    goes_on = [meet(called(1)), meet(called(2)), meet(called(3))]
    found = on_meetings(goes_on, [refuse(called(1)), refuse(called(2)), meet(called(3))], goes_on)
    assert found == [[TOLD.format(1)] * 2 + [""], [""] * 3, [TOLD.format(1)] * 2 + [""]]


def test_ranks_that_refuse_by_turns_stay_together() -> None:
    first = [refuse(called(1)), meet(called(2)), meet(called(3))]
    second = [meet(called(1)), refuse(called(2)), meet(called(3))]
    assert on_meetings(first, second) == [["", TOLD.format(1), ""], [TOLD.format(0), "", ""]]


def test_a_refusal_before_the_model_is_known_counts() -> None:
    found = on_meetings([meet(called(1)), meet(called(2))], [refuse(Call(1)), meet(called(2))])
    assert found == [[TOLD.format(1), ""], ["", ""]]


def test_what_one_rank_compiles_for_itself_concerns_no_other() -> None:
    alone = [refuse(called(1, "Other 2")), meet(called(2)), meet(called(3))]
    assert on_meetings(alone, [meet(called(1)), meet(called(2))]) == [[""] * 3, [""] * 2]


def test_ranks_that_come_with_different_models_are_refused_by_name() -> None:
    found = on_meetings([meet(called(1)), meet(called(2))], [meet(called(1, "Net 2")), meet(called(2))])
    text = "LaunchError: the ranks must agree on the model: rank 0 has 'Net 1', rank 1 has 'Net 2'; compile the same on"
    assert all(each[0].startswith(text) and each[1] == "" for each in found)


def test_a_digest_is_of_structure_and_not_of_weights() -> None:
    assert described(nn.Linear(2, 3)) == described(nn.Linear(2, 3)) != described(nn.Linear(3, 2))
    assert described(nn.Linear(2, 3)) != described(nn.Linear(2, 3).requires_grad_(False))
    assert described([F.mse_loss, nn.MSELoss()]).startswith("mse_loss ") and described(partial(F.mse_loss)) != ""
    assert described(nn.LazyLinear(2)).startswith("LazyLinear ")


SCRIPT = """
import os, torch, splitc
from torch import nn
rank = int(os.environ["RANK"])
def net(width):
    if rank == 1 and width == 5: raise OSError("no file here")
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
def sgd(params):
    if rank == 1 and width == 7: raise KeyError("no such parameter")
    return torch.optim.SGD(params, lr=0.1)
loss, batch = nn.functional.cross_entropy, (torch.randn(4, 6), torch.randint(0, 3, (4,)))
for width in (4, 5, 6, 7, 8, 9, 10):
    torch.manual_seed(width)
    memory = 10.0 if width in (6, 10) else None
    given = dict(strategy="data_parallel", cluster="v100-10gbe", memory=memory)
    try:
        program = splitc.compile(lambda: net(width + (rank if width == 8 else 0)), 2, *batch, loss, **given)
        said = float(program.worker(sgd).step(*batch))
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    os.write(1, f"{rank} {width} {said}\\n".encode())
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_that_catches_refusals_goes_on_with_the_same_model_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "loop.py")], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    first, second = ({int(width): said for own, width, said in lines if own == rank} for rank in "01")
    assert len(first) == len(second) == 7
    for width in (4, 9):
        assert float(first[width]) == float(second[width]) > 0
    assert first[5] == "LaunchError: rank 1 could not compile the program: OSError: no file here"
    assert first[7] == "LaunchError: rank 1 could not make its optimizer: KeyError: 'no such parameter'"
    assert second[5] == "OSError: no file here" and second[7] == "KeyError: 'no such parameter'"
    for width in (6, 10):
        assert first[width].startswith("PlacementError: data_parallel is not possible")
        assert second[width].startswith("PlacementError: rank 0 could not compile the program: PlacementError: data_")
    assert first[8] == second[8] and "the ranks must agree on the model: rank 0 has 'Sequential " in first[8]
