"""What tests of commands share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.command import NET


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a model file, in which the command runs; what it imports is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("net", "package", "package.net"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "net.py").write_text(NET)
