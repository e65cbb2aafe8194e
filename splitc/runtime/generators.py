"""The generators of Python, numpy and torch, which are of the process: seeded for a while, and given back."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections.abc import Iterator, Mapping
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
        torch.default_generator.manual_seed(seed)
        for generator in _of_gpus():
            generator.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
        yield


@contextmanager
def same_generators() -> Iterator[None]:
    """Give the generators of Python, numpy and torch back as they were."""
    before, states = random_state(), [(generator, generator.get_state()) for generator in _of_gpus()]
    try:
        yield
    finally:
        set_random_state(before)
        for generator, state in states:
            generator.set_state(state)


def random_state() -> dict[str, Any]:
    """The state of the process's generators, and of its GPU's, on which a dataset's own random numbers may depend."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        found["numpy"] = _plain(numpy.random.get_state(legacy=False))
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set what `random_state` returned; what it has of a GPU, or has not, where both runs compute on one."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_initialized() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    version, words, normal = state["python"]
    random.setstate((version, tuple(_plain(words)), normal))  # tensors in earlier checkpoints, and numpy's in a list
    if (numpy := sys.modules.get("numpy")) and "numpy" in state:
        given = state["numpy"]
        numpy.random.set_state(given if isinstance(given, dict) else (given[0], _plain(given[1]), *given[2:]))


def _plain(value: Any) -> Any:
    """A part of a state without arrays and tensors."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _of_gpus() -> tuple[torch.Generator, ...]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()
