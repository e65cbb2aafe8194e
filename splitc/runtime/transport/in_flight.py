"""An operation of torch.distributed under way, with the buffers that its tensors travel in."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Message, Ranks

# The dtypes that both gloo and NCCL can sum; int16 and the other small types are not among them.
_SUMMABLE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip

_NCCL = re.compile(r"^(nccl[A-Z]\w+): (.*)(?:\nLast error: *\n?(.*))?", re.MULTILINE)
_OF_A_PEER = re.compile("ncclRemoteError|timeout|timed out|abort|connect|socket|(remote|by) peer|store", re.IGNORECASE)


class InFlight:
    """One operation under way: torch's works, and the tensors that must live until they end.

    A tensor that the backend cannot use in place (on a GPU when staged, or not contiguous) travels as a copy, its
    buffer; `wait` copies back what has arrived.

    transport: the `TorchTransport` that it is on.  what: it does, for errors.  ends: its ranks.
    """

    def __init__(self, transport: Any, what: str, ends: Ranks) -> None:
        self._transport, self._ends, self._issued = transport, ends, time.monotonic()
        self._losing_peers = partial(transport.losing_peers, what, ends)
        self._staged, self._wire = transport.staged, torch.device("cpu") if transport.staged else transport.device
        self._is_over = False
        transport.under_way += 1
        self._works: list[dist.Work] = []
        self._buffers: list[Tensor] = []
        self._arrivals: list[tuple[Tensor, list[Tensor]]] = []  # a tensor and the buffers it is the sum of

    def outgoing(self, tensor: Tensor) -> Tensor:
        """The buffer to send `tensor` from."""
        buffer = tensor.detach().to(self._wire, copy=self._staged).contiguous().resolve_conj().resolve_neg()
        self._buffers.append(buffer)
        return buffer

    def incoming(self, tensor: Tensor) -> Tensor:
        """The buffer to receive `tensor` in."""
        tensor = tensor.detach()
        if self._staged or tensor.device != self._wire or not tensor.is_contiguous():
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._wire)
            self._arrivals.append((tensor, [buffer]))
            return buffer
        self._buffers.append(tensor)
        return tensor

    def summed(self, tensor: Tensor) -> Tensor:
        """The buffer to sum `tensor` in, of a dtype that backends can add."""
        tensor = tensor.detach()
        buffer = self.outgoing(tensor)
        buffer = buffer.to(summable(tensor.dtype))
        if buffer.data_ptr() != tensor.data_ptr():
            self._arrivals.append((tensor, [buffer]))
        return buffer

    def parts(self, tensor: Tensor, count: int, dtype: torch.dtype) -> list[Tensor]:
        """Buffers for the summands of `tensor`; the caller may replace one by another tensor."""
        parts = [torch.empty(tensor.shape, dtype=dtype, device=self._wire) for _ in range(count)]
        self._arrivals.append((tensor.detach(), parts))
        return parts

    def issue(self, operation: Any, *arguments: Any, **options: Any) -> InFlight:
        """Start one of torch's operations."""
        with self._losing_peers():
            works = operation(*arguments, **options)
        self._works += works if isinstance(works, list) else [works]
        return self

    def messages(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, group: Any) -> InFlight:
        """Start messages from and to buffers, on NCCL as one operation; empty ones are left out."""
        ends = [(dist.irecv, *each) for each in receives] + [(dist.isend, *each) for each in sends]
        operations = [dist.P2POp(end, as_bytes(x), peer, group, tag) for end, x, peer in ends if x.numel()]
        return self.issue(dist.batch_isend_irecv, operations)

    def when_complete(self, call: Callable[[], None]) -> bool:
        """Call `call` when the operation is complete; False for messages, whose completion gloo does not report."""
        if len(self._works) != 1:
            return False
        with suppress(RuntimeError):  # gloo's messages have no future
            self._works[0].get_future().add_done_callback(lambda _: call())
            return True
        return False

    def wait(self) -> None:
        begun = time.monotonic()
        while self._works:
            with self._losing_peers():
                self._works[0].wait(*self._transport.within)
            del self._works[0]
        for tensor, parts in self._arrivals:
            tensor.copy_(reduce(torch.add, parts))
        self._arrivals.clear()
        self._buffers.clear()
        if not self._is_over:
            self._is_over = True
            self._transport.under_way -= 1
            self._transport.waits.add(self._ends, self._issued, begun)


def summable(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which backends sum tensors of `dtype`."""
    if dtype in _SUMMABLE:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, flat."""
    return tensor.reshape(-1).view(torch.uint8)


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The memory of tensors that lie one behind the other, flat; None where they do not."""
    end, memory = parts[0].storage_offset(), parts[0].untyped_storage().data_ptr()
    for part in parts:
        if (part.untyped_storage().data_ptr(), part.storage_offset()) != (memory, end) or not part.is_contiguous():
            return None
        end += part.numel()
    return parts[0].as_strided([sum(part.numel() for part in parts)], [1])


def cause(error: RuntimeError) -> str:
    """The informative part of torch's message, without the C++ file name and general advice; of NCCL its last error."""
    if by_nccl := _NCCL.search(str(error)):
        kind, in_general, last = by_nccl.groups()
        return f"{kind}: {(last or in_general).strip()}"
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(". This is typically")[0]


def fails_by_itself(error: RuntimeError) -> bool:
    """Whether NCCL or CUDA names a cause on this rank, and not a peer that is late or gone."""
    by_nccl = isinstance(error, dist.DistBackendError) and not _OF_A_PEER.search(cause(error))
    return by_nccl or str(error).startswith("CUDA")
