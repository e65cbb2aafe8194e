"""What simulated ranks refuse: errors of one rank, ranks that disagree, deadlocks, and what is left at the end."""

import time

import pytest
import torch

from splitc.runtime.transport.base import Deadlock, Mismatch, PeerLost, Transport
from splitc.runtime.transport.simulated import run_ranks
from tests.runtime.transport.test_simulated import Action, each_rank, idle, received
from tests.support.sampling import in_one

# errors of the program


def test_the_first_error_is_raised_with_its_rank_and_the_others_are_released() -> None:
    released = []

    def action(t: Transport) -> None:
        if t.rank == 1:
            raise KeyError("weights")
        try:
            t.irecv(torch.empty(1), 1).wait()
        except PeerLost as error:
            released.append((t.rank, str(error)))
            raise

    with pytest.raises(KeyError, match="weights") as caught:
        run_ranks(3, action)
    assert caught.value.__notes__ == ["raised by simulated rank 1 of 3"]
    assert sorted(released) == [(rank, f"rank {rank} is released: KeyError: 'weights'") for rank in (0, 2)]


def test_a_receive_of_another_shape_names_both() -> None:
    with pytest.raises(Mismatch, match=r"irecv \(4,\) float32 from rank 0, .* sent \(5,\) float32"):
        each_rank(lambda t: t.isend(torch.ones(5), 1).wait(), lambda t: received(t, torch.ones(4), 0))


@in_one
@pytest.mark.parametrize(
    ("other", "asked"),
    [
        (lambda t: t.all_reduce(torch.ones(3), (0, 1)), r"all_reduce \(3,\) float32"),
        (lambda t: t.all_reduce(torch.ones(2).double(), (0, 1)), r"all_reduce \(2,\) float64"),
        (lambda t: t.broadcast(torch.ones(2), 0, (0, 1)), r"broadcast \(2,\) float32 from rank 0"),
        (
            lambda t: t.reduce_scatter(torch.ones(2), [torch.ones(2)] * 2, (0, 1)),
            r"reduce_scatter \(2,\) float32 \+ .*",
        ),
        (lambda t: t.barrier(), "barrier"),
    ],
)
def test_members_of_a_collective_that_disagree_are_both_named(other: Action, asked: str) -> None:
    with pytest.raises(Mismatch) as caught:
        each_rank(lambda t: t.all_reduce(torch.ones(2), (0, 1)).wait(), lambda t: other(t))
    caught.match(r"rank 0: all_reduce \(2,\) float32 over ranks \(0, 1\)")
    caught.match(rf"rank 1: {asked} over ranks \(0, 1\)")


def test_ranks_that_were_not_connected_are_told_what_to_connect() -> None:
    def action(t: Transport) -> None:
        t.connect([(0, 1)] if t.rank == 2 else [])  # what one rank asks for holds for all
        if t.rank < 2:
            t.all_reduce(torch.ones(1), (0, 1)).wait()
        if t.rank > 0:
            with pytest.raises(
                ValueError, match=r"all_reduce over \(1, 2\), .* all ranks call connect\(\[\(1, 2\)\]\)"
            ):
                t.all_reduce(torch.ones(1), (1, 2))

    run_ranks(3, action)


# deadlocks


def deadlock(*actions: Action) -> str:
    """The text of the deadlock in which these actions end, at once and not by a time-out."""
    start = time.monotonic()
    with pytest.raises(Deadlock) as caught:
        run_ranks(len(actions), lambda t: actions[t.rank](t), timeout=600.0)
    assert time.monotonic() - start < 60
    return str(caught.value)


def test_a_wait_for_a_rank_that_has_finished_is_a_deadlock() -> None:
    text = deadlock(lambda t: received(t, torch.ones(2), 1), idle)
    assert "rank 0 waits: irecv (2,) float32 from rank 1, tag 0" in text
    assert "rank 1 has finished" in text


def test_a_wrong_tag_is_a_deadlock_that_shows_the_message_nobody_took() -> None:
    text = deadlock(lambda t: t.isend(torch.ones(2), 1, tag=1).wait(), lambda t: received(t, torch.ones(2), 0, tag=2))
    assert "rank 1 waits: irecv (2,) float32 from rank 0, tag 2" in text
    assert "not received: (2,) float32 from rank 0 to rank 1, tag 1" in text


def test_a_collective_that_one_member_does_not_join_is_a_deadlock() -> None:
    text = deadlock(
        lambda t: t.all_reduce(torch.ones(2), (0, 1, 2)).wait(),
        lambda t: t.all_reduce(torch.ones(2), (0, 1, 2)).wait(),
        lambda t: received(t, torch.ones(1), 0),
    )
    asked = "all_reduce (2,) float32 over ranks (0, 1, 2); not joined by rank 2"
    assert f"rank 0 waits: {asked}" in text
    assert f"rank 1 waits: {asked}" in text
    assert "rank 2 waits: irecv (1,) float32 from rank 0, tag 0" in text


def test_collectives_of_two_groups_in_crossed_order_are_a_deadlock() -> None:
    def action(t: Transport, *groups: tuple[int, ...]) -> None:
        t.connect(groups)
        for ranks in groups:
            if t.rank in ranks:
                t.all_reduce(torch.ones(1), ranks).wait()

    text = deadlock(
        lambda t: action(t, (0, 1), (0, 2)), lambda t: action(t, (1, 2), (0, 1)), lambda t: action(t, (0, 2), (1, 2))
    )
    assert text.count("all_reduce (1,) float32 over ranks") == 3


def test_a_rank_that_still_computes_keeps_the_others_from_a_deadlock() -> None:
    def late(t: Transport) -> None:
        time.sleep(0.2)
        t.isend(torch.tensor(7.0), 0).wait()

    def relay(t: Transport) -> None:
        t.isend(received(t, torch.tensor(0.0), 2), 1).wait()

    results = each_rank(relay, lambda t: received(t, torch.tensor(0.0), 0).item(), late)
    assert results[1] == 7.0


@pytest.mark.slow
def test_a_wait_longer_than_the_timeout_is_a_lost_peer() -> None:
    with pytest.raises(PeerLost, match=r"rank 0 waited 0.05 s: irecv \(1,\) float32 from rank 1"):
        run_ranks(2, lambda t: received(t, torch.ones(1), 1) if t.rank == 0 else time.sleep(0.3), timeout=0.05)


# what is left at the end


def test_a_message_nobody_received_is_named_at_the_end() -> None:
    with pytest.raises(Mismatch, match=r"\(2,\) float32 from rank 0 to rank 1, tag 4"):
        each_rank(lambda t: t.isend(torch.ones(2), 1, tag=4).wait(), idle)


def test_a_collective_somebody_missed_is_named_at_the_end_even_if_nobody_waited() -> None:
    with pytest.raises(Mismatch, match=r"all_reduce \(2,\) float32 .* not joined by rank 1"):
        each_rank(lambda t: t.all_reduce(torch.ones(2), (0, 1)), idle)
