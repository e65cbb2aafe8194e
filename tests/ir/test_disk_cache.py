"""Analyses on disk: whole files or none, of this splitc and this torch, within a limit, never code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splitc.ir import disk_cache
from splitc.ir.disk_cache import cache_folder, digest_of, keep, recall


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPLITC_CACHE", str(tmp_path))
    return tmp_path / "analysis"


def test_what_was_kept_is_recalled_under_its_kind_and_key_alone(folder: Path) -> None:
    keep("costs", "1", {"fc": [1, 2.5]})
    assert recall("costs", "1") == {"fc": [1, 2.5]}
    assert recall("costs", "2") is None and recall("plan", "1") is None
    (folder / "costs-1.json").rename(folder / "costs-2.json")
    assert recall("costs", "2") is None


def test_a_file_of_something_else_is_none(folder: Path) -> None:
    for text in ["", "no checksum", "\n{}", "\x00\xff", '{"fc": [1, 2.5]}']:
        keep("costs", "1", {"fc": [1, 2.5]})
        path = folder / "costs-1.json"
        path.write_text(path.read_text()[:-1])
        assert recall("costs", "1") is None, text
        path.write_bytes(text.encode("latin-1"))
        assert recall("costs", "1") is None, text


def test_the_oldest_go_when_there_is_too_much(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_LIMIT", 3_000)
    for k in range(5):
        keep("costs", str(k), "x" * 1000)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_000
    assert recall("costs", "0") is None and recall("costs", "4") == "x" * 1000


def test_off_keeps_and_recalls_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep("costs", "1", 1)
    monkeypatch.setenv("SPLITC_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    keep("costs", "2", 2)
    assert recall("costs", "1") is None and [path.name for path in folder.iterdir()] == ["costs-1.json"]
    assert cache_folder() == folder.parent / "splitc"


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPLITC_CACHE", str(tmp_path / "file"))
    keep("costs", "1", 1)
    assert recall("costs", "1") is None


def test_a_key_changes_with_torch_and_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of("graph")
    assert digest_of("graph") == before != digest_of("graph2")
    with torch.device("meta"):
        assert digest_of("graph") != before
    monkeypatch.setattr(torch, "__version__", "99.0")
    disk_cache._versions.cache_clear()
    assert digest_of("graph") != before
    monkeypatch.undo()
    disk_cache._versions.cache_clear()
