"""Simulated ranks that are late at random, so that what happens first differs from run to run."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from splitc.runtime.transport.mailbox import Mailbox


@contextmanager
def delays(seed: int, most: float = 2e-3) -> Iterator[None]:
    """Let every simulated rank sleep up to `most` seconds before one in four of its sends, receives and collectives."""
    methods = {name: _late(getattr(Mailbox, name), seed, most) for name in ("put", "expect", "join")}
    with patch.multiple(Mailbox, **methods):
        yield


def _late(method: Any, seed: int, most: float) -> Any:
    drawn: dict[int, random.Random] = {}

    def late(mailbox: Mailbox, rank: int, *given: Any) -> Any:
        own = drawn.setdefault(rank, random.Random(f"{seed} {rank} {method.__name__}"))
        if own.random() < 0.25:
            time.sleep(most * own.random())
        return method(mailbox, rank, *given)

    return late
