"""One rank's transport on a process group of torch.distributed.

Tensors travel as bytes wherever nothing is summed, because gloo refuses many dtypes in collectives; sums of a dtype
that the backends cannot add are taken in a wider one.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its default arguments would keep a process group that is there already
from torch import Tensor
from torch.distributed import distributed_c10d

from .base import Message, PeerLost, Transport, Work, describe, describe_all
from .in_flight import InFlight, as_bytes, cause, summable

# Tags that programs do not use: of the messages that set up a group, and of those that make up collectives.
_SETUP_TAG, _GATHER_TAG, _SCATTER_TAG = 2**31 - 1, 2**31 - 2, 2**31 - 3


class TorchTransport(Transport):
    """A transport on the process group that `distributed.init` joined or found.

    NCCL's waits hold up the GPU's current stream, not the program.  NCCL ignores tags, and the
    first message between two ranks creates their communicator, for which each waits for the other:
    what a rank issues must have the one order that is checked when a program is compiled.

    staged: tensors are copied to the CPU before they travel, and back by `wait`.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: float,
        owns_process_group: bool,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.device = device
        self.staged = device.type == "cuda" and "nccl" not in str(dist.get_backend())
        self._timeout = timeout
        self._owns_process_group = owns_process_group
        self._everyone = everyone  # None: the default group
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(self.world)): everyone}
        self._side_groups: list[TorchTransport] = []
        self._met: set[tuple[int, ...]] = set()  # NCCL communicators that are known to exist
        self._under_way = 0  # operations that nobody has waited for
        atexit.register(self._close_at_exit)

    @property
    def waits_hold_the_stream(self) -> bool:
        return self.device.type == "cuda" and not self.staged

    def when_complete(self, work: Work, call: Callable[[], None]) -> bool:
        return isinstance(work, InFlight) and not self.waits_hold_the_stream and work.when_complete(call)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        values = [value]
        with self._losing_peers(f"broadcast_object from rank {src}"):
            dist.broadcast_object_list(values, src, self._everyone)
        return values[0]

    def gather_objects(self, value: Any, dst: int = 0) -> list[Any] | None:
        values: list[Any] | None = [None] * self.world if self.rank == dst else None
        with self._losing_peers(f"gather_objects to rank {dst}"):
            dist.gather_object(value, values, dst, self._everyone)
        return values

    def barrier(self) -> None:
        with self._losing_peers("barrier"):
            dist.barrier(self._everyone, device_ids=[self.device.index] if self.waits_hold_the_stream else None)

    def side_group(self) -> Transport | None:
        group = self._new_group(tuple(range(self.world)), "gloo")
        self._side_groups.append(TorchTransport(torch.device("cpu"), self._timeout, False, everyone=group))
        return self._side_groups[-1]

    def _close_at_exit(self) -> None:
        """Close a transport that a program left open, unless that could wait for other ranks."""
        if not self._under_way and not self.waits_hold_the_stream:
            self.close()

    def close(self) -> None:
        atexit.unregister(self._close_at_exit)
        for group in self._side_groups:
            group.close()
        self._everyone = None
        self._groups.clear()  # else their threads may outlive the interpreter, which then aborts
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        flight = self._flight(f"isend {describe(tensor)} to rank {dst}, tag {tag}")
        return flight.issue(dist.isend, as_bytes(flight.outgoing(tensor)), dst, self._everyone, tag=tag)

    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        flight = self._flight(f"irecv {describe(tensor)} from rank {src}, tag {tag}")
        return flight.issue(dist.irecv, as_bytes(flight.incoming(tensor)), src, self._everyone, tag=tag)

    def _all_reduce(self, tensor: Tensor, ranks: tuple[int, ...], maximum: bool = False) -> Work:
        flight = self._flight(f"all_reduce {describe(tensor)} over ranks {ranks}")
        group = self._group(ranks)
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return flight.issue(dist.all_reduce, flight.summed(tensor), op=op, group=group, async_op=True)

    def _broadcast(self, tensor: Tensor, src: int, ranks: tuple[int, ...]) -> Work:
        flight = self._flight(f"broadcast {describe(tensor)} from rank {src} over ranks {ranks}")
        buffer = flight.outgoing(tensor) if self.rank == src else flight.incoming(tensor)
        group = self._group(ranks)
        return flight.issue(dist.broadcast, as_bytes(buffer), src, group=group, async_op=True)

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, ranks: tuple[int, ...]) -> Work:
        flight = self._flight(f"all_gather {describe(tensor)} over ranks {ranks}")
        group = self._group(ranks)
        if len({output.shape for output in outputs}) == 1:
            buffers = [as_bytes(flight.incoming(output)) for output in outputs]
            own = as_bytes(flight.outgoing(tensor))
            return flight.issue(dist.all_gather, buffers, own, group=group, async_op=True)
        # Unequal shapes, which both backends refuse: NCCL broadcasts each, gloo sends each straight to the others.
        outputs[ranks.index(self.rank)].detach().copy_(tensor.detach())
        if self.waits_hold_the_stream:
            for src, output in zip(ranks, outputs, strict=True):
                if output.numel():
                    buffer = flight.outgoing(output) if self.rank == src else flight.incoming(output)
                    flight.issue(dist.broadcast, as_bytes(buffer), src, group=group, async_op=True)
            return flight
        own = flight.outgoing(tensor)
        others = [(rank, output) for rank, output in zip(ranks, outputs, strict=True) if rank != self.rank]
        return flight.messages(
            [(own, rank) for rank, _ in others],
            [(flight.incoming(output), rank) for rank, output in others],
            _GATHER_TAG,
        )

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], ranks: tuple[int, ...]) -> Work:
        flight = self._flight(f"reduce_scatter {describe_all(pieces)} over ranks {ranks}")
        if self.waits_hold_the_stream:
            return self._reduce_scatter_by_nccl(flight, output, pieces, ranks)
        # gloo's own is one all-reduce of each piece: here each travels once, straight to its rank.
        parts = flight.parts(output, len(ranks), output.dtype)
        parts[ranks.index(self.rank)] = flight.outgoing(pieces[ranks.index(self.rank)])
        others = [(rank, i) for i, rank in enumerate(ranks) if rank != self.rank]
        return flight.messages(
            [(flight.outgoing(pieces[i]), rank) for rank, i in others],
            [(parts[i], rank) for rank, i in others],
            _SCATTER_TAG,
        )

    def _reduce_scatter_by_nccl(
        self, flight: InFlight, output: Tensor, pieces: Sequence[Tensor], ranks: tuple[int, ...]
    ) -> Work:
        """In one operation, or when shapes are unequal in a reduction to each rank."""
        group = self._group(ranks)
        sources = [flight.outgoing(piece.to(summable(piece.dtype))) for piece in pieces]
        (total,) = flight.parts(output, 1, summable(output.dtype))
        if len({piece.shape for piece in pieces}) == 1:
            return flight.issue(dist.reduce_scatter, total, sources, group=group, async_op=True)
        total.copy_(sources[ranks.index(self.rank)])
        sources[ranks.index(self.rank)] = total
        for dst, source in zip(ranks, sources, strict=True):
            if source.numel():
                flight.issue(dist.reduce, source, dst, group=group, async_op=True)
        return flight

    def _exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], ranks: tuple[int, ...], tag: int
    ) -> Work:
        peers = [f"{describe(x)} to rank {dst}" for x, dst in sends]
        peers += [f"{describe(x)} from rank {src}" for x, src in receives]
        flight = self._flight(f"exchange {', '.join(peers)}, tag {tag}")
        leaving = [(flight.outgoing(x), dst) for x, dst in sends]
        arriving = [(flight.incoming(x), src) for x, src in receives]
        if not self.waits_hold_the_stream:
            return flight.messages(leaving, arriving, tag)
        group = self._group(ranks)
        if ranks not in self._met:  # messages alone would not create the communicator of all of them
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            self._met.add(ranks)
        operations = [dist.P2POp(dist.isend, as_bytes(x), dst, group) for x, dst in leaving]
        operations += [dist.P2POp(dist.irecv, as_bytes(x), src, group) for x, src in arriving]
        return flight.issue(dist.batch_isend_irecv, operations)

    def _connect(self, ranks: tuple[int, ...]) -> None:
        self._group(ranks)

    def _flight(self, what: str) -> InFlight:
        """An operation that is about to be issued."""
        self._under_way += 1
        return InFlight(self.device, self.staged, partial(self._losing_peers, what), self._done)

    def _done(self) -> None:
        self._under_way -= 1

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The communicator of `ranks`, created by its members alone when it is new.

        torch names a group of this kind by its ranks and the number of groups that this process
        is in.  Members that are in unequally many would wait for each other under different names
        until they time out; so they first agree on the highest number, and those below it fill up
        with groups of themselves alone.
        """
        if ranks not in self._groups:
            self._groups[ranks] = self._new_group(ranks)
        return self._groups[ranks]

    def _new_group(self, ranks: tuple[int, ...], backend: str | None = None) -> dist.ProcessGroup:
        highest = self._agree_on_highest(_count_groups(), ranks)
        with self._losing_peers(f"connect ranks {ranks}"):
            while _count_groups() < highest:
                dist.new_group([self.rank], use_local_synchronization=True)
            group: dist.ProcessGroup = dist.new_group(
                list(ranks), timedelta(seconds=self._timeout), backend=backend, use_local_synchronization=True
            )
        return group

    def _agree_on_highest(self, number: int, ranks: tuple[int, ...]) -> int:
        """The highest of all members' numbers: asked and answered by the first of `ranks`.

        By messages and not by a collective, because the group that would carry one is not there.
        """
        highest = torch.tensor(number, device=self.device)
        first, *others = ranks
        if self.rank != first:
            self._isend(highest, first, _SETUP_TAG).wait()
            self._irecv(highest, first, _SETUP_TAG).wait()
            return int(highest)
        for other in others:
            theirs = torch.empty_like(highest)
            self._irecv(theirs, other, _SETUP_TAG).wait()
            highest = torch.maximum(highest, theirs)
        for other in others:
            self._isend(highest, other, _SETUP_TAG).wait()
        return int(highest)

    @contextmanager
    def _losing_peers(self, what: str) -> Iterator[None]:
        """Say which operation of which rank failed: what gloo raises names neither."""
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(
                f"rank {self.rank} of {self.world}: {what}: {cause(error)}; a peer died, or did "
                f"not do its part within {self._timeout:g} s: look for the first error of the "
                f"other ranks"
            ) from error


def _count_groups() -> int:
    return len(distributed_c10d._world.pg_names)
