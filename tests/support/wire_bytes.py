"""What ranks count in a step, what their transports see them send, and what their program is defined to send."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from splitc.compiled import CompiledProgram
from splitc.ir.wire import wire
from splitc.runtime.transport.base import Transport
from splitc.runtime.worker import Worker
from tests.support.ranks import on_workers, part_of


@dataclass
class Seen:
    """What a transport saw this rank send: bytes to each peer, and what its collectives cost by definition."""

    messages: Counter[int] = field(default_factory=Counter)
    collectives: float = 0.0

    def watch(self, transport: Transport) -> None:
        """Count from now on; a sum as on a ring, a gather once to each of the others, else what is not its own."""
        isend, all_reduce = transport._isend, transport._all_reduce
        all_gather, reduce_scatter = transport._all_gather, transport._reduce_scatter
        exchange = transport._exchange

        def sent(tensor: Tensor, dst: int, tag: int) -> Any:
            self.messages[dst] += tensor.nbytes
            return isend(tensor, dst, tag)

        def summed(tensor: Tensor, ranks: tuple[int, ...], maximum: bool = False) -> Any:
            self.collectives += 2 * (len(ranks) - 1) * tensor.nbytes / len(ranks)
            return all_reduce(tensor, ranks, maximum)

        def gathered(outputs: list[Tensor], tensor: Tensor, ranks: tuple[int, ...]) -> Any:
            self.collectives += (len(ranks) - 1) * tensor.nbytes
            return all_gather(outputs, tensor, ranks)

        def scattered(output: Tensor, pieces: Any, ranks: tuple[int, ...]) -> Any:
            self.collectives += sum(piece.nbytes for piece in pieces) - pieces[ranks.index(transport.rank)].nbytes
            return reduce_scatter(output, pieces, ranks)

        def exchanged(sends: Any, receives: Any, ranks: tuple[int, ...], tag: int) -> Any:
            messages = Counter(self.messages)
            work = exchange(sends, receives, ranks, tag)
            self.collectives += (self.messages - messages).total()
            self.messages = messages
            return work

        for name, watched in (
            ("_exchange", exchanged),
            ("_isend", sent),
            ("_all_reduce", summed),
            ("_all_gather", gathered),
            ("_reduce_scatter", scattered),
        ):
            setattr(transport, name, watched)


def counted(program: CompiledProgram, batch: tuple[Tensor, ...]) -> list[tuple[int, Seen]]:
    """For every rank, the bytes that it counts in one step, not the first, and what its transport saw in it."""

    def run(worker: Worker) -> tuple[int, Seen]:
        mine = part_of(worker, batch, program.plan.local_batches)
        worker.step(*mine)
        before, seen = worker.rank.sent_bytes, Seen()
        seen.watch(worker.rank.transport)
        worker.step(*mine)
        return worker.rank.sent_bytes - before, seen

    return on_workers(program, run)


def assert_defined(program: CompiledProgram, batch: tuple[Tensor, ...]) -> None:
    """Counted, defined and seen bytes agree on every rank; what an op divides between ranks, to a byte."""
    doubling = program.plan.all_reduce == "recursive_doubling"
    for rank, (bytes_, seen) in enumerate(counted(program, batch)):
        ops = wire(program.program, rank)
        whole = sum(op.sent for op in ops)
        assert abs(bytes_ - whole) <= len(ops), f"rank {rank} counts {bytes_}, defined {whole}: {[*map(str, ops)]}"
        assert abs(sum(seen.messages.values()) + seen.collectives - whole) <= len(ops), f"rank {rank}"
        messages = Counter[int]()
        for op in (op for op in ops if op.kind == "send"):
            messages[op.ranks[0]] += int(op.sent)
        if not doubling:  # which sends messages for a sum
            assert seen.messages == messages, f"rank {rank}"
