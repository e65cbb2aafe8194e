"""Record when a rank computes, waits and has transfers under way: a transport that wraps another one.

Generated code, seats and workers know nothing of it.  Of every operation of a step it keeps when it was issued, when
waiting for it began and ended, and how many bytes it carries.

What is seen depends on who waits.  gloo holds up the program: waits are intervals of the host's clock, and contain what
`wait` does besides, copying from a buffer and adding up the parts of a reduce-scatter.  NCCL holds up the GPU's stream:
there CUDA events stand on both sides of a wait, and the time between them is what the stream was held up.  With a GPU
every step begins and ends with the GPU idle.

An operation is complete when its wait ends, or before, where the backend says so (gloo of collectives).  So a message
that lies there unasked for counts as under way until somebody asks for it.

Autograd may run backward in another thread and wait there; the program's own thread then only stands by.  Lists are
appended to and attributes set, which threads may do at the same time.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .base import CompletedWork, Message, Transport, Work

Route = tuple[int, int, int]
"""Peer, tag and bytes of a message."""


@dataclass(frozen=True)
class Operation:
    """One operation of a step, in seconds of the rank's clock.

    kind: "message", or the collective over `ranks`.  sends, receives: the messages that it consists of.
    nbytes: payload that this rank sends, by the definitions that `Rank.sent_bytes` goes by.
    waits: when the rank began and ended to wait for it.
    """

    kind: str
    issued: float
    completed: float
    nbytes: int
    ranks: tuple[int, ...] = ()
    sends: tuple[Route, ...] = ()
    receives: tuple[Route, ...] = ()
    waits: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Step:
    """One step of a rank, in seconds of its clock, with what it issued, in that order."""

    begin: float
    end: float
    operations: tuple[Operation, ...]

    @property
    def sent_bytes(self) -> int:
        return sum(operation.nbytes for operation in self.operations)


class Recorder(Transport):
    """Passes everything on to `transport`, and records what is issued inside of `step`.

    steps: those recorded so far.
    """

    def __init__(self, transport: Transport) -> None:
        self.rank, self.world, self.device = transport.rank, transport.world, transport.device
        self.steps: list[Step] = []
        self._transport = transport
        self._clock: _Clock = _StreamClock(self.device) if transport.waits_hold_the_stream else _HostClock()
        self._zero = 0.0
        self._issued: list[_Recorded] | None = None

    @property
    def waits_hold_the_stream(self) -> bool:
        return self._transport.waits_hold_the_stream

    def align(self) -> None:
        """Let all ranks' clocks begin now.  Collective.

        Ranks of one host have one clock.  Those of another host begin when a barrier lets them go, which is as exact as
        the barrier is quick.
        """
        self.barrier()
        now = time.monotonic()
        host, first = self.broadcast_object((_host(), now))
        self._zero = first if host == _host() else now

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step.  One that breaks off is not recorded."""
        self._synchronise()
        self._clock.start()
        self._issued = []
        begin = time.monotonic()
        yield
        self._synchronise()
        end = time.monotonic()
        issued, self._issued = self._issued, None
        operations = tuple(each.read(self._clock, self._zero, end) for each in issued)
        self.steps.append(Step(begin - self._zero, end - self._zero, operations))

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- what is recorded ----------------------------------------------------------------------------------------------

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        return self._messages(lambda: self._transport._isend(tensor, dst, tag), [(tensor, dst)], [], tag)

    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        return self._messages(lambda: self._transport._irecv(tensor, src, tag), [], [(tensor, src)], tag)

    def _exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], ranks: tuple[int, ...], tag: int
    ) -> Work:
        start = self._transport._exchange
        return self._messages(lambda: start(sends, receives, ranks, tag), sends, receives, tag)

    def _all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Work:
        nbytes = 2 * (len(ranks) - 1) * tensor.nbytes // len(ranks)
        return self._collective("all_reduce", lambda: self._transport._all_reduce(tensor, ranks), nbytes, ranks)

    def _broadcast(self, tensor: Tensor, src: int, ranks: tuple[int, ...]) -> Work:
        nbytes = (len(ranks) - 1) * tensor.nbytes if src == self.rank else 0
        return self._collective("broadcast", lambda: self._transport._broadcast(tensor, src, ranks), nbytes, ranks)

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, ranks: tuple[int, ...]) -> Work:
        nbytes = (len(ranks) - 1) * tensor.nbytes
        start = self._transport._all_gather
        return self._collective("all_gather", lambda: start(outputs, tensor, ranks), nbytes, ranks)

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], ranks: tuple[int, ...]) -> Work:
        nbytes = sum(piece.nbytes for rank, piece in zip(ranks, pieces, strict=True) if rank != self.rank)
        start = self._transport._reduce_scatter
        return self._collective("reduce_scatter", lambda: start(output, pieces, ranks), nbytes, ranks)

    def _messages(
        self, start: Callable[[], Work], sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> Work:
        leaving = tuple((peer, tag, tensor.nbytes) for tensor, peer in sends)
        arriving = tuple((peer, tag, tensor.nbytes) for tensor, peer in receives)
        nbytes = sum(nbytes for *_, nbytes in leaving)
        return self._record(_Recorded("message", nbytes, sends=leaving, receives=arriving), start)

    def _collective(self, kind: str, start: Callable[[], Work], nbytes: int, ranks: tuple[int, ...]) -> Work:
        return self._record(_Recorded(kind, nbytes, ranks), start)

    def _record(self, recorded: _Recorded, start: Callable[[], Work]) -> Work:
        if self._issued is None:
            return start()
        self._issued.append(recorded)
        recorded.issue(start, self._clock)
        if recorded.ranks:
            self._transport.when_complete(recorded.work, recorded.complete)
        return recorded

    # -- what is not ---------------------------------------------------------------------------------------------------

    def _connect(self, ranks: tuple[int, ...]) -> None:
        self._transport._connect(ranks)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return self._transport.broadcast_object(value, src)

    def gather_objects(self, value: Any, dst: int = 0) -> list[Any] | None:
        return self._transport.gather_objects(value, dst)

    def scatter_objects(self, values: Sequence[Any] | None, src: int = 0) -> Any:
        return self._transport.scatter_objects(values, src)

    def barrier(self) -> None:
        self._transport.barrier()

    def close(self) -> None:
        self._transport.close()


class _Recorded:
    """The work of an operation that is recorded; its times are marks of the clock until the step has ended."""

    def __init__(
        self,
        kind: str,
        nbytes: int,
        ranks: tuple[int, ...] = (),
        sends: tuple[Route, ...] = (),
        receives: tuple[Route, ...] = (),
    ) -> None:
        self.kind, self.nbytes, self.ranks, self.sends, self.receives = kind, nbytes, ranks, sends, receives
        self.work: Work = CompletedWork()
        self._waits: list[tuple[Any, Any]] = []
        self._completed: Any = None

    def issue(self, start: Callable[[], Work], clock: _Clock) -> None:
        self._clock = clock
        self._issued = clock.mark()
        self.work = start()

    def complete(self) -> None:
        """Note that it is complete now; only of clocks that every thread may read."""
        self._completed = self._clock.mark()

    def wait(self) -> None:
        begin = self._clock.mark()
        self.work.wait()
        self._waits.append((begin, self._clock.mark()))
        self.work = CompletedWork()  # which holds no tensors

    def read(self, clock: _Clock, zero: float, end: float) -> Operation:
        """The times in seconds after `zero`.  end: of the step, by which everything is complete."""
        waits = tuple((clock.seconds(a) - zero, clock.seconds(b) - zero) for a, b in self._waits)
        told = self._completed
        completed = min(
            waits[0][1] if waits else end - zero,
            end - zero if told is None else clock.seconds(told) - zero,
        )
        issued = clock.seconds(self._issued) - zero
        return Operation(self.kind, issued, completed, self.nbytes, self.ranks, self.sends, self.receives, waits)


class _Clock(Protocol):
    """Marks moments, which can be read once the step has ended."""

    def start(self) -> None:
        """A step begins; all before it has ended."""

    def mark(self) -> Any:
        """Now."""

    def seconds(self, mark: Any) -> float:
        """On the scale of `time.monotonic`."""


class _HostClock:
    """What the program sees."""

    def start(self) -> None:
        pass

    def mark(self) -> float:
        return time.monotonic()

    def seconds(self, mark: float) -> float:
        return mark


class _StreamClock:
    """What the GPU's current stream sees: an event is when it comes to it, not when the program asks for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        self._first: Any = self.mark()
        self._first.synchronize()
        self._at = time.monotonic()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        return self._at + float(self._first.elapsed_time(mark)) / 1e3  # events count milliseconds


def _host() -> str:
    """What processes with one monotonic clock have in common: the kernel's boot, else the machine's name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()
