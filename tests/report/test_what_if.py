"""What another bandwidth, batch, world or memory would change: where the choice flips, and what fits."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any, cast

import pytest
from torch import nn, randn

from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import PlacementError
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.passes.place import Place
from splitc.report import what_if
from splitc.report.what_if import Quantity, advice, breakpoints, choice_text, planned, quantities, simulated_step
from splitc.specialise import Settings, specialise
from splitc.strategies.data_parallel import DataParallel
from splitc.strategies.single_device import SingleDevice
from tests.support.compiled import analyse

NAMES = ["bandwidth", "batch", "world", "memory"]
SLOW = 2e9  # bytes/s, for which one rank is faster than two


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice takes as long as it takes, however slow the machine is."""
    monkeypatch.setenv("SPLITC_ADVICE", "inf")


@cache
def model() -> Program:
    """Two layers; 4.4 MB of parameters."""
    net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1000))
    return analyse(net, randn(256, 64), randn(256, 1000), nn.functional.mse_loss)


def place(world: int = 4, bandwidth: float = 1.25e9, **options: object) -> Place:
    cluster = load_cluster("v100-10gbe").with_bandwidth(bandwidth)
    return Settings(world, cluster=cluster, **options).place()  # type: ignore[arg-type]


class Number(Quantity):
    """A quantity whose values stand for their plans."""

    def plan(self, value: float) -> Any:
        self.plans[value] = None
        return value


def number(now: int = 100, whole: bool = False) -> Number:
    return Number("number", now, str, whole, planned, lambda value: (place(), model()))


def test_a_boundary_is_found_to_3_percent_with_few_questions() -> None:
    for limit in [7.0, 33.0, 99.9, 100.1, 130.0, 1550.0]:
        quantity = number()
        reach = quantity.reach(16 if limit > 100 else 1 / 16)
        found = quantity.boundary(partial(operator.gt if limit > 100 else operator.le, limit), reach)
        assert found is not None
        low, high = sorted(found)
        assert low <= limit <= high <= 1.031 * low
        assert len(quantity.plans) <= 10


def test_a_boundary_of_whole_numbers_is_between_neighbours_and_none_is_none() -> None:
    quantity, few = number(whole=True), number(10, whole=True)
    assert quantity.boundary(lambda value: cast(Any, value) < 107, quantity.reach(16)) == (106, 108)
    assert few.boundary(lambda value: cast(Any, value) > 3, few.reach(1 / 10)) == (4, 3)
    assert quantity.boundary(lambda value: True, quantity.reach(16)) is None


