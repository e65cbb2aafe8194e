"""Record when a rank computes, waits and has transfers under way: a transport that wraps another one.

Generated code, communicators and workers do not know about it.  For every operation of a step it records when it was
issued, when waiting for it began and ended, and how many bytes it carries.

gloo blocks the program: waits are intervals of the host's clock and include what `wait` does itself, copying from a
buffer and adding up the parts of a reduce-scatter.  NCCL blocks the GPU's stream: CUDA events are recorded before and
after a wait, and the time between them is how long the stream was blocked.  With a GPU every step begins and ends with
the GPU idle.

An operation is complete when its wait ends, or earlier if the backend reports it (gloo, for collectives).  So a message
that has arrived counts as under way until it is waited for.

Autograd may run backward, and wait, in another thread while the program's own thread is idle.  Appending to lists and
setting attributes is safe from both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..clocks import Clock, StreamClock
from .base import CompletedWork, Message, Ranks, Transport, Work
from .devices import machine

Routes = tuple[tuple[int, int, int], ...]
"""Peer, tag and bytes of messages."""


@dataclass(frozen=True)
class Operation:
    """One operation of a step, in seconds of the rank's clock.

    kind: "message", or the collective over `ranks`.  sends, receives: the messages that it consists of.
    nbytes: payload that this rank sends, as `Transport.sent_bytes` counts it.
    waits: when the rank began and ended to wait for it.
    """

    kind: str
    issued: float
    completed: float
    nbytes: int
    ranks: Ranks = ()
    sends: Routes = ()
    receives: Routes = ()
    waits: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Step:
    """One step of a rank, in seconds of its clock, with its operations in the order of issue."""

    begin: float
    end: float
    operations: tuple[Operation, ...]

    @property
    def sent_bytes(self) -> int:
        return sum(operation.nbytes for operation in self.operations)


class Forwarding(Transport):
    """Forwards objects, barriers and connections to `inner`; subclasses define the operations on tensors."""

    def __init__(self, inner: Transport) -> None:
        self.rank, self.world, self.device = inner.rank, inner.world, inner.device
        self._inner = inner

    @property
    def waits_hold_the_stream(self) -> bool:
        return self._inner.waits_hold_the_stream

    def decided(self, numbers: Tensor) -> list[bool]:
        return self._inner.decided(numbers)

    def side_group(self) -> Transport | None:
        return self._inner.side_group()

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return self._inner.broadcast_object(value, src)

    def gather_objects(self, value: Any, dst: int = 0) -> list[Any] | None:
        return self._inner.gather_objects(value, dst)

    def barrier(self) -> None:
        self._inner.barrier()

    def watch(self, training: Any) -> None:
        self._inner.watch(training)

    def close(self) -> None:
        self._inner.close()

    def _connect(self, ranks: Ranks) -> None:
        self._inner._connect(ranks)


class Recorder(Forwarding):
    """Forwards everything to `transport`, and records the operations issued inside of `step`.

    steps: those recorded so far.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.steps: list[Step] = []
        self._clock: Clock = StreamClock(self.device) if transport.waits_hold_the_stream else Clock(time.monotonic)
        self._zero = 0.0
        self._counted = 0  # of `sent_bytes`, those of operations before the one that is issued
        self._issued: list[_Recorded] | None = None

    def align(self) -> None:
        """Set the zero of all ranks' clocks to now.  Collective.

        Ranks of one host share a clock.  Clocks of other hosts are aligned by a barrier, as precisely as ranks leave it
        at the same time.
        """
        self.barrier()
        now = time.monotonic()
        its_machine, first = self.broadcast_object((machine(), now))
        self._zero = first if its_machine == machine() else now  # a kernel has one monotonic clock

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record one step; a step that raises is not recorded."""
        self._synchronise()
        self._issued, first = [], self._clock.now()
        self._clock.settle()
        begin = time.monotonic()
        yield
        self._synchronise()
        end = time.monotonic()
        issued, self._issued = self._issued, None
        begin, end = begin - self._zero, end - self._zero
        operations = tuple(each.read(lambda mark: begin + self._clock.between(first, mark), end) for each in issued)
        self.steps.append(Step(begin, end, operations))

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        return self._messages(partial(self._inner._isend, tensor, dst, tag), [(tensor, dst)], [], tag)

    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        return self._messages(partial(self._inner._irecv, tensor, src, tag), [], [(tensor, src)], tag)

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], ranks: Ranks, tag: int) -> Work:
        return self._messages(partial(self._inner._exchange, sends, receives, ranks, tag), sends, receives, tag)

    def _all_reduce(self, tensor: Tensor, ranks: Ranks, maximum: bool = False) -> Work:
        return self._record("all_reduce", partial(self._inner._all_reduce, tensor, ranks, maximum), ranks)

    def _broadcast(self, tensor: Tensor, src: int, ranks: Ranks) -> Work:
        return self._record("broadcast", partial(self._inner._broadcast, tensor, src, ranks), ranks)

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, ranks: Ranks) -> Work:
        return self._record("all_gather", partial(self._inner._all_gather, outputs, tensor, ranks), ranks)

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], ranks: Ranks) -> Work:
        return self._record("reduce_scatter", partial(self._inner._reduce_scatter, output, pieces, ranks), ranks)

    def _messages(
        self, start: Callable[[], Work], sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> Work:
        leaving, arriving = (
            tuple((peer, tag, tensor.nbytes) for tensor, peer in messages) for messages in (sends, receives)
        )
        return self._record("message", start, sends=leaving, receives=arriving)

    def _record(
        self, kind: str, start: Callable[[], Work], ranks: Ranks = (), sends: Routes = (), receives: Routes = ()
    ) -> Work:
        nbytes, self._counted = self.sent_bytes - self._counted, self.sent_bytes
        if self._issued is None:
            return start()
        recorded = _Recorded(Operation(kind, 0.0, 0.0, nbytes, ranks, sends, receives), start, self._clock)
        self._issued.append(recorded)
        if ranks:
            self._inner.when_complete(recorded.work, recorded.complete)
        return recorded


class _Recorded:
    """The work of an operation that is recorded; its times are marks of the clock until the step has ended."""

    def __init__(self, operation: Operation, start: Callable[[], Work], clock: Clock) -> None:
        self._operation, self._clock = operation, clock
        self._waits: list[tuple[Any, Any]] = []
        self._completed: Any = None
        self._issued = clock.now()
        self.work = start()

    def complete(self) -> None:
        """Mark the completion; called from any thread, with the host's clock."""
        self._completed = self._clock.now()

    def wait(self) -> None:
        begin = self._clock.now()
        self.work.wait()
        self._waits.append((begin, self._clock.now()))
        self.work = CompletedWork()  # which holds no tensors

    def read(self, seconds: Callable[[Any], float], end: float) -> Operation:
        """The operation with the `seconds` of its marks.  end: of the step, when everything is complete."""
        waits = tuple((seconds(begin), seconds(ended)) for begin, ended in self._waits)
        ends = [waits[0][1]] if waits else []
        ends += [seconds(self._completed)] if self._completed is not None else []
        return replace(self._operation, issued=seconds(self._issued), completed=min(ends, default=end), waits=waits)
