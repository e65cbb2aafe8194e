"""Build folders: the same bytes for the same program, and nothing of anybody else's is lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from splitc.cli.plan_file import read_plan_file
from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.launch.main import load_weights
from tests.support.ranks import Net, assert_same, compile_net


@cache
def program(seed: int = 0) -> CompiledProgram:
    torch.manual_seed(seed)
    return compile_net(Net())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_same_program_is_the_same_bytes_in_every_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    again = compile_net(Net())
    first, second = (contents(each.save(tmp_path / name, True)) for name, each in (("a", program()), ("b", again)))
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_a_build_holds_the_program_its_plan_and_its_weights(tmp_path: Path) -> None:
    folder = program().save(tmp_path / "new" / "build")
    assert set(contents(folder)) == {*program().files, "figures.json", "timeline.json", "weights.pt"}
    assert read_plan_file(folder / "plan.json") == program().plan
    weights, keys = load_weights(folder)
    model = program()._model
    assert list(keys) == list(model.state_dict())
    assert_same({key: weights[key] for key in keys}, model.state_dict(), tolerance=0.0)
    for rank in range(3):
        assert load_rank(folder, rank).rank.index == rank


def test_an_earlier_build_is_replaced_and_leaves_no_file_behind(tmp_path: Path) -> None:
    compile_net(Net(), "data_parallel", 4).save(tmp_path, standalone=True)
    program().save(tmp_path)
    assert set(contents(tmp_path)) == {*program().files, "figures.json", "timeline.json", "weights.pt"}
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "conv.cpython-311.pyc").write_bytes(b"old")
    program().save(tmp_path)
    assert set(contents(tmp_path)) == {*program().files, "figures.json", "timeline.json", "weights.pt"}


def add_notes(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def add_a_module_of_mine(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "rank0.py").write_text("mine")


def edit_a_role(folder: Path) -> None:
    with (folder / "conv.py").open("a") as file:
        file.write("# mine\n")


def edit_the_runtime(folder: Path) -> None:
    with (folder / "splitc" / "runtime" / "rank.py").open("a") as file:
        file.write("# mine\n")


def replace_a_role_by_bytes(folder: Path) -> None:
    (folder / "fc.py").write_bytes(b"\xff\xfe")


def lose_the_weights(folder: Path) -> None:
    (folder / "weights.pt").unlink()


CHANGES = [
    (add_notes, "notes.txt was not written by splitc"),
    (add_a_module_of_mine, "data/rank0.py was not written by splitc"),
    (edit_a_role, "conv.py was edited"),
    (edit_the_runtime, "splitc/runtime/rank.py was edited"),
    (replace_a_role_by_bytes, "fc.py was edited"),
    (lose_the_weights, "lost its weights.pt"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES)
def test_a_folder_with_something_of_somebody_elses_is_left_exactly_as_it_is(
    change: Callable[[Path], None], text: str, tmp_path: Path
) -> None:
    program().save(tmp_path, standalone=True)
    change(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(LaunchError, match=text):
        program(1).save(tmp_path)
    assert contents(tmp_path) == before


def test_all_that_is_not_ours_is_listed_at_once(tmp_path: Path) -> None:
    program().save(tmp_path)
    add_notes(tmp_path)
    edit_a_role(tmp_path)
    with pytest.raises(LaunchError, match=r"(?s)conv\.py was edited.*notes\.txt was not written"):
        program().save(tmp_path)


def test_a_folder_that_is_no_build_is_refused(tmp_path: Path) -> None:
    add_notes(tmp_path)
    with pytest.raises(LaunchError, match="is not empty and is no build of splitc"):
        program().save(tmp_path)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "build").write_text("mine")
    with pytest.raises(LaunchError, match="is a file; give a folder"):
        program().save(tmp_path / "build")
    assert (tmp_path / "build").read_text() == "mine"


@pytest.mark.parametrize(
    ("damage", "text"), [(None, "is missing beside launch.py"), ({"x": 1}, "is not what splitc wrote")]
)
def test_weights_that_are_missing_or_not_ours_are_refused(damage: object, text: str, tmp_path: Path) -> None:
    if damage is not None:
        torch.save(damage, tmp_path / "weights.pt")
    with pytest.raises(LaunchError, match=text):
        load_weights(tmp_path)


@pytest.mark.slow
def test_a_standalone_build_loads_its_own_runtime_and_nothing_else_of_splitc(tmp_path: Path) -> None:
    """In a process that has torch, but no splitc to import besides the copy."""
    folder = program().save(tmp_path / "build", standalone=True)
    code = (
        "import sys, rank0, splitc, splitc.runtime.launch.main, splitc.runtime.transport.simulated\n"
        "from pathlib import Path\n"
        "print(Path(splitc.__file__).parent)\n"
        "print(sorted(n for n in sys.modules if n.startswith('splitc.') and not n.startswith('splitc.runtime')))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str((folder / "splitc").resolve()), "[]"]


def break_off(error: BaseException) -> Callable[..., None]:
    def save(*_: object) -> None:
        raise error

    return save


STOPS = [
    (KeyboardInterrupt(), "^$", True),
    (OSError(errno.ENOSPC, "No space left on device"), r"build, which needs [\d.]+ kB: No space left on device", True),
    (RuntimeError("PytorchStreamWriter failed writing file data/0"), "failed writing file", False),
]


@pytest.mark.parametrize(("error", "text", "earlier"), STOPS, ids=["ctrl-c", "full disk", "torch's writer"])
def test_what_breaks_off_while_a_build_is_written_leaves_the_earlier_one_or_none(
    error: BaseException, text: str, earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "build"
    if earlier:
        program().save(folder)
    before = contents(tmp_path)
    monkeypatch.setattr(torch, "save", break_off(error))
    with pytest.raises(KeyboardInterrupt if text == "^$" else LaunchError, match=text):
        program(1).save(folder)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["build"] * earlier


def test_an_earlier_build_is_back_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = program().save(tmp_path / "build")
    before, rename = contents(tmp_path), Path.rename

    def refuse_the_new(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new)
    with pytest.raises(LaunchError, match="Operation not permitted; what was there is left as it was"):
        program(1).save(folder)
    assert contents(tmp_path) == before


def test_a_disk_without_room_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(LaunchError, match=r"cannot write .*build, which needs .* kB: the disk is full, it has 1.00 kB"):
        program().save(tmp_path / "build")
    assert contents(tmp_path) == {}


def test_what_a_killed_process_left_aside_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".build.partial" / "new"
    left.mkdir(parents=True)
    (left / "conv.py").write_text("half")
    folder = program().save(tmp_path / "build")
    assert [path.name for path in tmp_path.iterdir()] == ["build"]
    assert set(contents(folder)) == {*program().files, "figures.json", "timeline.json", "weights.pt"}


def test_the_working_directory_is_refused_since_a_build_takes_its_folders_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        LaunchError, match=r"is the working directory, and a build .* give a folder inside it: -o build"
    ):
        program().save(".")
