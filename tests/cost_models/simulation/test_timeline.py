"""The simulation of whole programs: what it must agree with, whatever the strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from splitc.cost_models.network.alpha_beta import many_to_one, point_to_point, ring_all_reduce
from splitc.cost_models.simulation.batches import Batch
from splitc.cost_models.simulation.noise import Noise
from splitc.cost_models.simulation.operations import Begin, Compute, Wait
from splitc.cost_models.simulation.prices import Prices
from splitc.cost_models.simulation.step_operations import Step
from splitc.cost_models.simulation.timeline import simulate
from splitc.ir.cluster import Cluster, Unlike
from splitc.ir.device import Device, Link
from splitc.ir.placements import Placement
from splitc.ir.wire import wire
from tests.support.every_strategy import Asked, planned

DEVICE = Device("toy", {"float32": 1e9}, 1e9, 1e12, {"matmul": 0.5, "memory": 0.5}, 1e-6)


def toy(bandwidth: float = 1e7, latency: float = 1e-4, **options: Any) -> Cluster:
    return replace(Cluster("toy", DEVICE, Link(bandwidth, latency)), **options)


def computing(program: Any, rank: int, *names: str) -> float:
    """Seconds that a rank computes in a step, of all or of what begins with one of `names`."""
    operations = [op for op in Step(Prices(program, toy()), rank, Batch()).operations() if isinstance(op, Compute)]
    return sum(op.seconds for op in operations if not names or op.name.startswith(names))


def test_one_rank_computes_its_layers_and_updates_its_parameters() -> None:
    program = planned(2, "single_device").program
    at_once = toy(1e15, latency=0.0)  # the other rank learns the loss
    assert simulate(program, at_once, steps=1).step_seconds == pytest.approx(computing(program, 0), rel=1e-9)


def test_a_separation_of_one_rank_each_is_a_chain_and_takes_the_sum_of_all() -> None:
    """Stanza's equation (3): compute of both, and the cut there and back; the fc rank updates while conv goes back."""
    program = planned(2, "layer_separation(n_c=1, n_f=1)").program
    cut = next(op for op in wire(program, 1) if (op.kind, op.payload.name) == ("recv", "cut0"))
    link = toy(latency=0.0).link
    compute = computing(program, 0) + computing(program, 1) - computing(program, 1, "update")
    formula = compute + 2 * point_to_point(cut.nbytes, link)
    assert simulate(program, toy(latency=0.0), steps=1).step_seconds == pytest.approx(formula, rel=1e-9)


def test_late_factors_travel_once_the_last_error_is_there_and_are_multiplied_while_gradients_travel() -> None:
    """conv's gradients hide the multiplying: it comes before the step waits for their sum."""
    late = {"fc*": Placement(sync="late_multiply")}
    program = planned(4, Asked("", "late_multiply", late)).program
    operations = Step(Prices(program, toy()), 0, Batch()).operations()
    names = [
        f"begin {op.transfer.name}" if isinstance(op, Begin) else op.name
        for op in operations
        if isinstance(op, Begin | Compute)
    ]
    order = ["d_fc7", "begin X, E all.fc6[0]", "d_fc6", "d_conv", "begin all.bucket0", "multiply fc8", "multiply fc6"]
    assert [name for name in names if name in order] == order
    waits = [k for k, op in enumerate(operations) if isinstance(op, Wait) and op.transfers]
    multiplied = [k for k, op in enumerate(operations) if isinstance(op, Compute) and op.name.startswith("multiply")]
    assert waits[-3] < min(multiplied) < max(multiplied) < waits[-2]


