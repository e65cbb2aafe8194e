"""The event simulation: where the closed forms are exact it gives what they give, and elsewhere what overlap leaves."""

from __future__ import annotations

import random

import pytest

from splitc.cost_models.network.alpha_beta import many_to_one, point_to_point, ring_all_reduce
from splitc.cost_models.simulation.events import Simulation
from splitc.cost_models.simulation.operations import Begin, Compute, Mark, Operation, Transfer, Wait
from splitc.ir.device import Link

LINK = Link(bandwidth=1e6, latency=1e-3)


def message(src: int, dst: int, seconds: float, processor: float = 0.0) -> Transfer:
    return Transfer(f"{src} to {dst}", (src, dst), (2 * src, 2 * dst + 1), seconds, processor)


def collective(ranks: range, seconds: float, processor: float = 0.0) -> Transfer:
    lines = tuple(line for rank in ranks for line in (2 * rank, 2 * rank + 1))
    return Transfer("sum", tuple(ranks), lines, seconds, processor)


def end(*programs: list[Operation]) -> float:
    return Simulation([[*program, Mark()] for program in programs]).ends()[0]


def test_a_chain_of_ranks_takes_the_sum_of_what_they_compute_and_send() -> None:
    """Each rank computes, and sends to the next one: nothing overlaps, so the formula is a sum."""
    for seed in range(8):
        drawn = random.Random(seed)
        world = drawn.randint(2, 7)
        compute = [drawn.uniform(0, 1) for _ in range(world)]
        nbytes = [drawn.uniform(0, 1e6) for _ in range(world - 1)]
        hops = [message(k, k + 1, point_to_point(n, LINK)) for k, n in enumerate(nbytes)]
        programs: list[list[Operation]] = [[] for _ in range(world)]
        for k, seconds in enumerate(compute):
            if k:
                programs[k] += [Begin(hops[k - 1], 0.0), Wait((hops[k - 1],))]
            programs[k].append(Compute("layer", seconds))
            if k < world - 1:
                programs[k].append(Begin(hops[k], nbytes[k]))
        formula = sum(compute) + sum(point_to_point(n, LINK) for n in nbytes)
        assert end(*programs) == pytest.approx(formula, rel=1e-12)


def test_many_to_one_takes_as_long_as_the_closed_form() -> None:
    for n in [1, 2, 5, 63]:
        arriving = [message(k, n, point_to_point(1e4, LINK)) for k in range(n)]
        senders: list[list[Operation]] = [[Begin(each)] for each in arriving]
        receiver: list[Operation] = [*map(Begin, arriving), Wait(tuple(arriving))]
        assert end(*senders, receiver) == pytest.approx(many_to_one(1e4, n, LINK))


