"""A rank's communication: who gets which examples, also of smaller batches, and when a step ends."""

from __future__ import annotations

from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.errors import LaunchError
from splitc.ir.plan import Plan
from splitc.runtime.rank import Rank
from splitc.runtime.role_comm import RoleComm
from splitc.runtime.spec import StepContext
from splitc.runtime.transport.base import PeerLost, Transport
from tests.support.ranks import begin, comm_of, context_of, on_comms, on_ranks, plan_of, rank_of, rank_spec
from tests.support.sampling import along, in_one

ONE_TO_ONE = plan_of(conv=(0, 4), fc=(0, 4))
MANY_TO_ONE = plan_of(conv=(0, 3, 8), fc=(0, 8))
ONE_TO_MANY = plan_of(conv=(0, 8), fc=(0, 3, 5, 8))
MANY_TO_MANY = plan_of(conv=(0, 2, 5, 8), fc=(0, 4, 8))
PLANS = [ONE_TO_ONE, MANY_TO_ONE, ONE_TO_MANY, MANY_TO_MANY]


def there_and_back(plan: Plan, value: Tensor, dim: int, rows: int, sizes: tuple[int, ...] | None) -> list[Tensor]:
    """What each fc rank receives of `value`, and then each conv rank of what they send back doubled; in rank order."""
    shape = tuple(-1 if d == dim else n for d, n in enumerate(value.shape))

    def run(transport: Transport) -> Tensor:
        rank = rank_of(plan, transport)
        with rank.step(context_of(rank, sizes)) as (comm,):
            first, last = comm.counted.own
            if comm.role == "conv":
                comm.send(value.narrow(dim, first * rows, (last - first) * rows), "fc", dim, rows)
                return comm.recv("fc", shape, value.dtype, rows)
            received = comm.recv("conv", shape, value.dtype, rows)
            comm.send(received * 2, "conv", dim, rows)
            return received

    return on_ranks(plan.world, run)


@in_one
@along(plan=[*PLANS, *PLANS], layout=[(0, 1), (1, 1), (0, 3), (2, 2), (0, 3)])
def test_every_rank_receives_its_examples_and_their_owners_get_them_back(plan: Plan, layout: tuple[int, int]) -> None:
    dim, rows = layout
    shape = [2, 3, 5]
    shape[dim] = plan.global_batch * rows
    value = torch.arange(torch.Size(shape).numel()).reshape(shape)
    received = there_and_back(plan, value, dim, rows, None)
    conv, fc = plan.roles["conv"], plan.roles["fc"]
    assert torch.equal(torch.cat([received[rank] for rank in fc], dim), value)
    assert torch.equal(torch.cat([received[rank] for rank in conv], dim), value * 2)
    for role, ranks in plan.roles.items():
        for rank in ranks:
            assert received[rank].shape[dim] == plan.batch(role, rank) * rows


TAILS = [
    (MANY_TO_ONE, (1, 5)),
    (MANY_TO_ONE, (3, 1)),
    (ONE_TO_MANY, (4,)),
    (MANY_TO_MANY, (1, 3, 2)),
    (MANY_TO_MANY, (4, 6, 6)),
]


@in_one
@pytest.mark.parametrize(("plan", "sizes"), TAILS)
def test_in_a_batch_of_another_size_every_boundary_moves_with_its_readers(plan: Plan, sizes: tuple[int, ...]) -> None:
    value = torch.arange(sum(sizes) * 2).reshape(-1, 2)
    received = there_and_back(plan, value, 0, 1, sizes)
    conv, fc = plan.roles["conv"], plan.roles["fc"]
    assert [len(received[rank]) for rank in conv] == list(sizes)
    assert torch.equal(torch.cat([received[rank] for rank in fc]), value)
    assert torch.equal(torch.cat([received[rank] for rank in conv]), value * 2)


def test_a_boundary_inside_a_readers_part_divides_it_in_proportion() -> None:
    def run(transport: Transport) -> list[tuple[int, int]]:
        rank = rank_of(plan_of(conv=(0, 8, 16), fc=(0, 4, 16)), transport)
        begin(rank, (4, 8))
        smaller = rank.comms[0].counted.own
        begin(rank)
        return [smaller, rank.comms[0].counted.own]

    assert on_ranks(4, run)[2:] == [[(0, 2), (0, 4)], [(2, 12), (4, 16)]]


def test_whatever_the_sizes_the_parts_of_a_role_are_the_batch_without_gap_or_overlap() -> None:
    for plan, size in product(PLANS, range(1, 12)):
        sizes = tuple(size + k for k in range(len(plan.roles["conv"])))
        step = StepContext(plan.batch_offsets[plan.reader], tuple(accumulate(sizes, initial=0)))
        for role, ranks in plan.roles.items():
            parts = [step.interval(plan.interval(role, index)) for index in ranks]
            assert parts[0][0] == 0 and parts[-1][1] == sum(sizes)
            assert all(before[1] == after[0] for before, after in pairwise(parts))


def test_a_piece_without_examples_is_not_sent_and_not_waited_for() -> None:
    plan = plan_of(conv=(0, 4, 8), fc=(0, 5, 8))  # with sizes (4, 2) the fifth example is none
    value = torch.arange(6)
    received = there_and_back(plan, value, 0, 1, (4, 2))
    assert [len(part) for part in received] == [4, 2, 4, 2]
    assert torch.equal(torch.cat(received[2:]), value)


