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


def test_results_come_in_rank_order() -> None:
    assert run_ranks(4, lambda t: (t.rank, t.world, t.device.type)) == [(rank, 4, "cpu") for rank in range(4)]


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot run 0 ranks"):
        run_ranks(0, idle)


def test_a_message_arrives_as_it_was_when_it_was_sent() -> None:
    x = torch.arange(6.0).reshape(2, 3)

    def sender(t: Transport) -> None:
        mine = x.clone()
        work = t.isend(mine, 1)
        mine.zero_()
        work.wait()

    assert torch.equal(each_rank(sender, lambda t: received(t, x, 0))[1], x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64])
def test_every_dtype_travels(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert torch.equal(each_rank(lambda t: t.isend(x, 1).wait(), lambda t: received(t, x, 0))[1], x)


def test_a_tensor_that_is_not_contiguous_or_is_a_scalar_can_be_sent() -> None:
    x, y = torch.arange(6.0).reshape(2, 3).t(), torch.tensor(3.5)

    def sender(t: Transport) -> None:
        t.isend(x, 1).wait()
        t.isend(y, 1).wait()

    _, (gotten_x, gotten_y) = each_rank(sender, lambda t: (received(t, torch.empty(3, 2), 0), received(t, y, 0)))
    assert torch.equal(gotten_x, x)
    assert torch.equal(gotten_y, y)


def test_messages_of_one_tag_arrive_in_order_and_tags_keep_apart() -> None:
    def sender(t: Transport) -> None:
        for value, tag in [(1.0, 7), (2.0, 8), (3.0, 7)]:
            t.isend(torch.tensor(value), 1, tag).wait()

    def receiver(t: Transport) -> list[float]:
        return [received(t, torch.tensor(0.0), 0, tag).item() for tag in (8, 7, 7)]

    assert each_rank(sender, receiver)[1] == [2.0, 1.0, 3.0]


def test_the_order_of_irecv_decides_and_not_the_order_of_wait() -> None:
    def sender(t: Transport) -> None:
        for value in (1.0, 2.0):
            t.isend(torch.tensor(value), 1).wait()

    def receiver(t: Transport) -> list[float]:
        first, second = torch.tensor(0.0), torch.tensor(0.0)
        works = [t.irecv(first, 0), t.irecv(second, 0)]
        for work in reversed(works):
            work.wait()
        return [first.item(), second.item()]

    assert each_rank(sender, receiver)[1] == [1.0, 2.0]


def test_a_second_wait_does_nothing() -> None:
    def receiver(t: Transport) -> float:
        x = torch.tensor(0.0)
        work = t.irecv(x, 0)
        work.wait()
        x.fill_(9.0)
        work.wait()
        return x.item()

    assert each_rank(lambda t: t.isend(torch.tensor(1.0), 1).wait(), receiver)[1] == 9.0


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


def test_a_leaf_that_requires_grad_can_be_sent_and_filled() -> None:
    def action(t: Transport) -> float:
        weight = torch.nn.Parameter(torch.full((2,), float(t.rank)))
        t.broadcast(weight, 1, (0, 1)).wait()
        t.all_reduce(weight, (0, 1)).wait()
        return weight.sum().item()

    assert run_ranks(2, action) == [4.0, 4.0]


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_peer_that_is_oneself_or_does_not_exist_is_refused(peer: int) -> None:
    for issue in ("isend", "irecv"):
        with pytest.raises(ValueError, match=f"{issue} .*rank {peer} on rank 0 of 2"):
            each_rank(partial(lambda issue, t: getattr(t, issue)(torch.ones(1), peer), issue), idle)


def test_a_negative_tag_is_refused() -> None:
    with pytest.raises(ValueError, match="tag -1"):
        each_rank(lambda t: t.isend(torch.ones(1), 1, -1), idle)


# collectives


def test_all_reduce_sums_over_its_group_only() -> None:
    def action(t: Transport) -> list[float]:
        x = torch.tensor([1.0, 10.0]) * (t.rank + 1)
        if t.rank != 1:
            t.all_reduce(x, (0, 2)).wait()
        return x.tolist()

    assert run_ranks(3, action) == [[4.0, 40.0], [2.0, 20.0], [4.0, 40.0]]


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


def test_all_reduces_under_way_together_do_not_mix() -> None:
    def action(t: Transport) -> list[float]:
        tensors = [torch.tensor(10.0**power) for power in range(3)]
        works = [t.all_reduce(tensor, (0, 1)) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        return [tensor.item() for tensor in tensors]

    assert run_ranks(2, action) == [[2.0, 20.0, 200.0]] * 2


def test_an_all_reduce_may_be_a_view_of_every_second_element() -> None:
    def action(t: Transport) -> list[float]:
        x = torch.ones(4)
        t.all_reduce(x[::2], (0, 1)).wait()
        return x.tolist()

    assert run_ranks(2, action) == [[2.0, 1.0, 2.0, 1.0]] * 2


def test_broadcast_takes_the_value_of_its_source() -> None:
    def action(t: Transport) -> float:
        x = torch.tensor(float(t.rank))
        t.broadcast(x, 2, (0, 1, 2)).wait()
        return x.item()

    assert run_ranks(3, action) == [2.0] * 3


def test_a_source_may_broadcast_what_its_backward_still_needs() -> None:
    def action(t: Transport) -> None:
        h = torch.ones(2, requires_grad=True).exp()  # exp saves its output
        t.broadcast(h, 0, (0, 1)).wait()
        if t.rank == 0:
            h.sum().backward()

    run_ranks(2, action)


def test_all_gather_takes_pieces_of_unequal_first_dims() -> None:
    def action(t: Transport) -> list[float]:
        whole = torch.zeros(3, 2)
        pieces = list(whole.split([1, 0, 2]))
        t.all_gather(pieces, torch.full_like(pieces[t.rank], t.rank + 1.0), (0, 1, 2)).wait()
        return whole.flatten().tolist()

    assert run_ranks(3, action) == [[1.0, 1.0, 3.0, 3.0, 3.0, 3.0]] * 3


def test_reduce_scatter_gives_each_rank_the_sum_of_its_pieces() -> None:
    def action(t: Transport) -> list[float]:
        whole = torch.arange(10.0).reshape(2, 5) * 10**t.rank
        pieces = whole.split([1, 0, 4], dim=1)  # not contiguous, unequal, one empty
        own = torch.zeros_like(pieces[t.rank])
        t.reduce_scatter(own, pieces, (0, 1, 2)).wait()
        return own.flatten().tolist()

    expected = [[0.0, 555.0], [], [value * 111.0 for value in (1, 2, 3, 4, 6, 7, 8, 9)]]
    assert run_ranks(3, action) == expected


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


def test_an_exchange_crosses_messages() -> None:
    def action(t: Transport) -> list[float]:
        here, there = torch.tensor([1.0, 2.0]) + t.rank, torch.zeros(2)
        t.exchange([(here, 1 - t.rank)], [(there, 1 - t.rank)], (0, 1), tag=3).wait()
        return there.tolist()

    assert run_ranks(2, action) == [[2.0, 3.0], [1.0, 2.0]]


def test_a_group_of_one_rank_meets_nobody() -> None:
    def action(t: Transport) -> list[float]:
        x, output = torch.tensor([5.0]), torch.zeros(1)
        t.all_reduce(x, (t.rank,)).wait()
        t.broadcast(x, t.rank, (t.rank,)).wait()
        t.all_gather([output], x, (t.rank,)).wait()
        own = torch.zeros(1)
        t.reduce_scatter(own, [x], (t.rank,)).wait()
        return [x.item(), output.item(), own.item()]

    assert run_ranks(2, action) == [[5.0, 5.0, 5.0]] * 2


@pytest.mark.parametrize("ranks", [(1, 0), (0, 0, 1), (0, 5), (1,)])
def test_a_group_that_is_unsorted_too_high_or_foreign_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="all_reduce over"):
        each_rank(lambda t: t.all_reduce(torch.ones(1), ranks), idle)


def test_connect_leaves_the_groups_of_other_ranks_alone() -> None:
    run_ranks(3, lambda t: t.connect([(0, 1), (0, 2), (1,), (0, 1)]))
    with pytest.raises(ValueError, match="connect over"):
        run_ranks(2, lambda t: t.connect([(1, 0)]))


def test_all_gather_refuses_outputs_that_do_not_fit() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="into 1 outputs from 2 ranks"):
        run_ranks(2, lambda t: t.all_gather([x], x, (0, 1)))
    with pytest.raises(ValueError, match=r"own output is \(3,\) float32"):
        each_rank(lambda t: t.all_gather([torch.ones(3), x], x, (0, 1)), idle)


