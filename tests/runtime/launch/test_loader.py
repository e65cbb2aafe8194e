"""Generated files as modules: whose copy each rank gets, and what stays behind in the interpreter."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from splitc.errors import LaunchError
from splitc.runtime.launch.loader import load_rank, of_rank_0
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.simulated import SimulatedTransport, run_ranks

FILES = {
    "conv.py": "state = []\n\ndef fail():\n    raise ValueError('here')  # the line\n",
    "rank0.py": "from conv import fail, state\nindex = 0\n",
    "rank1.py": "from conv import fail, state\nindex = 1\n",
    "plan.json": "{}",
}


def written(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("from_folder", [False, True])
def test_every_rank_gets_its_own_copy_of_the_role(from_folder: bool, tmp_path: Path) -> None:
    source = written(tmp_path) if from_folder else FILES
    first, second, again = (load_rank(source, rank) for rank in (0, 1, 0))
    assert (first.index, second.index, again.index) == (0, 1, 0)
    first.state.append(1)
    assert second.state == again.state == []
    assert not {"rank0", "rank1", "conv"} & sys.modules.keys()


def test_loading_leaves_the_interpreters_modules_and_finders_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("conv")
    monkeypatch.setitem(sys.modules, "conv", mine)
    modules, finders, paths = dict(sys.modules), list(sys.meta_path), list(sys.path)
    assert load_rank(FILES, 0).state == []
    assert sys.modules == modules
    assert sys.modules["conv"] is mine
    assert (sys.meta_path, sys.path) == (finders, paths)


def test_a_file_that_fails_leaves_nothing_behind_either() -> None:
    modules, finders = dict(sys.modules), list(sys.meta_path)
    with pytest.raises(ZeroDivisionError):
        load_rank({**FILES, "conv.py": "1 / 0"}, 0)
    assert (sys.modules, sys.meta_path) == (modules, finders)


def test_a_traceback_shows_the_generated_line() -> None:
    with pytest.raises(ValueError, match="here") as caught:
        load_rank(FILES, 0).fail()
    text = "".join(traceback.format_exception(caught.value))
    assert '"<generated conv.py>", line 4, in fail' in text
    assert "# the line" in text


def test_a_traceback_into_a_folder_names_the_file_that_one_would_edit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="here") as caught:
        load_rank(written(tmp_path), 0).fail()
    assert f'"{tmp_path.resolve() / "conv.py"}", line 4' in "".join(traceback.format_exception(caught.value))


@pytest.mark.slow
def test_ranks_may_load_at_the_same_time() -> None:
    """Two builds whose modules have the same names; the first one takes its time."""
    builds = {name: {"rank0.py": f"import time\ntime.sleep(0.1)\nname = {name!r}\n"} for name in ("a", "b", "c")}
    loaded: dict[str, str] = {}

    def load(name: str) -> None:
        loaded[name] = load_rank(builds[name], 0).name

    threads = [threading.Thread(target=load, args=(name,)) for name in builds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == {name: name for name in builds}


def test_ranks_on_nccl_wait_for_rank_0s_compiling_on_a_group_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog ends processes that wait for long in one of its own collectives."""
    waited: list[int] = []

    class Side(SimulatedTransport):
        def all_gather_objects(self, value: object) -> list[object]:
            waited.append(self.rank)
            return super().all_gather_objects(value)

    def side_group(transport: SimulatedTransport) -> Side:
        return Side(transport._mailbox, transport.rank)

    def compiled() -> tuple[dict[str, str], list[dict[str, Tensor]]]:
        raise LaunchError("it cannot")

    def rank(transport: Transport) -> str:
        with pytest.raises(LaunchError) as caught:
            of_rank_0(transport, compiled)
        return str(caught.value)[-9:]

    assert run_ranks(2, rank) == ["it cannot"] * 2 and not waited
    monkeypatch.setattr(SimulatedTransport, "waits_hold_the_stream", True)
    monkeypatch.setattr(SimulatedTransport, "side_group", side_group)
    assert run_ranks(2, rank) == ["it cannot"] * 2 and sorted(waited) == [0, 1]
