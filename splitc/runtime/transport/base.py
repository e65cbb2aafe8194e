"""The interface through which ranks communicate.

A rank sends, receives and reduces through one `Transport`, on processes under torchrun (`distributed`) or on threads
of one process (`simulated`).  Checks common to both are here, and so is the rule that empty tensors are not sent: both
sides know the shape, so both leave the message out.

Sums are not divided by the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .collective import Collective


class PeerLost(RuntimeError):
    """A peer died, closed its connection, or did not answer in time."""


class Deadlock(RuntimeError):
    """Every simulated rank waits, and nothing that could release one is on its way."""


class Mismatch(RuntimeError):
    """Simulated ranks disagree about a message or a collective: a bug in the program they run."""


class Work(Protocol):
    """An operation under way.  Keep it until `wait`: it keeps the tensors alive."""

    def wait(self) -> object:
        """Return when the operation is complete and its tensors may be read and reused.

        A second wait returns at once.  Raises PeerLost when a peer is gone.
        """


class CompletedWork:
    """The work of an operation that is complete already."""

    def wait(self) -> None:
        return


class AllOf:
    """Several works as one.  then: what is called once, when they are complete."""

    def __init__(self, works: Sequence[Work], *then: Callable[[], object]) -> None:
        self._works, self._then = works, then

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for call in self._then:
            call()
        self._then = ()


Message = tuple[Tensor, int]  # a tensor, and the rank at the other end
Ranks = tuple[int, ...]  # sorted


def describe(tensor: Tensor) -> str:
    """Shape and dtype for messages: `(64, 9216) float32`."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def describe_all(tensors: Sequence[Tensor]) -> str:
    """The same of several tensors: `(2, 5) float32 + (0, 5) float32`."""
    return " + ".join(map(describe, tensors))


