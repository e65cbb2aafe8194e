"""The features of training that a core without them does not need, by name.

Each is a folder, or a module, of this name in every room that has a part of it; without its line here and these it is
gone.  The runtime, which builds bring along, has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

FEATURES = (
    "servers",
    "subnets",
    "rounds",
)  # fmt: skip


def parts(room: str, part: str) -> Iterator[Any]:
    """The module of this name of every feature that has one in a room."""
    for name in FEATURES:
        if find_spec(f"{room}.{name}") is not None and find_spec(module := f"{room}.{name}.{part}") is not None:
            yield import_module(module)
