"""Where the ranks of one start meet before they wait for each other: none goes on with a program that another refused.

Each rank writes a log into the store that they share: what it refused to compile, and with which program it came to
`worker`.  Whoever comes reads on in the logs of the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parameter import is_lazy

from ..errors import LaunchError
from .agreement import digest, require_same, told
from .distributed import init, rank_among, seconds_to_wait
from .sealed import opened, sealed
from .torch_transport import TorchTransport

_numbers = itertools.count(1)


@dataclass
class Call:
    """A call of `compile`.  number: its ordinal in this process.  about: what the ranks must have alike, once known."""

    number: int = 0
    about: Mapping[str, str] = field(default_factory=dict)

    def know(self, model: nn.Module, loss: Any) -> None:
        self.about = {"the model": described(model), "the loss": described(loss)}

    def matches(self, other: Call) -> bool:
        """Whether it may be the same call on another rank; one that fails early does not know what it is about."""
        return self.number == other.number and (not self.about or not other.about or self.about == other.about)


class Meeting:
    """The logs of the ranks in their store.  seconds: how long one waits for another."""

    def __init__(self, store: Any, rank: int, world: int, seconds: float) -> None:
        self._store, self._rank, self._seconds = store, rank, seconds
        self._refused: list[Call] = []  # by any rank
        self._at = [0] * world

    def tell(self, call: Call, refused: Exception | None = None) -> None:
        """Tell the others that this rank has come with a call's program, or why it refused it."""
        error = refused and told(self._rank, "compile the program", refused)
        self._store.set(f"splitc/{self._rank}/{self._at[self._rank]}", sealed((call, error)))
        self._at[self._rank] += 1
        self._refused += [call] if refused else []

    def meet(self, call: Call) -> None:
        """Return when all ranks have come with this call's program.

        Raises the error of a rank that refused it, and LaunchError where ranks have come with different programs.
        """
        self.tell(call)
        own = self._rank
        found = [call if rank == own else self._next(rank, call) for rank in range(len(self._at))]
        require_same({f"rank {rank}": each.about for rank, each in enumerate(found)}, "compile the same on every rank")

    def _next(self, rank: int, call: Call) -> Call:
        """With what another rank has come, after what some rank refused."""
        while True:
            key = f"splitc/{rank}/{self._at[rank]}"
            try:
                self._store.wait([key], timedelta(seconds=self._seconds))
            except RuntimeError as error:
                raise LaunchError(f"rank {rank} did not come to worker() within {self._seconds:g} s") from error
            self._at[rank] += 1
            entry: tuple[Call, Exception | None] = opened(self._store.get(key))
            theirs, refused = entry
            self._refused += [theirs] if refused else []
            if refused and theirs.matches(call):
                raise refused
            if not any(map(theirs.matches, self._refused)):
                return theirs


@contextmanager
def refusals_told(world: int, call: Call | None = None) -> Iterator[Call]:
    """Around a compilation: its error is told to the ranks that were started together with this one.

    call: that of a compilation which goes on; None: a new one.
    """
    call = Call(next(_numbers)) if call is None else call
    try:
        yield call
    except Exception as error:
        with suppress(Exception):  # the error itself counts
            for meeting in _meetings(world):
                meeting.tell(call, error)
        raise


def join(world: int, backend: str | None, device: str | torch.device | None, call: Call) -> TorchTransport:
    """`init` for the program of a call, once all ranks have come with it."""
    for meeting in _meetings(world):
        meeting.meet(call)
    return init(world, backend, device, tell=True)


def _meetings(world: int) -> list[Meeting]:
    """That of this process, if it is one of `world` that were started together."""
    rank = rank_among(world, alone=-1)
    return [_meeting(rank, world)] if world > 1 and rank >= 0 else []


@cache
def _meeting(rank: int, world: int) -> Meeting:
    seconds = seconds_to_wait()
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.distributed_c10d.PrefixStore):  # the one below is the same before a group is made
            store = store.underlying_store
    else:
        store, *_ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    return Meeting(store, rank, world, seconds)


def described(value: Any) -> str:
    """A name, and a digest of what is behind it: of a module its structure, not its weights."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(described, value))
    parts: list[Any] = [getattr(getattr(value, "__code__", None), "co_code", None)]
    if isinstance(value, nn.Module):
        parts += [(path, type(module).__qualname__) for path, module in value.named_modules()]
        parts += [(n, is_lazy(p) or tuple(p.shape), p.dtype, p.requires_grad) for n, p in value.named_parameters()]
    return f"{getattr(value, '__qualname__', type(value).__qualname__)} {digest(repr(parts).encode())}"
