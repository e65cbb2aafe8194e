"""A rank's place in one role: what it hands to itself, its group's turns, and what counts once in a group."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.ir.placements import Grouping
from splitc.ir.plan import Plan
from splitc.ir.transitions import options_of
from splitc.runtime.collectives.layouts import Extents, State, Transition
from splitc.runtime.pieces import pieces_of
from splitc.runtime.role_comm import RoleComm
from splitc.runtime.seeded.draws import Draws, Layout
from splitc.runtime.seeded.mode import SeededRandom
from splitc.runtime.transport.base import Transport
from tests.support.ranks import begin, comm_of, context_of, on_comms, on_ranks, plan_of, rank_of
from tests.support.sampling import along, in_one, in_pairs
from tests.support.transitions import TRANSITIONS, Case

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
SIZES: list[Sizes] = [None, (3, 1, 5, 3), (1, 1, 1, 1), (2, 7, 1, 4), (6, 6, 6, 6)]


# -- between roles -----------------------------------------------------------------------------------------------------


BOTH = [
    in_both((0, 4, 8), (0, 1), (0, 4, 8)),  # every rank has its own
    in_both((0, 3, 5, 8), (0, 2), (0, 5, 8)),  # and some of another's
    in_both((0, 2, 5, 8), (1,), (0, 8)),  # Stanza's one fc rank is a conv rank as well
    in_both((0, 8), (0, 1, 2), (0, 3, 6, 8)),  # the reader keeps a part
]


@in_one
@along(plan=[*BOTH, *BOTH], dim=[0, 1, 0, 2, 0], rows=[1, 1, 3, 2, 3], part=[0.75, 1.0, 2.0])
def test_a_rank_in_both_roles_hands_its_examples_over_in_memory(plan: Plan, dim: int, rows: int, part: float) -> None:
    sizes = tuple(int(size * part) for size in plan.local_batches)
    shape = [2, 3, 5]
    shape[dim] = sum(sizes) * rows
    value = torch.arange(torch.Size(shape).numel()).reshape(shape)
    template = tuple(-1 if d == dim else n for d, n in enumerate(shape))

    def run(transport: Transport) -> tuple[dict[str, Tensor], int, int]:
        rank = rank_of(plan, transport)
        comms = {comm.role: comm for comm in rank.comms}
        found, given = {}, 0
        with rank.step(context_of(rank, sizes)):
            if (conv := comms.get("conv")) is not None:
                first, last = conv.counted.own
                conv.send(value.narrow(dim, first * rows, (last - first) * rows), "fc", dim, rows)
            if (fc := comms.get("fc")) is not None:
                found["fc"] = fc.recv("conv", template, value.dtype, rows)
                fc.send(found["fc"] * 2, "conv", dim, rows)
            if conv is not None:
                found["conv"] = conv.recv("fc", template, value.dtype, rows)
        for comm in rank.comms:
            a, b = comm.counted.own
            other = (
                comm_of(rank, "fc" if comm.role == "conv" else "conv").counted.own if len(rank.comms) == 2 else (0, 0)
            )
            kept = max(0, min(b, other[1]) - max(a, other[0]))
            given += (b - a - kept) * value.nbytes // sum(sizes)
        return found, rank.transport.sent_bytes, given

    results = on_ranks(plan.world, run)
    for role, factor in (("fc", 1), ("conv", 2)):
        assert torch.equal(torch.cat([results[rank][0][role] for rank in plan.roles[role]], dim), value * factor)
    for _, sent, given in results:
        assert sent == given  # what a rank keeps does not travel


def test_what_was_handed_over_has_no_graph_and_is_a_copy() -> None:
    def run(transport: Transport) -> None:
        rank = rank_of(in_both((0, 4), (0,), (0, 4)), transport)
        value = torch.randn(4, 2, requires_grad=True)
        comm_of(rank, "conv").send(value * 1, "fc")
        got = comm_of(rank, "fc").recv("conv", (-1, 2), torch.float32)
        assert torch.equal(got, value) and got.is_leaf and not got.requires_grad
        got.zero_()
        assert bool(value.detach().any())
        assert rank.transport.sent_bytes == 0

    on_ranks(1, run)


# -- a group's turns ---------------------------------------------------------------------------------------------------


def pieces(plan: Plan, sizes: Sizes, rank: int, turn: int) -> list[tuple[int, int]]:
    """The examples that each member of the group of `rank` gives to a turn of a step of these sizes."""
    bounds = list(accumulate(sizes or plan.local_batches, initial=0))
    members = plan.group("all", rank)
    scheme, group = plan.groups["all"].scheme, bounds[members[0] : members[-1] + 2]
    parts = pieces_of(scheme, 1, bounds, group).parts(turn)
    own = [(bounds[m], bounds[m + 1]) for m in members]
    return own if scheme == "BK" else [next((p for p in parts if a <= p[0] and p[1] <= b), (a, a)) for a, b in own]


@pytest.mark.slow
@in_one
@in_pairs(plan=GROUPED, sizes=SIZES, layout=[(0, 1), (1, 3)])
def test_modulo_gathers_a_turns_examples_and_a_slice_has_ones_own_of_them(
    plan: Plan, sizes: Sizes, layout: tuple[int, int]
) -> None:
    """Every example has one turn; what was sliced is gathered again."""
    (dim, rows), total = layout, sum(sizes or plan.local_batches)
    value = torch.randn(*((total * rows, 2) if dim == 0 else (2, total * rows)))

    def run(comm: RoleComm) -> tuple[Tensor, list[int]]:
        kept, seen, rank, (first, last) = [], list[int](), comm.shared.transport.rank, comm.counted.own
        for turn in comm.microbatches():
            mine = value.narrow(dim, first * rows, (last - first) * rows)
            gathered = comm[turn].modulo(comm[turn].piece(mine, dim, rows), dim=dim, rows=rows)
            given = pieces(plan, sizes, rank, turn)
            parts = [value.narrow(dim, a * rows, (b - a) * rows) for a, b in given]
            assert torch.equal(gathered, torch.cat(parts, dim))
            before = comm.shared.transport.sent_bytes
            kept.append(comm[turn].slice_batch(gathered, dim=dim, rows=rows))
            assert torch.equal(kept[-1], parts[comm.members.index(rank)])
            assert comm.shared.transport.sent_bytes == before
            assert torch.equal(comm[turn].modulo(kept[-1], dim=dim, rows=rows), gathered)
            assert comm.shared.transport.sent_bytes == before + (len(comm.members) - 1) * kept[-1].nbytes
            seen += [example for a, b in given for example in range(a, b)] if rank == comm.members[0] else []
        return torch.cat(kept, dim), seen

    own, seen = zip(*on_comms(plan, run, sizes), strict=True)
    assert torch.equal(torch.cat(own, dim), value)
    assert sorted(example for each in seen for example in each) == list(range(total))


@pytest.mark.slow
@in_one
@along(transition=[*TRANSITIONS, *TRANSITIONS], sizes=SIZES[:4], dim=[0, 1], rows=[1, 3])
def test_the_method_of_every_transition_brings_a_value_to_its_state(
    transition: Transition, sizes: Sizes, dim: int, rows: int
) -> None:
    """As generated code calls it, with the arguments of its node; what moves and how is the group's business."""
    plan, width = grouped(2, "BK"), 5
    function, options = options_of(transition, width, dim, rows)

    def run(comm: RoleComm) -> None:
        examples = comm.counted.group_rows(rows)
        shape = (sum(examples), 2, width) if dim == 0 else (2, sum(examples), width)
        case = Case(shape, Extents(tuple(examples), (3, 2), dim))
        position = comm.members.index(comm.shared.transport.rank)
        x = case.held(case.value(1), transition.source, position).detach().requires_grad_()
        value = getattr(comm, function.__name__)(x, **options)
        torch.testing.assert_close(value, case.held(case.value(1), transition.target, position))
        value.backward(case.held(case.value(2), transition.target.gradient, position))
        if transition.source is not State.DIVIDED:
            torch.testing.assert_close(x.grad, case.held(case.value(2), transition.source.gradient, position))

    on_comms(plan, run, sizes)


