"""What all ranks must have alike, compared before anything depends on it: a difference is an error, not a wait."""

from __future__ import annotations

import hashlib
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import LaunchError, SplitcError
from .base import Transport


def require_equal(
    transport: Transport, settings: Mapping[str, Any], remedy: str = "give the same to every rank"
) -> None:
    """Raise LaunchError, on every rank, when ranks have different values of a setting.  Collective.

    It lists all such settings.  What a rank does not have is not compared.
    """
    hosts, found = zip(*transport.all_gather_objects((socket.gethostname(), dict(settings))), strict=True)
    several = len(set(hosts)) > 1
    names = [f"rank {rank} ({host})" if several else f"rank {rank}" for rank, host in enumerate(hosts)]
    require_same(dict(zip(names, found, strict=True)), remedy)


def require_same(found: Mapping[str, Mapping[str, Any]], remedy: str) -> None:
    """Raise LaunchError when ranks have different values of a setting.  found: what each rank has, by its name."""
    problems = []
    for name in dict.fromkeys(name for each in found.values() for name in each):
        values: dict[str, str] = {}  # a value, and the first rank that has it
        for rank, each in found.items():
            if name in each:
                values.setdefault(repr(each[name]), rank)
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


def told(rank: int, doing: str, error: Exception) -> SplitcError:
    """What other ranks raise where a rank raised `error`: of the same class, where it is one of splitc."""
    kind = type(error) if isinstance(error, SplitcError) else LaunchError
    return kind(f"rank {rank} could not {doing}: {type(error).__name__}: {error}")


@contextmanager
def agreed(transport: Transport, doing: str) -> Iterator[None]:
    """Around what every rank does by itself: where one of them fails, all raise.  Collective."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    others = transport.all_gather_objects(failure and told(transport.rank, doing, failure))
    for each in filter(None, [failure, *others]):
        raise each
