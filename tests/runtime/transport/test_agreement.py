"""What ranks must have alike."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from splitc.errors import LaunchError
from splitc.runtime.transport.agreement import require_equal, versions
from splitc.runtime.transport.base import Transport
from tests.support.ranks import on_ranks


def refusal(settings: list[dict[str, Any]]) -> str:
    """What every rank is told."""

    def run(transport: Transport) -> str:
        with pytest.raises(LaunchError) as caught:
            require_equal(transport, settings[transport.rank], "do this")
        return str(caught.value)

    texts = on_ranks(len(settings), run)
    assert len(set(texts)) == 1
    return texts[0]


def test_all_differences_are_listed_with_the_first_rank_that_has_each_value() -> None:
    text = refusal([{"seed": 0, "plan": "a", "same": 1}, {"seed": 0, "plan": "b", "same": 1}, {"seed": 7, "plan": "a"}])
    assert text == (
        "the ranks must agree on seed: rank 0 has 0, rank 2 has 7\n"
        "  the ranks must agree on plan: rank 0 has 'a', rank 1 has 'b'; do this"
    )


def test_ranks_on_several_hosts_are_named_with_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["here", "there"])
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    text = refusal([{"x": 1}, {"x": 2}])
    assert sorted(word for word in text.replace("(", " ").replace(")", " ").split() if word.endswith("here")) == [
        "here",
        "there",
    ]


def test_a_long_list_is_cut() -> None:
    text = refusal([{f"{k}.py": rank for k in range(9)} for rank in range(2)])
    assert text.splitlines()[-1] == "  and 5 more; do this"
    assert len(text.splitlines()) == 5


def test_equal_settings_and_versions_pass() -> None:
    on_ranks(2, lambda transport: require_equal(transport, {"a": 1, **versions()}))
    assert set(versions()) == {"Python's version", "torch's version", "the code of splitc.runtime"}