EMPTY = [
    (grouped(2, "B/K", bounds=(0, 4, 8)), (1, 1), [1]),  # half an example is none, the other half is it
    (grouped(2, "B/K", bounds=(0, 4, 8)), (1, 2), [0, 1]),
    (grouped(4, "B/K"), (1, 2, 1, 1), [1, 3]),
]


@in_one
@pytest.mark.parametrize(("plan", "sizes", "busy"), EMPTY)
def test_a_turn_without_an_example_in_the_group_is_left_out(plan: Plan, sizes: Sizes, busy: list[int]) -> None:
    def run(comm: RoleComm) -> list[tuple[int, bool]]:
        return [(turn, comm[turn].counted.is_last) for turn in comm.microbatches()]

    expected = [(turn, turn == busy[-1]) for turn in busy]  # gradients are summed in the last one that there is
    assert on_comms(plan, run, sizes) == [expected] * plan.world


@in_one
@along(plan=[plan_of(all=(0, 3, 8)), *GROUPED], share=[0.5, 1.0, 2.0])
def test_the_shares_of_all_groups_and_turns_sum_to_one(plan: Plan, share: float) -> None:
    sizes = tuple(max(1, int(size * share)) for size in plan.local_batches)

    def run(comm: RoleComm) -> float:
        one = torch.ones((), dtype=torch.float64)
        shares = [float(comm[turn].scale_by_share(one)) for turn in comm.microbatches()]
        return sum(shares) if comm.members[0] == comm.shared.transport.rank else 0.0  # a group's loss counts once

    assert sum(on_comms(plan, run, sizes)) == pytest.approx(1.0, rel=1e-14)


