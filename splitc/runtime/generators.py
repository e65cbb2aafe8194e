"""The generators of Python, numpy and torch, which are of the process: seeded for a while, and given back."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOCK = threading.RLock()  # simulated ranks are threads


@contextmanager
def seeded_generators(*key: Any) -> Iterator[None]:
    """Let the generators of Python, numpy and torch draw the same wherever `key` is the same, and restore them.

    They are of the process; one thread at a time has them.
    """
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "big")
    with _LOCK, same_generators():
        random.seed(seed)
        for generator in _of_torch():
            generator.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
        yield


@contextmanager
def same_generators() -> Iterator[None]:
    """Give the generators of Python, numpy and torch back as they were."""
    numpy = sys.modules.get("numpy")
    before, of_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    states = [(generator, generator.get_state()) for generator in _of_torch()]
    try:
        yield
    finally:
        random.setstate(before)
        for generator, state in states:
            generator.set_state(state)
        if numpy:
            numpy.random.set_state(of_numpy)


def _of_torch() -> list[torch.Generator]:
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
