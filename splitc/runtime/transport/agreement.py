"""What all ranks must have alike, compared before anything depends on it: a difference is an error, not a wait."""

from __future__ import annotations

import hashlib
import platform
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import LaunchError
from .base import Transport


def require_equal(
    transport: Transport, settings: Mapping[str, Any], remedy: str = "give the same to every rank"
) -> None:
    """Raise LaunchError, on every rank, when ranks have different values of a setting.  Collective.

    It lists all such settings.  What a rank does not have is not compared.
    """
    hosts, found = zip(*transport.all_gather_objects((socket.gethostname(), dict(settings))), strict=True)
    problems = []
    for name in dict.fromkeys(name for each in found for name in each):
        values: dict[str, str] = {}  # a value, and the first rank that has it
        for rank, each in enumerate(found):
            where = f"rank {rank} ({hosts[rank]})" if len(set(hosts)) > 1 else f"rank {rank}"
            if name in each:
                values.setdefault(repr(each[name]), where)
        if len(values) > 1:
            problems.append(f"the ranks must agree on {name}: " + ", ".join(f"{r} has {v}" for v, r in values.items()))
    if problems:
        more = [f"and {len(problems) - 4} more"] if len(problems) > 4 else []
        raise LaunchError("\n  ".join([*problems[:4], *more]) + f"; {remedy}")


@cache
def versions() -> dict[str, str]:
    """Of Python and torch, and a digest of this runtime's code, which copies of a build may hold."""
    python = ".".join(platform.python_version_tuple()[:2])
    code = digest(*(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))))
    return {"Python's version": python, "torch's version": str(torch.__version__), "the code of splitc.runtime": code}


def digest(*contents: bytes) -> str:
    """Eight hexadecimal digits of what files hold."""
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:8]