def test_the_share_of_a_rank_without_examples_is_zero_though_its_mean_is_not_a_number() -> None:
    """Such as in the turns of other members of its group."""

    def run(comm: RoleComm) -> list[float]:
        shares = []
        for turn in comm.microbatches():
            value = torch.ones(comm[turn].counted.group_rows(1)[comm.shared.group.index], requires_grad=True)
            share = comm[turn].scale_by_share(value.mean(), own=True)
            share.backward()
            shares.append(float(share.detach()))
        return shares

    assert on_comms(grouped(2, "B", bounds=(0, 4, 8)), run) == [[0.5, 0.0], [0.0, 0.5]]


# -- what a group has alike --------------------------------------------------------------------------------------------


@in_one
@pytest.mark.parametrize(("size", "expected"), [(1, 1111.0), (2, 101.0), (4, 1.0)])
def test_the_loss_of_a_group_which_all_its_ranks_have_counts_once(size: int, expected: float) -> None:
    def run(comm: RoleComm) -> float:
        contribution = torch.tensor(float(10**comm.shared.transport.rank), requires_grad=True)
        loss = comm.sum_loss(contribution).wait()
        assert float(contribution.detach()) == 10**comm.shared.transport.rank and not loss.requires_grad
        return float(loss)

    assert on_comms(grouped(size, "B/K"), run) == [expected] * 4


@in_one
@in_pairs(scheme=SCHEMES, sizes=[None, (3, 5, 2, 2)], features=[None, 501])
def test_every_rank_draws_its_rows_and_columns_of_the_masks_of_one_process(
    scheme: str, sizes: Sizes, features: int | None
) -> None:
    plan = grouped(2, scheme, bounds=(0, 4, 8, 12, 16))

    def run(comm: RoleComm) -> list[tuple[Tensor, Tensor]]:
        start, width = 0, 501
        if features is not None:
            start, width = (251 * comm.shared.group.index, 251 - comm.shared.group.index)
        drawn = []
        for microbatch in comm.microbatches():
            own = pieces(plan, sizes, comm.shared.transport.rank, microbatch)
            rows = torch.cat([torch.arange(a, b) for a, b in own])
            value = torch.ones(len(rows), width)
            got = comm[microbatch].dropout(value, 0.5, draw=3, features=features)
            drawn.append((got, whole[rows][:, start : start + width]))
        return drawn

    total = sum(sizes or plan.local_batches)
    whole = Draws(0, 0, [(0, total)]).dropout(torch.ones(total, 501), 0.5, (3,), Layout())
    for drawn in on_comms(plan, run, sizes):
        assert drawn and all(torch.equal(got, expected) for got, expected in drawn)