def test_reduce_scatter_refuses_pieces_that_do_not_fit() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="of 1 pieces to 2 ranks"):
        run_ranks(2, lambda t: t.reduce_scatter(x, [x], (0, 1)))
    with pytest.raises(ValueError, match=r"into \(3,\) float32, but the piece for rank 0 is \(2,\) float32"):
        each_rank(lambda t: t.reduce_scatter(torch.ones(3), [x, x], (0, 1)), idle)


def test_an_exchange_refuses_oneself_and_strangers() -> None:
    for peer in (0, 2):
        with pytest.raises(ValueError, match=f"exchange with rank {peer}"):
            each_rank(partial(lambda peer, t: t.exchange([], [(torch.ones(1), peer)], (0, 1)), peer), idle, idle)


def test_broadcast_refuses_a_source_outside_its_group() -> None:
    with pytest.raises(ValueError, match="broadcast from rank 2"):
        run_ranks(3, lambda t: t.broadcast(torch.ones(1), 2, (0, 1)) if t.rank < 2 else None)


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


def test_nobody_passes_a_barrier_before_the_last_has_come() -> None:
    came = []

    def action(t: Transport) -> int:
        time.sleep(0.02 * t.rank)
        came.append(t.rank)
        t.barrier()
        return len(came)

    assert run_ranks(3, action) == [3, 3, 3]