def test_pairs_of_their_own_do_not_meet() -> None:
    pairs = [message(0, 1, 2.0), message(2, 3, 2.0)]
    programs: list[list[Operation]] = [[Begin(pairs[k // 2]), Wait((pairs[k // 2],))] for k in range(4)]
    assert end(*programs) == 2.0


def test_a_line_that_waits_does_not_hold_up_transfers_on_free_lines() -> None:
    """Rank 1 wants to send to 2, which is taken, and to 3, which is not."""
    first, second, third = message(0, 2, 5.0), message(1, 2, 5.0), message(1, 3, 5.0)
    programs: list[list[Operation]] = [
        [Begin(first)],
        [Compute("later", 1.0), Begin(second), Begin(third)],
        [Begin(first), Begin(second), Wait((first, second))],
        [Begin(third), Wait((third,))],
    ]
    simulation = Simulation([[*program, Mark()] for program in programs])
    assert simulation.steps(3)[0].step == 6.0
    assert simulation.ends() == [11.0]  # 1 goes on to 2 when its line out is free again


def test_a_collective_begins_with_its_last_member_and_holds_all() -> None:
    total = collective(range(3), ring_all_reduce(3e5, 3, LINK))
    programs: list[list[Operation]] = [[Compute("layer", float(k)), Begin(total), Wait((total,))] for k in range(3)]
    assert end(*programs) == pytest.approx(2.0 + ring_all_reduce(3e5, 3, LINK))


def test_what_is_computed_meanwhile_hides_a_transfer() -> None:
    total = collective(range(2), 3.0)
    program: list[Operation] = [Begin(total), Compute("backward", 2.0), Wait((total,))]
    simulation = Simulation([[*program, Mark()], [*program, Mark()]])
    (phases,) = simulation.steps(0)
    assert (phases.step, phases.compute, phases.waiting, phases.communication) == (3.0, 2.0, 1.0, 3.0)


def test_a_transfer_that_takes_all_of_the_processor_hides_behind_nothing() -> None:
    for compute, whole in [(20.0, 30.0), (5.0, 15.0)]:
        busy = message(0, 1, 10.0, processor=10.0)
        assert end([Begin(busy), Compute("layer", compute), Wait((busy,))], [Begin(busy), Wait((busy,))]) == whole


def test_computing_and_a_transfer_that_needs_the_processor_slow_each_other_down() -> None:
    """Measured with half a core a rank: products of 0.17 s beside a sum of 0.93 s take 1.06 s together."""
    total = collective(range(2), 0.93, processor=0.79)
    program: list[Operation] = [Begin(total), Compute("layer", 0.17), Wait((total,)), Mark()]
    simulation = Simulation([program, program])
    (phases,) = simulation.steps(0)
    assert phases.step == pytest.approx(1.06, rel=0.03) and phases.compute == pytest.approx(3 * 0.17)


def test_a_transfer_goes_on_as_fast_as_its_slowest_party() -> None:
    for processor, computing, transfer in ((2.0, 6.25, 10.0), (9.0, 14.0, 13.5)):
        busy = message(0, 1, 10.0, processor=processor)
        programs: list[list[Operation]] = [
            [Begin(busy), Compute("layer", 5.0), Mark()],
            [Begin(busy), Wait((busy,)), Mark()],
        ]
        simulation = Simulation(programs)
        (computes,), (waits,) = simulation.steps(0), simulation.steps(1)
        assert (computes.step, waits.step) == pytest.approx((computing, transfer))


def test_ranks_that_wait_for_what_never_comes_are_an_error() -> None:
    lost = message(0, 1, 1.0)
    with pytest.raises(ValueError, match=r"ranks \[1\] wait"):
        Simulation([[Mark()], [Begin(lost), Wait((lost,)), Mark()]])


def test_a_rank_computes_or_waits_and_nothing_else() -> None:
    for seed in range(8):
        drawn = random.Random(seed)
        world, programs = 4, [list[Operation]() for _ in range(4)]
        for _ in range(8):
            src, dst = drawn.sample(range(world), 2)
            each = message(src, dst, drawn.uniform(0, 1), processor=drawn.choice([0.0, 0.2]))
            for rank in (src, dst):
                programs[rank] += [Compute("layer", drawn.uniform(0, 1)), Begin(each, 10.0), Wait((each,))]
        simulation = Simulation([[*program, Mark()] for program in programs])
        for rank in range(world):
            (phases,) = simulation.steps(rank)
            assert phases.compute + phases.waiting == pytest.approx(phases.step)
            assert phases.communication <= phases.step + 1e-9
        assert sum(simulation.steps(rank)[0].sent_bytes for rank in range(world)) == 160.0


def test_slower_transfers_never_make_a_chain_of_sums_faster() -> None:
    def whole(layers: list[tuple[float, float]], factor: float) -> float:
        sums = [collective(range(3), factor * seconds) for _, seconds in layers]
        program: list[Operation] = []
        for (compute, _), total in zip(layers, sums, strict=True):
            program += [Compute("layer", compute), Begin(total)]
        program.append(Wait(tuple(sums)))
        return end(program, program, program)

    for seed in range(8):
        drawn = random.Random(seed)
        layers = [(drawn.uniform(0, 1), drawn.uniform(0, 1)) for _ in range(6)]
        times = [whole(layers, factor) for factor in (0.0, 0.5, 1.0, 2.0, 4.0)]
        assert times == sorted(times)
        assert times[0] == pytest.approx(sum(compute for compute, _ in layers))


def test_ranks_that_share_cores_have_equal_parts_of_them_while_they_compute() -> None:
    """Three ranks on two cores: 2/3 of a core each, until the shortest is done, then a core each."""
    programs: list[list[Operation]] = [[Compute("layer", seconds), Mark()] for seconds in (2.0, 4.0, 4.0)]
    simulation = Simulation(programs, cores=2)
    assert [simulation.steps(rank)[0].step for rank in range(3)] == pytest.approx([3.0, 5.0, 5.0])
    assert simulation.steps(1)[0].compute == pytest.approx(5.0)


def test_shared_cores_do_as_much_work_as_they_can_and_no_more() -> None:
    for seed in range(8):
        drawn = random.Random(seed)
        cores, work = drawn.choice([1, 2, 3.5]), [drawn.uniform(0.1, 3.0) for _ in range(6)]
        programs = [[Compute("layer", seconds / 3)] * 3 + [Mark()] for seconds in work]
        (whole,) = Simulation(programs, cores=cores).ends()
        assert max(sum(work) / cores, *work) <= whole * (1 + 1e-9)
        assert whole <= sum(work) / cores + max(work)


def test_a_rank_that_computes_while_others_wait_has_a_core_to_itself() -> None:
    """Two ranks that take turns lose nothing on one core."""
    there, back = message(0, 1, 0.5), message(1, 0, 0.5)
    first: list[Operation] = [Compute("conv", 1.0), Begin(there), Begin(back), Wait((back,)), Mark()]
    second: list[Operation] = [Begin(there), Wait((there,)), Compute("fc", 2.0), Begin(back), Wait((back,)), Mark()]
    assert Simulation([first, second], cores=1).ends() == pytest.approx([4.0])
