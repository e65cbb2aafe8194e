"""Reading a checkpoint runs nothing that is in it, and reads and writes nothing outside of its folder."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from splitc.errors import LaunchError
from splitc.runtime.checkpoints.manifest import MANIFEST, Manifest, checksum
from splitc.runtime.checkpoints.metadata import read_metadata
from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_damage import program, written
from tests.support.ranks import adam, on_workers
from tests.support.run_state import run_state


class Runs:
    """An object whose pickle calls something."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call = call, arguments

    def __reduce__(self) -> Any:
        return self.call


def plant(value: Any, path: Path) -> Path:
    """Write a pickle as the `.metadata` of a checkpoint, and its checksum."""
    (path / ".metadata").write_bytes(pickle.dumps(value))
    if (found := Manifest.of(path)) is not None:
        Manifest(found.run, found.start, {**found.files, ".metadata": checksum(path / ".metadata")}).write(path)
    return path / ".metadata"


def test_a_planted_call_is_refused_on_every_rank_and_nothing_changes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    written("data_parallel", lambda rank: run)
    plant(Metadata({}, Runs(os.mkdir, str(tmp_path / "made"))), run / "step-000002")

    def refused(worker: Worker) -> str:
        before = run_state(worker)
        with pytest.raises(LaunchError) as caught:
            worker.resume(run)
        assert str(run_state(worker)) == str(before)
        return str(caught.value)

    (text,) = set(on_workers(program("data_parallel"), refused, optimizer=adam))
    assert "it asks for posix.mkdir, which describes no tensor; nothing was run" in text
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "call", [os.system, eval, exec, getattr, torch.load, torch.hub.load, partial, __import__, Path.unlink]
)
def test_nothing_but_descriptions_of_tensors_is_made(call: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no description of a checkpoint"):
        read_metadata(plant(Metadata({}, Runs(call, "print(1)")), tmp_path))


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/b", "..", "", 3])
def test_tensors_are_read_from_files_of_the_checkpoint_alone(name: Any, tmp_path: Path) -> None:
    there = {MetadataIndex("model.weight"): _StorageInfo(name, 0, 1)}
    with pytest.raises(ValueError, match=r"has tensors in .*, outside the checkpoint"):
        read_metadata(plant(Metadata({}, storage_data=there), tmp_path))


@pytest.mark.parametrize("files", [{"../other": 1}, {"/etc/passwd": 1}, {"": 1}, ["a"], None, 3])
def test_a_manifest_that_names_other_files_is_of_no_checkpoint(files: Any, tmp_path: Path) -> None:
    text = json.dumps({"run": "run", "start": "start", "files": files})
    (tmp_path / MANIFEST).write_text(f"{zlib.crc32(text.encode()):08x} {text}")
    assert Manifest.of(tmp_path) is None