@pytest.mark.slow
def test_the_choice_on_both_sides_of_a_breakpoint_is_what_it_says() -> None:
    asked = place(2, 1e10, global_batch=512)
    by_bandwidth = list(islice(breakpoints(asked, model()), 2))
    now = choice_text(asked.run(model()).plan)
    assert [each.quantity for each in by_bandwidth] == ["bandwidth", "bandwidth"]
    assert any(each.flips for each in by_bandwidth)
    for each in by_bandwidth:
        beyond = each.value * (0.96 if each.text.startswith("below") else 1)
        this_side = each.value * (0.96 if each.text.startswith("from") else 1)
        at = [replace(asked, cluster=asked.cluster.with_bandwidth(value)) for value in (this_side, beyond)]
        here, there = (choice_text(one.run(model()).plan) for one in at)
        assert (here, there) == (now, each.choice)
        assert each.flips == (each.choice != now)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`only("memory")`: no other quantity is looked at."""

    def look_at(name: str) -> None:
        some = NAMES.index(name)
        monkeypatch.setattr(what_if, "quantities", lambda *request: quantities(*request)[some : some + 1])

    return look_at


@pytest.mark.slow
def test_all_quantities_are_looked_at_in_their_order() -> None:
    found = [each.quantity for each in breakpoints(place(2, strategy="data_parallel"), model())]
    assert list(dict.fromkeys(found)) == NAMES and found == sorted(found, key=NAMES.index)


@pytest.mark.slow
def test_memory_goes_down_to_where_nothing_fits(only: Callable[[str], None]) -> None:
    only("memory")
    asked = partial(place, 2, strategy="data_parallel")
    last = next(each for each in breakpoints(asked(), model()) if each.flips and not each.choice)
    asked(memory=last.value * 1.01).run(model())
    with pytest.raises(PlacementError):
        asked(memory=last.value * 0.96).run(model())


@pytest.mark.slow
def test_a_world_is_a_whole_number_and_no_larger_than_the_cluster(only: Callable[[str], None]) -> None:
    few = place(3, strategy="data_parallel")
    limited = replace(few, cluster=replace(few.cluster, world=4))
    world = quantities(few, model())[2]
    assert (world.reach(4 / 3), world.reach(1 / 3), world.reach(1)) == ([4], [2, 1], [])
    assert quantities(place(8), model())[2].reach(2) == [9, 10, 12, 16]
    only("world")
    assert max(each.value for each in breakpoints(limited, model())) <= 4


@cache
def slowly() -> Plan:
    """The plan of 2 ranks with slow links."""
    return place(2, SLOW).run(model()).plan


@cache
def told() -> str:
    """The advice about it."""
    return advice(place(2, SLOW), model(), slowly())


@pytest.mark.slow
def test_idle_ranks_are_told_what_would_put_them_to_work() -> None:
    plan, text = slowly(), told()
    assert plan.strategy == "single_device"
    assert text.startswith("1 of 2 ranks is idle: from ") and text.endswith(", 2 ranks are faster.")
    rate = float(text.partition("from ")[2].partition(" Gbit/s")[0]) * 1e9 / 8
    busy = place(2, rate * 1.01).run(model()).plan.roles.values()
    assert {rank for ranks in busy for rank in ranks} == {0, 1}
    assert place(2, rate * 0.95).run(model()).plan.strategy == "single_device"


@pytest.mark.slow
def test_idle_ranks_that_nothing_within_reach_puts_to_work_are_counted_all_the_same() -> None:
    hopeless = place(2, 10.0)
    text = advice(hopeless, model(), hopeless.run(model()).plan)
    assert text == "1 of 2 ranks is idle; 64 times the bandwidth, batch or accumulate would not change that."


@pytest.mark.slow
def test_where_all_ranks_work_it_is_told_only_whether_one_alone_is_as_fast_with_the_same_examples() -> None:
    named, both = place(bandwidth=1e6, strategy="single_device"), place(2, bandwidth=1e11)
    assert advice(named, model(), named.run(model()).plan) == ""
    plan = both.run(model()).plan
    assert advice(both, model(), plan) == ""
    slow = replace(plan, prediction=replace(plan.prediction, step_seconds=10.0))
    text = advice(both, model(), slow)
    assert re.fullmatch(rf"One rank alone takes .* for all {plan.global_batch} examples, 2 ranks 10 s: .*", text), text


@pytest.mark.slow
def test_one_rank_takes_the_examples_of_all_where_no_plan_on_several_is_faster() -> None:
    """On this network two ranks train more samples/s than one with half the examples, and fewer than one with all."""
    asked = place(2, 8e9)
    several, alone = asked.run(model()).plan, (shared := replace(asked, fewer_readers=True)).run(model()).plan
    one = replace(asked, strategy=SingleDevice())
    as_many = replace(one, global_batch=several.global_batch).run(model()).plan
    assert (several.global_batch, several.strategy) == (512, "late_multiply")
    assert one.run(model()).plan.samples_per_second < several.samples_per_second < as_many.samples_per_second
    assert alone.decided == as_many.decided and alone.roles == {"all": (0,)}
    rates = {each.strategy: each.samples_per_second for each in alone.candidates if each.feasible and each.exact}
    assert max(rates, key=rates.__getitem__) == "single_device" and rates["late_multiply"] > 0
    text = advice(shared, model(), alone)
    assert text.startswith("One rank alone takes ") and " for 512 examples, late_multiply on several " in text
    for kept in (replace(shared, global_batch=256), replace(shared, strategy=DataParallel())):
        assert kept.run(model()).plan.global_batch == (kept.global_batch or 512)
    fast = replace(shared, cluster=asked.cluster.with_bandwidth(1e11)).run(model()).plan
    assert {rank for ranks in fast.roles.values() for rank in ranks} == {0, 1} and fast.global_batch == 512


@pytest.mark.slow
def test_what_does_not_fit_says_what_would_and_that_does() -> None:
    settings = Settings(2, cluster=load_cluster("v100-10gbe"), strategy="data_parallel", memory=13e6)
    with pytest.raises(PlacementError, match="memory") as raised:
        specialise(model(), settings)
    (note,) = raised.value.__notes__
    assert note.startswith("memory is what is short: a rank has 13.0 MB; it would fit with ")
    need = float(note.partition("fit with ")[2].partition(" MB a rank")[0]) * 1e6
    specialise(model(), replace(settings, memory=need * 1.01))
    with pytest.raises(PlacementError):
        specialise(model(), replace(settings, memory=need * 0.95))


@pytest.mark.slow
def test_advice_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = place(2, SLOW)
    monkeypatch.setenv("SPLITC_ADVICE", "0")
    with pytest.raises(TimeoutError):
        advice(slow, model(), slowly())
    with pytest.raises(PlacementError) as raised:
        specialise(model(), Settings(2, cluster=slow.cluster, strategy="data_parallel", memory=1e6))
    assert not getattr(raised.value, "__notes__", [])
    monkeypatch.setenv("SPLITC_ADVICE", "soon")
    with pytest.raises(PlacementError, match="SPLITC_ADVICE is 'soon'; it must be a number of seconds, 0 for none"):
        advice(slow, model(), slowly())


@pytest.mark.slow
def test_with_the_accumulated_batches_that_advice_names_data_parallelism_is_faster_by_simulation() -> None:
    slow = place(2, SLOW)
    alone = slow.run(model())
    number = int(told().partition("with accumulate=")[2].partition(",")[0])
    every = replace(slow, strategy=DataParallel()).run(model())

    def faster(accumulate: int) -> bool:
        steps = [simulated_step(each, slow.cluster, accumulate).step_seconds for each in (every, alone)]
        return every.plan.global_batch / steps[0] > alone.plan.global_batch / steps[1]

    assert number > 1 and faster(number) and not faster(number // 2)
