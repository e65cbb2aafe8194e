"""Recursive doubling: right sums with the same bits on every rank, in Stanza's number of rounds."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from splitc.cost_models.network.alpha_beta import recursive_doubling_rounds
from splitc.runtime.transport.base import Transport, Work
from splitc.runtime.transport.doubling import all_reduce, sent_bytes
from tests.runtime.collectives.test_model_parallel import random
from tests.support.ranks import on_ranks
from tests.support.sampling import in_one
from tests.support.transitions import count_sent

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16]


@in_one
@pytest.mark.parametrize("n", [2, 3, 5, 6, 8])
def test_every_rank_has_the_same_bits_and_sends_what_is_counted(n: int) -> None:
    def action(transport: Transport) -> list[Tensor]:
        sent = count_sent(transport)
        results = []
        expected = 0
        for size in (1, 7, 130):
            for dtype in DTYPES:
                x = (random(transport.rank, size) * 100).to(dtype)
                all_reduce(transport, x, tuple(range(n))).wait()
                results.append(x)
                expected += sent_bytes(x.nbytes, transport.rank, n)
        assert sum(sent) == expected
        return results

    gotten = on_ranks(n, action)
    for others in gotten[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gotten[0], others, strict=True))
    parts = [random(rank, 130) * 100 for rank in range(n)]
    for sums, dtype in zip(gotten[0][-len(DTYPES) :], DTYPES, strict=True):
        exact = torch.stack([part.to(dtype).double() for part in parts]).sum(0)
        tolerance = 0.0 if not dtype.is_floating_point else 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(sums.double(), exact, rtol=tolerance, atol=500 * tolerance)


@in_one
@pytest.mark.parametrize("n", [2, 3, 5, 6, 8])
def test_the_number_of_rounds_is_stanzas(n: int) -> None:
    """Every message carries its round: one more than the last of those that its sender has sent or got before."""
    longest = math.floor(math.log2(n)) + (0 if n & (n - 1) == 0 else 2)
    assert recursive_doubling_rounds(n) == longest

    def action(transport: Transport) -> int:
        done = 0
        send, receive = transport._isend, transport._irecv

        class Then:
            def __init__(self, number: Tensor, *works: Work) -> None:
                self.number, self.works = number, works

            def wait(self) -> None:
                nonlocal done
                for work in self.works:
                    work.wait()
                done = max(done, int(self.number))

        def sending(tensor: Tensor, dst: int, tag: int) -> Work:
            number = torch.tensor(done + 1)
            return Then(number, send(number, dst, tag), send(tensor, dst, tag))

        def receiving(tensor: Tensor, src: int, tag: int) -> Work:
            number = torch.tensor(0)
            return Then(number, receive(number, src, tag), receive(tensor, src, tag))

        transport._isend = sending  # type: ignore[method-assign]
        transport._irecv = receiving  # type: ignore[method-assign]
        all_reduce(transport, torch.ones(3), tuple(range(n))).wait()
        return done

    assert max(on_ranks(n, action)) == longest


@in_one
@pytest.mark.parametrize("n", [3, 4, 6])
def test_sums_under_way_together_do_not_mix_in_whatever_order_they_are_waited_for(n: int) -> None:
    def action(transport: Transport) -> list[float]:
        tensors = [torch.tensor(10.0**power) for power in range(3)]
        works = [all_reduce(transport, tensor, tuple(range(n))) for tensor in tensors]
        for work in works if transport.rank % 2 else reversed(works):
            work.wait()
            work.wait()
        return [tensor.item() for tensor in tensors]

    assert on_ranks(n, action) == [[n * 1.0, n * 10.0, n * 100.0]] * n


def test_sums_of_groups_that_overlap_do_not_mix() -> None:
    """Rank 0 answers in the larger group only when it is waited for, rank 1 at once."""

    def action(transport: Transport) -> list[float]:
        groups = [ranks for ranks in ((0, 1, 2), (0, 1), (1, 2, 3)) if transport.rank in ranks]
        transport.connect(groups)
        tensors = [torch.tensor(10.0**transport.rank) for _ in groups]
        works = [all_reduce(transport, tensor, ranks) for tensor, ranks in zip(tensors, groups, strict=True)]
        for work in reversed(works):
            work.wait()
        return [tensor.item() for tensor in tensors]

    assert on_ranks(4, action) == [[111.0, 11.0], [111.0, 11.0, 1110.0], [111.0, 1110.0], [1110.0]]


def test_a_rank_outside_and_ranks_out_of_order_are_refused() -> None:
    for ranks in [(1, 2), (1, 0)]:
        with pytest.raises(ValueError, match="over"):
            on_ranks(3, partial(lambda ranks, transport: all_reduce(transport, torch.ones(1), ranks).wait(), ranks))