# together


def test_autograd_runs_inside_the_ranks() -> None:
    """Two stages on two ranks give the gradients of one process, bit for bit."""
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    first, second = torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)
    second(first(x)).square().sum().backward()
    expected = [first.weight.grad, second.weight.grad]

    def below(t: Transport) -> Tensor | None:
        stage = torch.nn.Linear(3, 5)
        stage.load_state_dict(first.state_dict())
        out = stage(x)
        t.isend(out, 1).wait()
        out.backward(received(t, out, 1))
        return stage.weight.grad

    def above(t: Transport) -> Tensor | None:
        stage = torch.nn.Linear(5, 2)
        stage.load_state_dict(second.state_dict())
        cut = received(t, torch.empty(4, 5), 0).requires_grad_()
        stage(cut).square().sum().backward()
        assert cut.grad is not None
        t.isend(cut.grad, 0).wait()
        return stage.weight.grad

    for ours, theirs in zip(each_rank(below, above), expected, strict=True):
        assert theirs is not None
        assert torch.equal(ours, theirs)


def test_many_ranks_pass_many_messages() -> None:
    def action(t: Transport) -> float:
        total = torch.zeros(())
        for step in range(20):
            work = t.isend(torch.tensor(float(t.rank)), (t.rank + 1) % t.world, step % 3)
            total += received(t, total, (t.rank - 1) % t.world, step % 3)
            work.wait()
            t.all_reduce(total, tuple(range(t.world))).wait()
            total /= t.world
        return total.item()

    assert len(set(run_ranks(16, action))) == 1