class Transport(ABC):
    """One rank's access to the others.

    Operations on tensors are asynchronous: until their work's `wait` returns, their tensors must not be touched.
    Between two ranks, messages of one tag arrive in the order in which they were sent.  Ranks that share several
    communicators must use them in one order.  What is done among some of the ranks needs `connect` of these before.

    rank, world: this rank, and the number of ranks.  device: of this rank's tensors.
    sent_bytes: payload that this rank has sent in tensors so far, as `Collective` defines it.
    """

    rank: int
    world: int
    device: torch.device
    sent_bytes: int = 0
    _connected: frozenset[Ranks] = frozenset()

    @property
    def waits_hold_the_stream(self) -> bool:
        """Whether a wait blocks the GPU's current stream and not the host, as NCCL's do.

        Then a chain of operations that depend on each other can be issued at once.
        """
        return False

    def when_complete(self, work: Work, call: Callable[[], None]) -> bool:
        """Call `call`, from any thread, when `work` is complete, if the backend reports that before a wait.

        Returns whether it will: gloo reports collectives, not messages.
        """
        return False

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Start to send `tensor`, contiguous or not, to rank `dst`.

        Raises ValueError when `dst` is this rank or no rank: same-rank edges are elided when the
        program is compiled.
        """
        self._check_peer("isend to", dst, tag)
        self._count(Collective.SEND, tensor.nbytes, tensor.nbytes)
        return self._isend(tensor, dst, tag) if tensor.numel() else CompletedWork()

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Start to fill `tensor` with the next message of rank `src` that has this tag.

        Raises ValueError when `src` is this rank or no rank.
        """
        self._check_peer("irecv from", src, tag)
        return self._irecv(tensor, src, tag) if tensor.numel() else CompletedWork()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], ranks: Ranks, tag: int = 0) -> Work:
        """Start several messages among `ranks` as one operation: each a tensor and its destination, or source.

        NCCL runs messages one after the other, so two ranks that exchange tensors need this.
        Raises ValueError when a peer is this rank or none of `ranks`.
        """
        self._check_group("exchange", ranks)
        for _, peer in (*sends, *receives):
            self._check_peer("exchange with", peer, tag)
            if peer not in ranks:
                raise ValueError(f"exchange with rank {peer}, which is not one of the ranks {ranks}")
        sends = [(tensor, dst) for tensor, dst in sends if tensor.numel()]
        for tensor, _ in sends:
            self._count(Collective.SEND, tensor.nbytes, tensor.nbytes)
        receives = [(tensor, src) for tensor, src in receives if tensor.numel()]
        return self._exchange(sends, receives, ranks, tag) if sends or receives else CompletedWork()

    def all_reduce(self, tensor: Tensor, ranks: Ranks, maximum: bool = False) -> Work:
        """Start to replace `tensor` by its sum, or `maximum`, over `ranks`, a sorted tuple that holds this one."""
        self._check_group("all_reduce", ranks)
        self._count(Collective.ALL_REDUCE, tensor.nbytes, tensor.nbytes, len(ranks))
        return self._all_reduce(tensor, ranks, maximum) if tensor.numel() and len(ranks) > 1 else CompletedWork()

    def summed(self, tensor: Tensor, ranks: Ranks, name: str) -> Work:
        """Start to replace `tensor` by its sum, which has the same name in every step (`Short.summed`)."""
        return self.all_reduce(tensor, ranks)

    def broadcast(self, tensor: Tensor, src: int, ranks: Ranks) -> Work:
        """Start to replace `tensor` on all `ranks` by that of the global rank `src`."""
        self._check_group("broadcast", ranks)
        if src not in ranks:
            raise ValueError(f"broadcast from rank {src}, which is not one of the ranks {ranks}")
        own = tensor.nbytes if src == self.rank else 0  # a gather of what one rank has
        self._count(Collective.ALL_GATHER, tensor.nbytes, own, len(ranks))
        return self._broadcast(tensor, src, ranks) if tensor.numel() and len(ranks) > 1 else CompletedWork()

    def all_gather(self, outputs: list[Tensor], tensor: Tensor, ranks: Ranks) -> Work:
        """Start to fill `outputs[i]` with the tensor of `ranks[i]`, on every one of `ranks`.

        The outputs may differ in one dim: every rank must know all their shapes.
        Raises ValueError when their number, or the shape of this rank's own, does not fit.
        """
        self._check_group("all_gather", ranks)
        own, is_alone = self._own_part("all_gather", outputs, tensor, ranks)
        if is_alone:
            own.detach().copy_(tensor.detach())
        self._count(Collective.ALL_GATHER, 0, tensor.nbytes, len(ranks))
        return CompletedWork() if is_alone else self._all_gather(outputs, tensor, ranks)

    def reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], ranks: Ranks) -> Work:
        """Start to fill `output` with the sum over `ranks` of the pieces meant for this rank.

        `pieces[i]` is this rank's summand for `ranks[i]`.  Pieces for different ranks may differ in one dim.  Each is
        sent once, directly to its rank, which sums them in rank order; on NCCL the order is NCCL's.
        Raises ValueError when the number of pieces, or the shape of this rank's own, does not fit.
        """
        self._check_group("reduce_scatter", ranks)
        own, is_alone = self._own_part("reduce_scatter", pieces, output, ranks)
        if is_alone:
            output.detach().copy_(own.detach())
        self._count(Collective.REDUCE_SCATTER, sum(piece.nbytes for piece in pieces), own.nbytes, len(ranks))
        return CompletedWork() if is_alone else self._reduce_scatter(output, pieces, ranks)

    def connect(self, groups: Iterable[Ranks]) -> None:
        """Create the communicators of the `groups` of all ranks.  Collective over all ranks, whatever groups they give.

        Every rank creates all of them, in one order, as communicators that are split from another one need it.
        """
        asked = {ranks for own in self.all_gather_objects(set(groups)) for ranks in own if 1 < len(ranks) < self.world}
        for ranks in sorted(asked - self._connected):
            self._connect(ranks)
        self._connected |= asked

    @abstractmethod
    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return rank `src`'s picklable `value` on every rank; the others' values are ignored."""

    @abstractmethod
    def gather_objects(self, value: Any, dst: int = 0) -> list[Any] | None:
        """Return all ranks' picklable values in rank order on rank `dst`, None elsewhere."""

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return all ranks' picklable values in rank order on every rank."""
        values: list[Any] = self.broadcast_object(self.gather_objects(value))
        return values

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called this."""

    def side_group(self) -> Transport | None:
        """A transport of objects and messages on the CPU for another thread of each rank; None: none can have one.

        Collective.
        """
        return None

    def apart(self, timeout: float | None = None) -> Transport | None:
        """A transport like this one on connections of its own; None: there can be none.

        timeout: seconds that a rank waits on it for another one; None: as on this one.  Collective.
        """
        return None

    def decided(self, numbers: Tensor) -> list[bool]:
        """Which of the numbers are not 0, for what a rank does next."""
        return list(map(bool, numbers.tolist()))

    def watch(self, training: Any) -> None:
        """Let every rank say why when one waits in vain in this training, and end them all.  Collective."""
        return

    def close(self) -> None:
        """Close the connections that this transport made, if any, after all work is complete.

        One that is `apart` may be given up with all that is under way: other ranks that wait for this one fail.
        """
        return

    @abstractmethod
    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work: ...

    @abstractmethod
    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work: ...

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, ranks: Ranks, maximum: bool = False) -> Work: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, src: int, ranks: Ranks) -> Work: ...

    @abstractmethod
    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, ranks: Ranks) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], ranks: Ranks) -> Work: ...

    def _connect(self, ranks: Ranks) -> None:
        """Create the communicator of `ranks`, of which this one may be none, where there is one."""
        return

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], ranks: Ranks, tag: int) -> Work:
        arriving = [self._irecv(tensor, src, tag) for tensor, src in receives]
        return AllOf([*arriving, *(self._isend(tensor, dst, tag) for tensor, dst in sends)])

    def _count(self, collective: Collective, nbytes: int, own: int, ranks: int = 2) -> None:
        """Add the whole bytes of an operation to those sent; rounding keeps the last digits of a division out."""
        self.sent_bytes += int(round(collective.sent(nbytes, own, ranks), 3))

    def _own_part(self, what: str, parts: Sequence[Tensor], like: Tensor, ranks: Ranks) -> tuple[Tensor, bool]:
        """This rank's of the parts, one for each rank, which is to be like a tensor; whether nothing travels."""
        if len(parts) != len(ranks):
            raise ValueError(f"{what} with {len(parts)} parts among {len(ranks)} ranks")
        own = parts[ranks.index(self.rank)]
        if describe(own) != describe(like):
            raise ValueError(f"{what} of {describe(like)}, but rank {self.rank}'s own part is {describe(own)}")
        return own, len(ranks) == 1 or not any(part.numel() for part in parts)

    def _check_peer(self, what: str, peer: int, tag: int) -> None:
        if peer == self.rank or not 0 <= peer < self.world:
            raise ValueError(f"{what} rank {peer} on rank {self.rank} of {self.world}: the peer must be another rank")
        if tag < 0:
            raise ValueError(f"{what} rank {peer} with tag {tag}: a tag must not be negative")

    def _check_group(self, what: str, ranks: Ranks) -> None:
        if list(ranks) != sorted(set(ranks)) or not set(ranks) <= set(range(self.world)):
            raise ValueError(f"{what} over {ranks}: ranks must be sorted, different and below {self.world}")
        if self.rank not in ranks:
            raise ValueError(f"{what} over {ranks} on rank {self.rank}, which is not one of them")
        if 1 < len(ranks) < self.world and ranks not in self._connected:
            raise ValueError(f"{what} over {ranks}, which have no communicator: let all ranks call connect([{ranks}])")