def test_the_examples_of_accumulated_batches_are_numbered_on() -> None:
    alone = plan_of(all=(0, 4))
    first, second = (
        on_comms(alone, lambda comm: comm.uniform(torch.empty(4, 5), draw=0), first_example=k)[0] for k in (0, 4)
    )
    together = on_comms(plan_of(all=(0, 8)), lambda comm: comm.uniform(torch.empty(8, 5), draw=0))[0]
    assert torch.equal(torch.cat([first, second]), together)


def test_a_region_draws_what_one_process_draws_in_it() -> None:
    def region(x: Tensor) -> Tensor:
        return F.dropout(x * torch.rand(len(x), 1), 0.5) + torch.randn(3)

    def run(comm: RoleComm) -> Tensor:
        with comm.seeded(draw=2):
            return region(torch.ones(4, 3))

    with SeededRandom(Draws(0, 0, [(0, 8)])) as mode:
        torch.rand(1), torch.rand(1)
        with mode.region():
            expected = region(torch.ones(8, 3))
    assert torch.equal(torch.cat(on_comms(plan_of(all=(0, 4, 8)), run)), expected)


# -- gradients over turns ----------------------------------------------------------------------------------------------


@in_one
@along(plan=[p for p in GROUPED if len(p.replicas("all", 0)) > 1] + [grouped(1, "B")], sizes=SIZES)
def test_gradients_add_up_over_turns_and_are_summed_over_the_replicas_once(plan: Plan, sizes: Sizes) -> None:
    total = sum(sizes or plan.local_batches)
    inputs = torch.randn(total, 3, dtype=torch.float64)
    replicas = len(plan.replicas("all", 0))

    def run(transport: Transport) -> tuple[Tensor, int]:
        rank = rank_of(plan, transport)
        begin(rank, sizes)
        (comm,) = rank.comms
        stage = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        (first, last), sent = comm.counted.own, 0
        for turn in comm.microbatches():
            gathered = comm[turn].modulo(comm[turn].piece(inputs[first:last]))
            before = rank.transport.sent_bytes
            with comm[turn].all_reduce(stage, (("weight",),)):
                stage(gathered).sum().backward()
            sent += rank.transport.sent_bytes - before
        assert stage.weight.grad is not None
        return stage.weight.grad, sent

    for gradient, sent in on_ranks(plan.world, run):
        torch.testing.assert_close(gradient[0], inputs.sum(0))
        assert sent == 2 * (replicas - 1) * 3 * 8 // replicas


def test_updates_in_every_turn_sum_the_gradients_of_that_turn_and_tell_the_role() -> None:
    plan = grouped(2, "B", "every", bounds=(0, 4, 8, 12, 16))
    inputs = torch.randn(16, 3)

    def run(transport: Transport) -> tuple[list[Tensor], list[str]]:
        told: list[str] = []
        (comm,) = rank_of(plan, transport, told.append).comms
        stage = nn.Linear(3, 1, bias=False)
        gradients: list[Tensor] = []
        first, last = comm.counted.own
        for turn in comm.microbatches():
            stage.zero_grad()
            gathered = comm[turn].modulo(comm[turn].piece(inputs[first:last]))
            with comm[turn].all_reduce(stage, (("weight",),)):
                stage(gathered).sum().backward()
            assert stage.weight.grad is not None
            gradients.append(stage.weight.grad[0].clone())
            comm.update()
        return gradients, told

    expected = [inputs[0:4].sum(0) + inputs[8:12].sum(0), inputs[4:8].sum(0) + inputs[12:16].sum(0)]
    for gradients, told in on_ranks(plan.world, run):
        torch.testing.assert_close(gradients, expected)
        assert told == ["all", "all"]


def test_a_missing_gradient_of_gathered_examples_names_rank_and_role() -> None:
    def run(comm: RoleComm) -> None:
        with pytest.raises(
            RuntimeError, match=f"rank {comm.shared.transport.rank}: no gradient arrived for what role all gathered"
        ):
            comm.slice_batch(None)

    on_comms(grouped(2, "BK"), run)
