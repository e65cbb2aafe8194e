"""Ranks as threads: what arrives, and which calls are refused."""

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from splitc.runtime.transport.base import Transport, Work
from splitc.runtime.transport.simulated import run_ranks
from tests.support.sampling import in_one

Action = Callable[[Transport], Any]


def each_rank(*actions: Action) -> list[Any]:
    """Run one action on each rank; a deadlock that goes unseen fails after 5 s."""
    return run_ranks(len(actions), lambda t: actions[t.rank](t))


def received(t: Transport, like: Tensor, src: int, tag: int = 0) -> Tensor:
    tensor = torch.zeros_like(like)
    t.irecv(tensor, src, tag).wait()
    return tensor


def idle(t: Transport) -> None:
    pass


# messages


def test_a_transport_counts_what_its_operations_are_defined_to_send() -> None:
    def rank(t: Transport) -> list[int]:
        others, value, found = [r for r in range(3) if r != t.rank], torch.ones(t.rank + 1), [0]
        gathered, pieces = [torch.empty(r + 1) for r in range(3)], [torch.ones(r + 1) for r in range(3)]
        starts: list[Callable[[], Work]] = [
            lambda: t.exchange([(value, r) for r in others], [(torch.empty(r + 1), r) for r in others], (0, 1, 2)),
            lambda: t.all_reduce(torch.ones(4), (0, 1, 2)),
            lambda: t.all_gather(gathered, value, (0, 1, 2)),
            lambda: t.reduce_scatter(torch.empty(t.rank + 1), pieces, (0, 1, 2)),
            lambda: t.broadcast(torch.ones(5), 1, (0, 1, 2)),
        ]
        for start in starts:
            start().wait()
            found.append(t.sent_bytes)
        return [after - before for before, after in pairwise(found)]

    own = [4 * (r + 1) for r in range(3)]
    assert run_ranks(3, rank) == [
        [2 * own[r], 2 * 2 * 16 // 3, 2 * own[r], sum(own) - own[r], 40 if r == 1 else 0] for r in range(3)
    ]


def test_a_message_arrives_as_it_was_when_it_was_sent() -> None:
    x = torch.arange(6.0).reshape(2, 3)

    def sender(t: Transport) -> None:
        mine = x.clone()
        work = t.isend(mine, 1)
        mine.zero_()
        work.wait()

    assert torch.equal(each_rank(sender, lambda t: received(t, x, 0))[1], x)


def test_empty_tensors_travel_nowhere() -> None:
    def action(t: Transport) -> None:
        empty = torch.empty(0, 3)
        if t.rank == 0:  # rank 1 takes no part, and nobody misses it
            t.isend(empty, 1).wait()
            t.irecv(empty, 1).wait()
            t.all_reduce(empty, (0, 1)).wait()
            t.broadcast(empty, 1, (0, 1)).wait()
            t.all_gather([empty, empty], empty, (0, 1)).wait()
            t.reduce_scatter(empty, [empty, empty], (0, 1)).wait()
            t.exchange([(empty, 1)], [(empty, 1)], (0, 1)).wait()

    run_ranks(2, action)


@in_one
@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_peer_that_is_oneself_or_does_not_exist_is_refused(peer: int) -> None:
    for issue in ("isend", "irecv"):
        with pytest.raises(ValueError, match=f"{issue} .*rank {peer} on rank 0 of 2"):
            each_rank(partial(lambda issue, t: getattr(t, issue)(torch.ones(1), peer), issue), idle)


# collectives


def test_sums_are_taken_in_rank_order_whoever_comes_first() -> None:
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(s)) for s in range(4)]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]

    def action(t: Transport, late: int) -> Tensor:
        x = parts[t.rank].clone()
        time.sleep(0.02 * ((t.rank + late) % 4))
        t.all_reduce(x, (0, 1, 2, 3)).wait()
        return x

    for late in range(4):
        for result in run_ranks(4, partial(action, late=late)):
            assert torch.equal(result, expected)


def test_a_source_may_broadcast_what_its_backward_still_needs() -> None:
    def action(t: Transport) -> None:
        h = torch.ones(2, requires_grad=True).exp()  # exp saves its output
        t.broadcast(h, 0, (0, 1)).wait()
        if t.rank == 0:
            h.sum().backward()

    run_ranks(2, action)


def test_reduce_scatter_adds_in_rank_order_and_leaves_the_pieces_alone() -> None:
    parts = [torch.randn(2, 100, generator=torch.Generator().manual_seed(s)) for s in range(2)]

    def action(t: Transport) -> Tensor:
        pieces = list(parts[t.rank].clone())
        work = t.reduce_scatter(own := torch.zeros(100), pieces, (0, 1))
        work.wait()
        work.wait()
        assert torch.equal(torch.stack(pieces), parts[t.rank])
        return own

    for rank, own in enumerate(run_ranks(2, action)):
        assert torch.equal(own, parts[0][rank] + parts[1][rank])


@in_one
@pytest.mark.parametrize("ranks", [(1, 0), (0, 0, 1), (0, 5), (1,)])
def test_a_group_that_is_unsorted_too_high_or_foreign_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="all_reduce over"):
        each_rank(lambda t: t.all_reduce(torch.ones(1), ranks), idle)


def test_all_gather_refuses_outputs_that_do_not_fit() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="all_gather with 1 parts among 2 ranks"):
        run_ranks(2, lambda t: t.all_gather([x], x, (0, 1)))
    with pytest.raises(ValueError, match=r"own part is \(3,\) float32"):
        each_rank(lambda t: t.all_gather([torch.ones(3), x], x, (0, 1)), idle)


def test_reduce_scatter_refuses_pieces_that_do_not_fit() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="reduce_scatter with 1 parts among 2 ranks"):
        run_ranks(2, lambda t: t.reduce_scatter(x, [x], (0, 1)))
    with pytest.raises(ValueError, match=r"of \(3,\) float32, but rank 0's own part is \(2,\) float32"):
        each_rank(lambda t: t.reduce_scatter(torch.ones(3), [x, x], (0, 1)), idle)


# objects


def test_objects_are_broadcast_and_gathered_as_copies() -> None:
    shared = {"plan": [1, 2]}

    def action(t: Transport) -> tuple[Any, Any, Any]:
        plan = t.broadcast_object(shared if t.rank == 1 else None, src=1)
        plan["plan"].append(t.rank)
        gathered = t.gather_objects(plan, dst=2)
        t.barrier()
        return plan, gathered, t.all_gather_objects("abc"[t.rank])

    results = run_ranks(3, action)
    plans = [{"plan": [1, 2, rank]} for rank in range(3)]
    everyone = ["a", "b", "c"]
    assert results == [(plans[0], None, everyone), (plans[1], None, everyone), (plans[2], plans, everyone)]
    assert shared == {"plan": [1, 2]}


# together