def test_the_denominator_of_the_loss_travels_while_the_model_runs_forward() -> None:
    """Ranks that wait for each other between forward and backward would wait twice in a step."""
    program = planned(4, "data_parallel")
    lines = program.files["all.py"].splitlines()
    (starts,) = (k for k, line in enumerate(lines) if "cross_entropy_weight = comm.global_weight(target)" in line)
    assert "def weigh(" in lines[starts - 1]
    assert any("cross_entropy / cross_entropy_weight.wait()" in line for line in lines)
    assert next(str(op.payload) for op in wire(program.program, 0)) == "all.cross_entropy_weight[0]"
    operations = Step(Prices(program.program, toy()), 0, Batch()).operations()
    begin = next(k for k, op in enumerate(operations) if isinstance(op, Begin))
    wait = next(k for k, op in enumerate(operations) if isinstance(op, Wait))
    forward = [op.name for op in operations[begin:wait] if isinstance(op, Compute)]
    assert forward and not any(name.startswith("d_") for name in forward)


def test_a_servers_link_carries_all_workers() -> None:
    """At a low bandwidth a step is Stanza's equation (6): 2 n_w P / B."""
    program = planned(4, "parameter_server(overlap=False)").program
    (served,) = (stage.served for stage in program.stages)
    nbytes = sum(program.tensors[name].nbytes for bucket in served for name in bucket)
    slow = toy(1e3, latency=0.0)
    expected = 2 * many_to_one(nbytes, 3, slow.link)
    assert simulate(program, slow).step_seconds == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_one_slow_device_and_one_slow_link_make_every_step_slower() -> None:
    for strategy in ["data_parallel", "layer_separation", "late_multiply", "modulo_shard"]:
        program = planned(4, strategy).program
        usual = simulate(program, toy()).step_seconds
        slow_device = Unlike((1,), DEVICE.scaled(0.1), toy().link)
        slow_link = Unlike((2,), DEVICE, Link(1e5, 1e-4))
        assert simulate(program, toy(unlike=(slow_device,))).step_seconds > usual, strategy
        assert simulate(program, toy(unlike=(slow_link,))).step_seconds > 2 * usual, strategy


def test_a_ring_over_hosts_uses_the_links_of_all_their_ranks_or_the_one_they_share() -> None:
    program = planned(4, "data_parallel").program
    hosts = toy(local_link=Link(1e9, 1e-6), ranks_per_host=2)
    shared = simulate(program, replace(hosts, link=replace(hosts.link, shared=True))).step_seconds
    assert shared == pytest.approx(simulate(program, toy()).step_seconds, rel=1e-9)
    own = simulate(program, hosts).step_seconds
    assert own == pytest.approx(simulate(program, toy(2 * hosts.link.bandwidth)).step_seconds, rel=1e-9)


@pytest.mark.slow
def test_a_step_is_the_mean_of_a_round() -> None:
    """At a low bandwidth what a round exchanges is all that counts, and an ordinary step waits for nothing."""
    for period in [1, 2, 8]:
        program, every = planned(4, f"local_sgd(period={period})").program, planned(4, "local_sgd(period=1)").program
        slow = toy(1e3, latency=0.0)
        found, of_one = simulate(program, slow), simulate(every, slow)
        computed = computing(program, 0)
        between = of_one.step_seconds - computed
        assert found.step_seconds == pytest.approx(computed + between / period), period
        for rank, phases in enumerate(found.phases):
            assert phases.sent_bytes == pytest.approx(sum(op.per_step for op in wire(program, rank))), period
            assert phases.sent_bytes == pytest.approx(of_one.phases[rank].sent_bytes / period), period
            assert phases.compute + phases.waiting == pytest.approx(phases.step), period


def test_the_slowest_rank_of_a_round_makes_all_others_wait() -> None:
    program = planned(4, "local_sgd(period=8)").program
    slow = Unlike((1,), DEVICE.scaled(0.1), toy().link)
    phases = simulate(program, toy(unlike=(slow,))).phases
    assert [each.step for each in phases] == pytest.approx([phases[1].step] * 4)
    assert phases[1].compute > 5 * phases[0].compute and phases[0].waiting > 0.8 * phases[0].step


