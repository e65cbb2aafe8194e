"""One rank's transport on a process group of torch.distributed.

Tensors travel as bytes wherever nothing is summed, because gloo refuses many dtypes in collectives; sums of a dtype
that the backends cannot add are taken in a wider one.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its default arguments would keep a process group that is there already
from torch import Tensor

from ..errors import BackendError
from ..hangs.watch import Watch
from ..live import Ends, Waits
from .base import Message, PeerLost, Ranks, Transport, Work, describe, describe_all
from .devices import host
from .in_flight import InFlight, as_bytes, cause, fails_by_itself, joined, summable

# Tags that programs do not use: of the messages that make up collectives.
_GATHER_TAG, _SCATTER_TAG = 2**31 - 2, 2**31 - 3

# torch before 2.13 has other names for these.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_WATCHED = 30  # times as long torch itself allows waits that are watched
_watches = count(1)  # a program may join, close, and join again, in one store

_CTAS = 8  # multiprocessors of a GPU that a message may take, also a receive that only waits for its sender


class TorchTransport(Transport):
    """A transport on the process group that `distributed.init` joined or found.

    NCCL's waits hold up the GPU's current stream, not the program.  It ignores tags, and runs what a rank issues on
    one communicator in the order of issue.  Messages have two communicators of all ranks, one to higher ranks and one
    to lower ones, so that both directions flow at once; an exchange is one operation on that of its ranks.  So an
    operation waits for others of its rank only if they were issued before it: the check that a program has no deadlock
    lets it wait for all of these, until their peers have come, which is stricter.  It also proves that what has been
    issued ends whatever is issued later, so a rank may wait for its whole GPU, as an allocator does that frees memory,
    while a receive is posted; the exception are sums of a rank that has no examples in the last microbatch of its role.

    staged: tensors are copied to the CPU before they travel, and back by `wait`.
    Constructing it is collective: NCCL's communicators of messages are created.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: float,
        owns_process_group: bool,
        everyone: dist.ProcessGroup | None = None,
        staged: bool = False,
    ) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.device = device
        self.staged = staged
        self._gpu = device if device.type == "cuda" and not staged else None  # NCCL's
        self._timeout = timeout
        self._owns_process_group = owns_process_group
        self._everyone = everyone  # None: the default group
        self._ranks = ranks = tuple(range(self.world))
        self._groups: dict[Ends, dist.ProcessGroup | None] = {ranks: everyone}
        self._side_groups: list[TorchTransport] = []
        self.waits = Waits()
        self._watch: Watch | None = None
        self.under_way = 0  # operations that nobody has waited for
        self._ways = [everyone, everyone]  # of messages to lower ranks, and to higher ones
        if self.waits_hold_the_stream and self.world > 1:
            self.barrier()  # a communicator that NCCL makes at the first operation needs all ranks in it
            self._ways = [self._new_group(ranks, device_id=self._gpu, pg_options=self._capped()) for _ in range(2)]
        atexit.register(self._close_at_exit)

    @property
    def waits_hold_the_stream(self) -> bool:
        return self._gpu is not None

    def when_complete(self, work: Work, call: Callable[[], None]) -> bool:
        return isinstance(work, InFlight) and not self.waits_hold_the_stream and work.when_complete(call)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        values = [value]
        with self.losing_peers(f"broadcast_object from rank {src}", self._ranks):
            dist.broadcast_object_list(values, src, self._everyone)
        return values[0]

    def gather_objects(self, value: Any, dst: int = 0) -> list[Any] | None:
        values: list[Any] | None = [None] * self.world if self.rank == dst else None
        with self.losing_peers(f"gather_objects to rank {dst}", self._ranks):
            dist.gather_object(value, values, dst, self._everyone)
        return values

    def barrier(self) -> None:
        with self.losing_peers("barrier", self._ranks):
            dist.barrier(self._everyone, device_ids=[self._gpu.index] if self._gpu else None)

    def side_group(self) -> Transport | None:
        group = self._new_group(self._ranks, self._timeout, backend="gloo")
        self._side_groups.append(TorchTransport(torch.device("cpu"), self._timeout, False, everyone=group))
        return self._side_groups[-1]

    def apart(self, timeout: float | None = None) -> Transport | None:
        if self.waits_hold_the_stream or self.world == 1:
            return None  # NCCL's waits cannot be given up
        within = timeout or self._timeout
        group = self._new_group(self._ranks, within, backend="gloo")
        return TorchTransport(self.device, within, False, everyone=group, staged=self.staged)

    def watch(self, training: Any = None) -> None:
        if self._everyone is not None or self.world == 1:
            return  # connections apart may be given up
        if self._watch is None:
            store = dist.distributed_c10d.PrefixStore(f"hangs {next(_watches)}", self.store.clone())
            self._watch = Watch(self, store, self._timeout, host())
        own = dist.distributed_c10d._get_default_group() if self._owns_process_group else None
        for group in filter(None, (own, *self._groups.values(), *self._ways)):
            for device in group._device_types:
                group._get_backend(device).set_timeout(timedelta(seconds=_WATCHED * self._timeout))
        if training is not None:
            self._watch.follow(training)

    def is_blocked(self) -> bool:
        """Whether the program, or on NCCL the GPU's stream, waits for the last operation."""
        return not torch.cuda.default_stream(self.device).query() if self._gpu else bool(self.waits.now[0])

    def _close_at_exit(self) -> None:
        """Close a transport that a program left open, unless that could wait for other ranks."""
        if not self.under_way and not self.waits_hold_the_stream:
            self.close()

    def close(self) -> None:
        atexit.unregister(self._close_at_exit)
        if self._watch is not None:
            self._watch.close()
        for side in self._side_groups:
            side.close()
        is_apart = self._everyone is not None and dist.is_initialized()
        for group in filter(None, self._groups.values() if is_apart else ()):
            dist.destroy_process_group(group)
        self._everyone, self._ways = None, []
        self._groups.clear()  # else their threads may outlive the interpreter, which then aborts
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        flight = InFlight(self, f"isend {describe(tensor)} to rank {dst}, tag {tag}", (self.rank, dst))
        return flight.messages([(flight.outgoing(tensor), dst)], [], tag, self._ways[dst > self.rank])

    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        flight = InFlight(self, f"irecv {describe(tensor)} from rank {src}, tag {tag}", (src, self.rank))
        return flight.messages([], [(flight.incoming(tensor), src)], tag, self._ways[src < self.rank])

    def _all_reduce(self, tensor: Tensor, ranks: Ranks, maximum: bool = False) -> Work:
        flight = InFlight(self, f"all_reduce {describe(tensor)} over ranks {ranks}", ranks)
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return flight.issue(dist.all_reduce, flight.summed(tensor), op=op, group=self._groups[ranks], async_op=True)

    def _broadcast(self, tensor: Tensor, src: int, ranks: Ranks) -> Work:
        flight = InFlight(self, f"broadcast {describe(tensor)} from rank {src} over ranks {ranks}", ranks)
        buffer = flight.outgoing(tensor) if self.rank == src else flight.incoming(tensor)
        return flight.issue(dist.broadcast, as_bytes(buffer), src, group=self._groups[ranks], async_op=True)

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, ranks: Ranks) -> Work:
        flight = InFlight(self, f"all_gather {describe(tensor)} over ranks {ranks}", ranks)
        group = self._groups[ranks]
        if self.waits_hold_the_stream or len({output.shape for output in outputs}) == 1:
            buffers = [as_bytes(flight.incoming(output)) for output in outputs]
            own = as_bytes(flight.outgoing(tensor))
            if len({buffer.numel() for buffer in buffers}) == 1 and (whole := joined(buffers)) is not None:
                return flight.issue(_all_gather_single, whole, own, group=group, async_op=True)
            return flight.issue(dist.all_gather, buffers, own, group=group, async_op=True)
        # gloo refuses unequal shapes: each piece goes straight to the others.
        outputs[ranks.index(self.rank)].detach().copy_(tensor.detach())
        own = flight.outgoing(tensor)
        others = [(rank, output) for rank, output in zip(ranks, outputs, strict=True) if rank != self.rank]
        receives = [(flight.incoming(output), rank) for rank, output in others]
        return flight.messages([(own, rank) for rank, _ in others], receives, _GATHER_TAG, self._everyone)

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], ranks: Ranks) -> Work:
        flight = InFlight(self, f"reduce_scatter {describe_all(pieces)} over ranks {ranks}", ranks)
        if self.waits_hold_the_stream:
            options = {"group": self._groups[ranks], "async_op": True}
            (total,) = flight.parts(output, 1, dtype := summable(output.dtype))
            if len({piece.shape for piece in pieces}) > 1:  # torch makes one operation of reductions to each rank
                sources = [_flat(flight.outgoing(piece.to(dtype))) for piece in pieces]
                return flight.issue(dist.reduce_scatter, _flat(total), sources, **options)
            whole = torch.stack([*pieces]) if (together := joined(pieces)) is None else together
            return flight.issue(
                _reduce_scatter_single, _flat(total), _flat(flight.outgoing(whole.to(dtype))), **options
            )
        # gloo's own is one all-reduce of each piece: here each travels once, straight to its rank.
        parts = flight.parts(output, len(ranks), output.dtype)
        parts[ranks.index(self.rank)] = flight.outgoing(pieces[ranks.index(self.rank)])
        others = [(rank, i) for i, rank in enumerate(ranks) if rank != self.rank]
        sends = [(flight.outgoing(pieces[i]), rank) for rank, i in others]
        return flight.messages(sends, [(parts[i], rank) for rank, i in others], _SCATTER_TAG, self._everyone)

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], ranks: Ranks, tag: int) -> Work:
        peers = [f"{describe(x)} to rank {dst}" for x, dst in sends]
        peers += [f"{describe(x)} from rank {src}" for x, src in receives]
        flight = InFlight(self, f"exchange {', '.join(peers)}, tag {tag}", ranks)
        leaving = [(flight.outgoing(x), dst) for x, dst in sends]
        arriving = [(flight.incoming(x), src) for x, src in receives]
        group = self._groups[ranks] if self.waits_hold_the_stream else self._everyone
        return flight.messages(leaving, arriving, tag, group)

    def _connect(self, ranks: Ranks) -> None:
        group = self._new_group(ranks, device_id=self._gpu)
        if self.rank in ranks:
            self._groups[ranks] = group

    @property
    def within(self) -> tuple[timedelta, ...]:
        """The timeout of a wait on gloo, which keeps that of its group's start else."""
        is_watched = self._watch is not None and not self.waits_hold_the_stream
        return (timedelta(seconds=_WATCHED * self._timeout),) if is_watched else ()

    @property
    def store(self) -> Any:
        """That of the process group, for what ranks post and nobody waits for."""
        return dist.distributed_c10d._get_default_store()

    def _new_group(self, ranks: Ranks, timeout: float | None = None, **options: Any) -> dist.ProcessGroup:
        """A group that every rank creates now, in one order; with `device_id` NCCL's communicator is there at once."""
        within = timedelta(seconds=timeout or self._timeout * (_WATCHED if self._watch else 1))
        with self.losing_peers(f"connect ranks {ranks}", self._ranks):
            group: dist.ProcessGroup = dist.new_group([*ranks], within, **options)
        return group

    def _capped(self) -> Any:
        """NCCL's options of a group for messages, where torch has them."""
        options = dist.ProcessGroupNCCL.Options() if hasattr(dist, "ProcessGroupNCCL") else None
        if options is not None and hasattr(options, "config"):
            options.config.max_ctas, options._timeout = _CTAS, timedelta(seconds=self._timeout)
        return options

    @contextmanager
    def losing_peers(self, what: str, ends: Ends) -> Iterator[None]:
        """Say which operation of which rank failed: what gloo raises names neither.  Note that this rank is in it."""
        self.waits.now = what, ends, time.monotonic()
        try:
            yield
            if not self.waits_hold_the_stream:
                self.waits.now = "", (), time.monotonic()
        except RuntimeError as error:
            if fails_by_itself(error):
                raise BackendError(f"rank {self.rank} of {self.world}: {what}: {cause(error)}") from error
            raise PeerLost(
                f"rank {self.rank} of {self.world}: {what}: {cause(error)}; a peer died, or did "
                f"not do its part within {self._timeout:g} s: look for the first error of the "
                f"other ranks"
            ) from error


def _flat(tensor: Tensor) -> Tensor:
    """The numbers of a contiguous tensor, as NCCL adds them: complex ones as two."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