def test_sizes_that_leave_a_rank_without_examples_are_refused_on_every_rank_alike() -> None:
    def refused(transport: Transport) -> str:
        rank = rank_of(ONE_TO_MANY, transport)
        with pytest.raises(LaunchError) as caught:
            rank.batch_offsets((2,))
        return str(caught.value)

    (text,) = set(on_ranks(4, refused))
    assert text == "a batch of 2 examples leaves rank 1 without any; give each reader more"


def test_a_step_ends_only_when_all_that_it_sent_has_left() -> None:
    def sender(transport: Transport) -> list[bool]:
        rank = rank_of(ONE_TO_ONE, transport)
        works: list[Any] = []
        start = transport._isend
        transport._isend = lambda *message: works.append(start(*message)) or works[-1]  # type: ignore[method-assign,func-returns-value]
        with rank.step(context_of(rank)) as (comm,):
            if comm.role == "conv":
                comm.send(torch.ones(4), "fc")
                comm.send(torch.ones(4, 2), "fc")
            else:
                comm.recv("conv", (-1,), torch.float32)
                comm.recv("conv", (-1, 2), torch.float32)
            inside = [work.waited for work in works]
        return inside + [work.waited for work in works]

    assert on_ranks(2, sender)[0] == [False, False, True, True]


def test_what_was_sent_may_not_change_within_the_step() -> None:
    """The test of the tests' own transport: it sees what a real one would send wrong."""

    def run(transport: Transport) -> None:
        rank = rank_of(ONE_TO_ONE, transport)
        with rank.step(context_of(rank)):
            if rank.spec.role == "conv":
                value = torch.ones(4)
                comm_of(rank, "conv").send(value, "fc")
                value.add_(1)
            else:
                comm_of(rank, "fc").recv("conv", (-1,), torch.float32)

    with pytest.raises(AssertionError, match="changed while it was on its way"):
        on_ranks(2, run)


def test_a_rank_whose_step_broke_off_takes_no_other_step_and_says_why() -> None:
    def run(transport: Transport) -> str:
        rank = rank_of(plan_of(all=(0, 4)), transport)
        with pytest.raises(ZeroDivisionError), rank.step(context_of(rank)):
            1 / 0  # noqa: B018
        with pytest.raises(LaunchError) as caught, rank.step(context_of(rank)):
            pass
        return str(caught.value)

    assert on_ranks(1, run)[0].startswith("rank 0: its last step broke off in the middle")


def test_a_rank_that_fails_in_a_step_releases_the_others_and_its_own_error_is_the_one_that_is_raised() -> None:
    def run(transport: Transport) -> None:
        rank = rank_of(ONE_TO_ONE, transport)
        with rank.step(context_of(rank)):
            if rank.spec.role == "conv":
                raise KeyError("mine")
            with pytest.raises(PeerLost):
                comm_of(rank, "fc").recv("conv", (-1,), torch.float32)
            raise PeerLost("released")

    with pytest.raises(KeyError, match="mine"):
        on_ranks(2, run)


def test_a_missing_gradient_is_an_error_that_names_rank_and_role() -> None:
    def run(comm: RoleComm) -> None:
        if comm.role == "fc":
            with pytest.raises(RuntimeError, match="rank 1: no gradient arrived for what role conv sent"):
                comm.send(None, "conv")

    on_comms(ONE_TO_ONE, run)


def test_a_rank_refuses_the_transport_of_another() -> None:
    def run(transport: Transport) -> None:
        Rank(rank_spec(ONE_TO_ONE, 1 - transport.rank), transport)

    with pytest.raises(LaunchError, match=r"this is rank [01] of 2, started as [01] of 2"):
        on_ranks(2, run)


# -- the loss ----------------------------------------------------------------------------------------------------------


@in_one
@along(dtype=[torch.float64, torch.float32, torch.bfloat16], weighted=[True, False])
def test_a_weighted_mean_over_ranks_is_that_of_one_process_and_has_its_dtype(
    dtype: torch.dtype, weighted: bool
) -> None:
    scores, target = torch.randn(8, 5).to(dtype), torch.tensor([0, 1, -100, 3, -100, -100, -100, 2])
    weight = torch.rand(5).to(dtype) if weighted else None

    def run(comm: RoleComm) -> Tensor:
        first, last = comm.counted.own
        part = F.cross_entropy(scores[first:last], target[first:last], weight, reduction="sum")
        return comm.sum_loss(part / comm.global_weight(target[first:last], weight).wait()).wait()

    expected = F.cross_entropy(scores, target, weight)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    for loss in on_comms(plan_of(all=(0, 4, 8)), run):
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)  # checks the dtype too


def test_another_ignore_index_is_kept_out_of_the_weights() -> None:
    target = torch.tensor([[0, 1, 7], [7, 7, 2]])

    def run(comm: RoleComm) -> Tensor:
        first, last = comm.counted.own
        return comm.global_weight(target[first:last], ignore_index=7).wait()

    assert on_comms(plan_of(all=(0, 1, 2)), run) == [3, 3]


def test_the_loss_is_the_same_on_every_rank_and_is_summed_in_double_precision() -> None:
    parts = [1.0, 2.0**-24, 2.0**-24]  # in float32, one by one, 1 + 2**-24 is 1

    def run(comm: RoleComm) -> Tensor:
        contribution = torch.tensor(parts[comm.shared.transport.rank], requires_grad=True)
        loss = comm.sum_loss(contribution)
        assert loss.wait().dtype == torch.float32
        return loss.wait()

    losses = on_comms(MANY_TO_ONE, run)
    assert [float(loss) for loss in losses] == [1 + 2.0**-23] * 3
    assert not any(loss.requires_grad for loss in losses)
    assert all(loss.dim() == 0 for loss in losses)