def test_fragments_in_turns_hide_behind_the_updates_that_they_travel_under() -> None:
    """At a bandwidth where a fragment travels for less than three updates, and a model for more than one."""
    for delay, hidden in [(0, False), (3, True)]:
        options = "period=8, fragments=2"
        program = planned(4, f"local_sgd({options}, delay={delay})" if delay else f"local_sgd({options})").program
        computed = computing(program, 0)
        averages = [op for op in wire(program, 0) if op.payload.what == "average"]
        fast = toy(sum(op.sent for op in averages) / (2 * computed), latency=0.0)
        found = simulate(program, fast)
        waited = sum(ring_all_reduce(op.nbytes, 4, fast.link) for op in averages) / 8
        assert found.phases[0].communication == pytest.approx(waited, rel=0.01), "and the loss"
        assert (found.phases[0].waiting < 0.1 * waited) == hidden, delay
        assert found.phases[0].sent_bytes == pytest.approx(sum(op.per_step for op in wire(program, 0))), delay


def test_spans_are_kept_when_asked_for() -> None:
    program = planned(2, "data_parallel").program
    assert simulate(program, toy()).spans == ()
    spans = simulate(program, toy(), steps=1, record=True).spans
    assert {"compute", "comm", "wait"} == {span.stream for span in spans}
    assert {span.rank for span in spans} == {0, 1}


@pytest.mark.slow
def test_gradients_of_accumulated_batches_are_exchanged_once() -> None:
    """On a slow link all but the exchange is hidden or paid in each batch: compute + exchange / batches."""
    for strategy in ["data_parallel", "parameter_server", "layer_separation", "modulo_shard(mp=2)"]:
        program = planned(4, strategy).program
        slow = toy(1e4, latency=0.0)
        usual = simulate(program, slow)
        assert simulate(program, slow, accumulate=1) == usual, strategy
        found = [simulate(program, slow, accumulate=batches) for batches in (2, 4, 8)]
        once = {"bucket", "pull", "push"}
        for batches, each in zip((2, 4, 8), found, strict=True):
            for rank, phases in enumerate(each.phases):
                sent = sum(op.sent / (batches if op.payload.what in once else 1) for op in wire(program, rank))
                assert phases.sent_bytes == pytest.approx(sent), strategy
                assert phases.compute + phases.waiting == pytest.approx(phases.step), strategy
        times = [usual.step_seconds, *(each.step_seconds for each in found)]
        assert times == sorted(times, reverse=True), strategy


def test_a_round_counts_updates_not_the_batches_that_are_accumulated_to_them() -> None:
    program = planned(4, "local_sgd(period=4)").program
    slow = toy(1e3, latency=0.0)
    once, thrice = simulate(program, slow), simulate(program, slow, accumulate=3)
    assert once.phases[0].waiting == pytest.approx(3 * thrice.phases[0].waiting, rel=0.01)


def test_where_computing_varies_more_ranks_that_meet_take_longer_and_no_draw_depends_on_chance() -> None:
    varying = toy(1e12, 0.0, device=replace(DEVICE, jitter=1e-4))
    assert simulate(planned(4, "data_parallel").program, toy()).p90 == 0.0
    lost = []
    for world in (2, 4, 8):
        program = planned(world, "data_parallel").program
        found, steady = simulate(program, varying), simulate(program, replace(varying, device=DEVICE))
        assert found == simulate(program, varying)
        assert found.p50 < found.p90
        lost.append(found.step_seconds / steady.step_seconds)
    assert 1 < lost[0] < lost[1] < lost[2]


def test_noise_leaves_the_mean_however_a_computation_is_divided() -> None:
    for pieces in (1, 7, 100):
        noise = [Noise(1e-3, rank, sample) for rank in range(20) for sample in range(2)]
        totals = [sum(each.of(1.0 / pieces) for _ in range(pieces)) for each in noise]
        assert abs(sum(totals)) / len(totals) < 0.01
        assert sum(total**2 for total in totals) / len(totals) == pytest.approx(1e-3, rel=0.6)


def test_messages_cost_their_ranks_processor_time_however_small() -> None:
    program = planned(4, "data_parallel").program
    link = replace(toy().link, processor=1e-12)
    usual, slower = (
        simulate(program, toy(link=replace(link, message_processor=each))).step_seconds for each in (0.0, 0.01)
    )
    assert slower > usual + 0.01
