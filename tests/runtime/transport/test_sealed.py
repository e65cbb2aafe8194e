"""Ranks read from their store only what a process with the token of their run wrote there."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from splitc.errors import LaunchError
from splitc.runtime.transport.devices import Seat
from splitc.runtime.transport.distributed import _told
from splitc.runtime.transport.meeting import Call, Meeting
from splitc.runtime.transport.sealed import opened, sealed


class Runs:
    """Calls something where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-stranger",)


def test_a_value_is_read_by_who_has_the_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, other in (("SPLITC_TOKEN", "b"), ("TORCHELASTIC_RUN_ID", "c")):
        monkeypatch.setenv(name, "a")
        message = sealed({"rank": 1})
        assert opened(message) == {"rank": 1}
        for changed in (message[:-1], message[1:], b"", bytes(64), message[:32] + pickle.dumps(Runs())):
            with pytest.raises(LaunchError, match="a process that is not of this run has met its ranks"):
                opened(changed)
        monkeypatch.setenv(name, other)
        with pytest.raises(LaunchError, match="all its ranks the same token"):
            opened(message)
        monkeypatch.delenv(name)


def test_what_a_stranger_puts_into_the_store_is_not_unpickled(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPLITC_TOKEN", "of this run")
    store: Any = HashStore()
    for key in ("1", "splitc/1/0"):
        store.set(key, pickle.dumps(Runs()))
    with pytest.raises(LaunchError, match="not of this run"):
        _told(store, 0, 2, Seat("host", "cpu", None, 0, None))
    with pytest.raises(LaunchError, match="not of this run"):
        Meeting(store, 0, 2, 1.0).meet(Call(1))
    assert not [*tmp_path.iterdir()]
