"""A rank's place in one role: what it hands to itself, its group's turns, and what counts once in a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

from splitc.ir.plan import Grouping, Plan, piece
from splitc.runtime.role_comm import RoleComm
from splitc.runtime.transport.base import Transport
from tests.support.ranks import connected, on_ranks, on_seats, plan_of

Sizes = tuple[int, ...] | None


def in_both(conv: tuple[int, ...], fc_ranks: tuple[int, ...], fc: tuple[int, ...], world: int = 0) -> Plan:
    """A plan in which ranks are in both roles."""
    roles = {"conv": tuple(range(len(conv) - 1)), "fc": fc_ranks}
    ranks = {rank for each in roles.values() for rank in each}
    return Plan("by hand", max(world, max(ranks) + 1), roles, {}, {"conv": conv, "fc": fc})


def grouped(size: int, scheme: str, updates: str = "once", bounds: tuple[int, ...] = (0, 3, 4, 9, 12)) -> Plan:
    """A role whose ranks have unequal examples and work in groups."""
    return replace(plan_of(all=bounds), groups={"all": Grouping(size, scheme, updates)})


SCHEMES = ["BK", "B", "B/K"]
GROUPED = [grouped(size, scheme) for size in (2, 4) for scheme in SCHEMES]
IDS = [f"{scheme} in groups of {size}" for size in (2, 4) for scheme in SCHEMES]
SIZES: list[Sizes] = [None, (3, 1, 5, 3), (1, 1, 1, 1), (2, 7, 1, 4), (6, 6, 6, 6)]


def turns_of(plan: Plan) -> int:
    return plan.groups["all"].num_microbatches


# -- between roles -----------------------------------------------------------------------------------------------------


BOTH = [
    in_both((0, 4, 8), (0, 1), (0, 4, 8)),  # every rank has its own
    in_both((0, 3, 5, 8), (0, 2), (0, 5, 8)),  # and some of another's
    in_both((0, 2, 5, 8), (1,), (0, 8)),  # Stanza's one fc rank is a conv rank as well
    in_both((0, 8), (0, 1, 2), (0, 3, 6, 8)),  # the reader keeps a part
]


@pytest.mark.parametrize("plan", BOTH)
@pytest.mark.parametrize(("dim", "rows"), [(0, 1), (1, 1), (0, 3), (2, 2)])
@pytest.mark.parametrize("part", [1.0, 0.75, 2.0])
def test_a_rank_in_both_roles_hands_its_examples_over_in_memory(plan: Plan, dim: int, rows: int, part: float) -> None:
    sizes = tuple(int(size * part) for size in plan.local_batches)
    shape = [2, 3, 5]
    shape[dim] = sum(sizes) * rows
    value = torch.arange(torch.Size(shape).numel()).reshape(shape)
    template = tuple(-1 if d == dim else n for d, n in enumerate(shape))

    def run(transport: Transport) -> tuple[dict[str, Tensor], int, int]:
        rank = connected(plan, transport)
        rank.begin(sizes)
        seats = {seat.role: seat for seat in rank.comms}
        found, given = {}, 0
        with rank.one_step():
            if (conv := seats.get("conv")) is not None:
                first, last = conv.examples
                conv.send(value.narrow(dim, first * rows, (last - first) * rows), "fc", dim, rows)
            if (fc := seats.get("fc")) is not None:
                found["fc"] = fc.recv("conv", template, value.dtype, rows)
                fc.send(found["fc"] * 2, "conv", dim, rows)
            if conv is not None:
                found["conv"] = conv.recv("fc", template, value.dtype, rows)
        for seat in rank.comms:
            a, b = seat.examples
            other = rank.comm("fc" if seat.role == "conv" else "conv").examples if len(rank.comms) == 2 else (0, 0)
            kept = max(0, min(b, other[1]) - max(a, other[0]))
            given += (b - a - kept) * value.nbytes // sum(sizes)
        return found, rank.sent_bytes, given

    results = on_ranks(plan.world, run)
    for role, factor in (("fc", 1), ("conv", 2)):
        assert torch.equal(torch.cat([results[rank][0][role] for rank in plan.roles[role]], dim), value * factor)
    for _, sent, given in results:
        assert sent == given  # what a rank keeps does not travel


def test_what_is_handed_over_arrives_in_the_order_in_which_it_was_given() -> None:
    def run(transport: Transport) -> list[list[float]]:
        rank = connected(in_both((0, 2, 4), (0, 1), (0, 3, 4)), transport)
        conv, fc = rank.comm("conv"), rank.comm("fc")
        with rank.one_step():
            for k in range(3):
                conv.send(torch.full((2,), 10.0 * k + rank.index), "fc")
            return [fc.recv("conv", (-1,), torch.float32).tolist() for _ in range(3)]

    first, second = on_ranks(2, run)
    assert first == [[10 * k, 10 * k, 10 * k + 1] for k in range(3)]
    assert second == [[10 * k + 1] for k in range(3)]


def test_what_was_handed_over_has_no_graph_and_is_a_copy() -> None:
    def run(transport: Transport) -> None:
        rank = connected(in_both((0, 4), (0,), (0, 4)), transport)
        value = torch.randn(4, 2, requires_grad=True)
        rank.comm("conv").send(value * 1, "fc")
        got = rank.comm("fc").recv("conv", (-1, 2), torch.float32)
        assert torch.equal(got, value) and got.is_leaf and not got.requires_grad
        got.zero_()
        assert bool(value.detach().any())
        assert rank.sent_bytes == 0

    on_ranks(1, run)


def test_a_rank_with_two_seats_says_both_roles_and_its_step_gets_both() -> None:
    def run(transport: Transport) -> tuple[str, list[str]]:
        rank = connected(in_both((0, 4), (0, 1), (0, 2, 4), world=3), transport)
        views = [view.role for view in rank.views]
        assert rank.comms == () or rank.views == rank.comms
        assert all(seat.rank is rank and rank.comm(seat.role) is seat for seat in rank.comms)
        assert rank.examples_of(1, "fc") == (2, 4) and rank.examples_of(0, "conv") == (0, 4)
        return rank.role, views

    assert on_ranks(3, run) == [("conv and fc", ["conv", "fc"]), ("fc", ["fc"]), ("idle", ["idle"])]


# -- a group's turns ---------------------------------------------------------------------------------------------------


def in_turns(plan: Plan, sizes: Sizes, function: Callable[[RoleComm], Tensor]) -> list[dict[int, Tensor]]:
    """What `function` gives on each rank in each turn that is not left out."""

    def run(seat: RoleComm) -> dict[int, Tensor]:
        seat.rank.begin(sizes)
        return {turn: function(seat) for turn in seat.turns(turns_of(plan))}

    return on_seats(plan, run)


def pieces(plan: Plan, sizes: Sizes, rank: int, turn: int) -> list[tuple[int, int]]:
    """The examples that each member of the group of `rank` gives to a turn of a step of these sizes."""
    bounds = list(accumulate(sizes or plan.local_batches, initial=0))
    members = plan.group("all", rank)
    scheme = plan.groups["all"].scheme
    return [piece((bounds[m], bounds[m + 1]), scheme, k, turn, len(members)) for k, m in enumerate(members)]


@pytest.mark.parametrize("plan", GROUPED, ids=IDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dim", "rows"), [(0, 1), (1, 2)])
def test_modulo_gathers_a_turns_examples_and_every_example_has_one_turn(
    plan: Plan, sizes: Sizes, dim: int, rows: int
) -> None:
    total = sum(sizes or plan.local_batches)
    shape = (total * rows, 3) if dim == 0 else (3, total * rows)
    value = torch.arange(total * rows * 3).reshape(shape)

    def own(seat: RoleComm) -> Tensor:
        first, last = seat.examples
        return seat.modulo(value.narrow(dim, first * rows, (last - first) * rows), dim, rows)

    gathered = in_turns(plan, sizes, own)
    seen = []
    for rank, by_turn in enumerate(gathered):
        members = plan.group("all", rank)
        assert all(torch.equal(got, gathered[members[0]][turn]) for turn, got in by_turn.items())
        for turn, got in by_turn.items():
            parts = [value.narrow(dim, a * rows, (b - a) * rows) for a, b in pieces(plan, sizes, rank, turn)]
            assert torch.equal(got, torch.cat(parts, dim))
        if rank == members[0]:
            seen += [e for turn in by_turn for a, b in pieces(plan, sizes, rank, turn) for e in range(a, b)]
    assert sorted(seen) == list(range(total))


@pytest.mark.parametrize("plan", GROUPED, ids=IDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("partial", [True, False])
def test_give_back_brings_each_member_the_gradient_of_its_own_examples(plan: Plan, sizes: Sizes, partial: bool) -> None:
    total = sum(sizes or plan.local_batches)
    whole = torch.randn(total, 2, dtype=torch.float64)

    def run(seat: RoleComm) -> tuple[Tensor, int, int]:
        seat.rank.begin(sizes)
        back, (first, last), members = [], seat.examples, seat.members
        factor = members.index(seat.rank.index) + 1 if partial else 1
        before = sent = seat.sent_bytes
        for _ in seat.turns(turns_of(plan)):
            gathered = seat.modulo(whole[first:last])
            before = seat.sent_bytes
            back.append(seat.modulo_grad(gathered * factor, partial=partial))
            sent += seat.sent_bytes - before
        return torch.cat(back), sent, last - first

    for rank, (gradient, sent, own) in enumerate(on_seats(plan, run)):
        members = plan.group("all", rank)
        first = sum((sizes or plan.local_batches)[:rank])
        times = sum(range(1, len(members) + 1)) if partial else 1
        torch.testing.assert_close(gradient, whole[first : first + own] * times)
        others = sum((sizes or plan.local_batches)[m] for m in members if m != rank)
        assert sent == (others * 2 * 8 if partial else 0)  # the whole gradient is everywhere already


@pytest.mark.parametrize("plan", GROUPED, ids=IDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dim", "rows"), [(0, 1), (1, 3)])
def test_keep_takes_ones_own_examples_and_spread_gathers_their_gradients(
    plan: Plan, sizes: Sizes, dim: int, rows: int
) -> None:
    total = sum(sizes or plan.local_batches)
    value = torch.randn(*((total * rows, 2) if dim == 0 else (2, total * rows)))

    def run(seat: RoleComm) -> Tensor:
        seat.rank.begin(sizes)
        kept, (first, last), position = [], seat.examples, seat.members.index(seat.rank.index)
        for turn in seat.turns(turns_of(plan)):
            gathered = seat.modulo(value.narrow(dim, first * rows, (last - first) * rows), dim, rows)
            before = seat.sent_bytes
            kept.append(seat.slice_batch(gathered, dim, rows))
            a, b = pieces(plan, sizes, seat.rank.index, turn)[position]
            assert torch.equal(kept[-1], value.narrow(dim, a * rows, (b - a) * rows))
            assert seat.sent_bytes == before
            assert torch.equal(seat.all_gather_grad(kept[-1], dim, rows), gathered)
            assert seat.sent_bytes == before + (len(seat.members) - 1) * kept[-1].nbytes
        return torch.cat(kept, dim)

    assert torch.equal(torch.cat(on_seats(plan, run), dim), value)


EMPTY = [
    (grouped(2, "B", bounds=(0, 4, 4)), None, [0]),
    (grouped(2, "B", bounds=(0, 0, 4)), None, [1]),
    (grouped(4, "B", bounds=(0, 2, 2, 3, 3)), None, [0, 2]),
    (grouped(2, "B/K", bounds=(0, 4, 8)), (1, 1), [1]),  # half an example is none, the other half is it
    (grouped(2, "B/K", bounds=(0, 4, 8)), (1, 2), [0, 1]),
    (grouped(4, "B/K"), (1, 2, 1, 1), [1, 3]),
    (grouped(2, "BK", bounds=(0, 4, 4)), None, [0]),
]


@pytest.mark.parametrize(("plan", "sizes", "busy"), EMPTY)
def test_a_turn_without_an_example_in_the_group_is_left_out(plan: Plan, sizes: Sizes, busy: list[int]) -> None:
    def run(seat: RoleComm) -> list[tuple[int, bool]]:
        seat.rank.begin(sizes)
        return [(turn, seat._sums_now) for turn in seat.turns(turns_of(plan))]

    expected = [(turn, turn == busy[-1]) for turn in busy]  # gradients are summed in the last one that there is
    assert on_seats(plan, run) == [expected] * plan.world


def test_a_loop_over_turns_that_breaks_off_leaves_the_seat_as_it_was() -> None:
    def run(seat: RoleComm) -> None:
        with pytest.raises(KeyError):
            for _ in seat.turns(4):
                raise KeyError
        assert seat._sums_now
        assert seat._rows() == seat._rows(0)

    on_seats(grouped(4, "B/K"), run)


@pytest.mark.parametrize("plan", [plan_of(all=(0, 3, 8)), *GROUPED])
@pytest.mark.parametrize("share", [1.0, 0.5, 2.0])
def test_the_shares_of_all_groups_and_turns_sum_to_one(plan: Plan, share: float) -> None:
    sizes = tuple(max(1, int(size * share)) for size in plan.local_batches)

    def run(seat: RoleComm) -> float:
        seat.rank.begin(sizes)
        one = torch.ones((), dtype=torch.float64)
        shares = [float(seat.scale_by_share(one)) for _ in seat.turns(turns_of(plan) if plan.groups else 1)]
        return sum(shares) if seat.members[0] == seat.rank.index else 0.0  # a group's loss counts once

    assert sum(on_seats(plan, run)) == pytest.approx(1.0, rel=1e-14)


# -- what a group has alike --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "expected"), [(1, 1111.0), (2, 101.0), (4, 1.0)])
def test_the_loss_of_a_group_which_all_its_ranks_have_counts_once(size: int, expected: float) -> None:
    def run(seat: RoleComm) -> float:
        contribution = torch.tensor(float(10**seat.rank.index), requires_grad=True)
        loss = seat.sum_loss(contribution).wait()
        assert float(contribution.detach()) == 10**seat.rank.index and not loss.requires_grad
        return float(loss)

    assert on_seats(grouped(size, "B/K"), run) == [expected] * 4


def test_a_total_is_summed_over_the_replicas_one_of_each_group() -> None:
    def run(seat: RoleComm) -> float:
        return float(seat.all_reduce_scalar(torch.tensor(float(10**seat.rank.index))))

    assert on_seats(grouped(2, "BK"), run) == [101.0, 1010.0, 101.0, 1010.0]


def drops(plan: Plan, **options: bool) -> list[list[Tensor]]:
    """The masks that each rank draws in its turns, for a value of as many examples as a turn has."""

    def run(seat: RoleComm) -> list[Tensor]:
        return [
            seat.dropout(torch.ones(sum(seat._rows()), 500), 0.5, layer="drop", **options) == 0
            for _ in seat.turns(turns_of(plan))
        ]

    return on_seats(plan, run)


def unrelated(a: Tensor, b: Tensor) -> bool:
    rows = min(len(a), len(b))
    return abs(float((a[:rows] == b[:rows]).double().mean()) - 0.5) < 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_members_of_a_group_draw_the_same_masks_and_other_groups_and_turns_others(scheme: str) -> None:
    drawn = drops(grouped(2, scheme, bounds=(0, 4, 8, 12, 16)))
    for a, b in ((0, 1), (2, 3)):
        assert all(torch.equal(x, y) for x, y in zip(drawn[a], drawn[b], strict=True))
    masks = [mask for rank in (0, 2) for mask in drawn[rank]]
    assert all(unrelated(x, y) for k, x in enumerate(masks) for y in masks[:k])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_of_sharded_features_each_member_draws_a_mask_of_its_own(scheme: str) -> None:
    plan = grouped(2, scheme, bounds=(0, 4, 8, 12, 16))
    drawn, again = drops(plan, sharded=True), drops(plan, sharded=True)
    assert all(torch.equal(x, y) for a, b in zip(drawn, again, strict=True) for x, y in zip(a, b, strict=True))
    masks = [mask for each in (*drawn, drops(plan)[0]) for mask in each]
    assert all(unrelated(x, y) for k, x in enumerate(masks) for y in masks[:k])


# -- gradients over turns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [p for p in GROUPED if len(p.replicas("all", 0)) > 1] + [grouped(1, "B")])
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_add_up_over_turns_and_are_summed_over_the_replicas_once(plan: Plan, sizes: Sizes) -> None:
    total = sum(sizes or plan.local_batches)
    inputs = torch.randn(total, 3, dtype=torch.float64)
    replicas = len(plan.replicas("all", 0))

    def run(seat: RoleComm) -> tuple[Tensor, int]:
        seat.rank.begin(sizes)
        stage = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        first, last = seat.examples
        for _ in seat.turns(turns_of(plan)):
            gathered = seat.modulo(inputs[first:last])
            with seat.all_reduce(stage, (("weight",),)):
                stage(gathered).sum().backward()
        assert stage.weight.grad is not None
        return stage.weight.grad, seat.rank.sent_bytes - seat.sent_bytes

    for gradient, sent in on_seats(plan, run):
        torch.testing.assert_close(gradient[0], inputs.sum(0))
        assert sent == 2 * (replicas - 1) * 3 * 8 // replicas


def test_updates_in_every_turn_sum_the_gradients_of_that_turn_and_tell_the_role() -> None:
    plan = grouped(2, "B", "every", bounds=(0, 4, 8, 12, 16))
    inputs = torch.randn(16, 3)

    def run(seat: RoleComm) -> tuple[list[Tensor], list[str]]:
        stage = nn.Linear(3, 1, bias=False)
        told: list[str] = []
        gradients: list[Tensor] = []
        seat.rank.update = told.append
        first, last = seat.examples
        for _ in seat.turns(2):
            stage.zero_grad()
            gathered = seat.modulo(inputs[first:last])
            with seat.all_reduce(stage, (("weight",),)):
                stage(gathered).sum().backward()
            assert stage.weight.grad is not None
            gradients.append(stage.weight.grad[0].clone())
            seat.update()
        return gradients, told

    expected = [inputs[0:4].sum(0) + inputs[8:12].sum(0), inputs[4:8].sum(0) + inputs[12:16].sum(0)]
    for gradients, told in on_seats(plan, run):
        torch.testing.assert_close(gradients, expected)
        assert told == ["all", "all"]


def test_until_the_last_batch_of_an_update_nothing_is_summed() -> None:
    def run(seat: RoleComm) -> list[int]:
        stage, sent = nn.Linear(3, 1, bias=False), []
        for seat.rank.updates_now in (False, False, True):
            with seat.all_reduce(stage, (("weight",),)):
                stage(torch.full((1, 3), 10.0**seat.rank.index)).sum().backward()
            sent.append(seat.rank.sent_bytes)
        assert stage.weight.grad is not None
        assert torch.equal(stage.weight.grad, torch.full((1, 3), 33.0))
        return sent

    assert on_seats(plan_of(all=(0, 4, 8)), run) == [[0, 0, 12], [0, 0, 12]]


def test_a_missing_gradient_of_gathered_examples_names_rank_and_role() -> None:
    def run(seat: RoleComm) -> None:
        with pytest.raises(
            RuntimeError, match=f"rank {seat.rank.index}: no gradient arrived for what role all gathered"
        ):
            seat.modulo_grad(None)

    on_seats(grouped(2, "BK"), run)
