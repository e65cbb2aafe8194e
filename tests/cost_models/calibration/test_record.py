"""The record of what ran on a cluster, and the cluster that is fitted to it."""

from __future__ import annotations

import json
import math
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from splitc.cost_models.calibration.learning import FACTORS, fit, slowed
from splitc.cost_models.calibration.record import Seen, fitted, remember, runs_on, seen_in
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.simulation.timeline import simulate
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import digest, parse_cluster, to_toml
from splitc.ir.device import Rate
from splitc.ir.prediction import Prediction
from splitc.ir.program import LoweredProgram
from splitc.passes.predict import Predict
from splitc.runtime.journal import journal, note
from splitc.runtime.transport.recorder import Operation, Step
from tests.cost_models.simulation.test_timeline import toy
from tests.support.every_strategy import planned

STRATEGIES = ("data_parallel", "layer_separation(n_c=1, n_f=1)", "modulo_shard(mp=2)")
RATES = {"all_reduce": Rate(2e5, 1e-4)}


def slow_network() -> Cluster:
    cluster = toy(bandwidth=2e5, latency=1e-5)
    return replace(cluster, link=replace(cluster.link, collectives=RATES, processor=1e-9), world=2)


def priced(strategy: str, cluster: Cluster) -> LoweredProgram:
    program = planned(2, strategy).program
    bare = replace(program, plan=replace(program.plan, prediction=Prediction(cluster.name)))
    return Predict(cluster).run(bare)


def seen_on(truth: Cluster, program: LoweredProgram) -> Seen:
    """What a machine would be seen to do whose true numbers are these."""
    timeline = simulate(program, truth)
    return Seen(timeline.step_seconds, timeline.phases)


def file_of(folder: Path, cluster: Cluster) -> Path:
    path = folder / "ours.toml"
    path.write_text(to_toml(replace(cluster, name="ours")))
    return path


def test_the_price_of_a_plan_that_never_ran_gets_better_by_what_other_plans_took(tmp_path: Path) -> None:
    path = file_of(tmp_path, slow_network())
    truth = slowed(slow_network(), {"matmul": 1.3, "conv": 1.3, "memory": 1.3, "messages": 1.6, "all_reduce": 1.5})
    other = STRATEGIES[2]
    before = simulate(planned(2, other).program, load_cluster(path)).step_seconds
    for strategy in STRATEGIES[:2]:
        cluster = load_cluster(path)
        program = priced(strategy, cluster)
        remember(path, cluster, program.plan, seen_on(truth, program), strategy)
    learned = load_cluster(path)
    real = simulate(planned(2, other).program, truth).step_seconds
    assert abs(before / real - 1) > 0.2
    assert simulate(planned(2, other).program, learned).step_seconds == pytest.approx(real, rel=0.05)
    assert (
        learned.learned is not None
        and learned.learned.runs == 2
        and "fitted to 2 plans that ran here" in learned.source
    )
    assert load_cluster(path, learns=False) == replace(slow_network(), name="ours")


def test_what_ran_is_measured_what_is_like_it_interpolated_and_the_rest_extrapolated(tmp_path: Path) -> None:
    path = file_of(tmp_path, replace(slow_network(), link=toy(2e5).link))
    cluster = load_cluster(path)
    program = priced("data_parallel", cluster)
    assert program.plan.prediction.basis == "extrapolated"
    seconds = 1.1 * program.plan.prediction.simulated_seconds
    remember(path, cluster, program.plan, replace(seen_in([[step_of(rank, 4_000)] for rank in range(2)]), step=seconds))
    told = priced("data_parallel", load_cluster(path)).plan.prediction
    assert told.basis == "measured" and told.ran == pytest.approx(seconds)
    assert priced("layer_separation(n_c=1, n_f=1)", load_cluster(path)).plan.prediction.basis == "extrapolated"
    device = replace(cluster.device, efficiency={**cluster.device.efficiency, "conv": 0.5})
    calibrated = replace(slow_network(), device=device)
    assert priced("layer_separation(n_c=1, n_f=1)", calibrated).plan.prediction.basis == "interpolated"


def step_of(rank: int, nbytes: int) -> Step:
    """A step of half a second with a sum over both ranks in it."""
    operation = Operation("all_reduce", 0.1 + 0.01 * rank, 0.3, nbytes, (0, 1), waits=((0.2, 0.3),))
    return Step(0.0, 0.5, (operation,))


def test_the_record_has_transfers_by_kind_ranks_and_size_beside_their_price(tmp_path: Path) -> None:
    path = file_of(tmp_path, slow_network())
    program = priced("data_parallel", load_cluster(path))
    remember(path, load_cluster(path), program.plan, seen_in([[step_of(rank, 40_000)] * 3 for rank in range(2)]), "toy")
    (run,) = tomllib.loads((tmp_path / "ours.record.toml").read_text())["run"]
    assert run["name"] == "toy" and run["steps"] == [0.5]
    ((number, nbytes, price, took),) = run["transfers"]["all_reduce 2"]
    assert (number, nbytes, took) == (2, 40_000, pytest.approx(0.19))
    assert price == pytest.approx(2 * (1e-4 + 20_000 / 2e5))
    assert run["compute"][1] == pytest.approx(0.8), "of both ranks, but for what they wait"


def test_a_record_of_other_numbers_or_of_another_machine_changes_nothing(tmp_path: Path) -> None:
    cluster = slow_network()
    path = file_of(tmp_path, cluster)
    program = priced("data_parallel", load_cluster(path))
    remember(path, load_cluster(path), program.plan, Seen(30 * program.plan.prediction.simulated_seconds))
    assert load_cluster(path).learned is None, "30 times as long: it ran elsewhere"
    assert len(runs_on(path, load_cluster(path))) == 1, "which the record shows"
    remember(path, load_cluster(path), program.plan, Seen(1.2 * program.plan.prediction.simulated_seconds))
    path.write_text(to_toml(replace(toy(4e5), name="ours")))
    assert load_cluster(path).learned is None and runs_on(path, load_cluster(path)) == []


def test_a_fitted_cluster_is_a_file_that_is_read_back_and_is_not_fitted_twice(tmp_path: Path) -> None:
    path = file_of(tmp_path, slow_network())
    program = priced("data_parallel", load_cluster(path))
    for _ in range(3):
        cluster = load_cluster(path)
        again = priced("data_parallel", cluster)
        remember(path, cluster, again.plan, Seen(1.2 * program.plan.prediction.simulated_seconds))
    learned = load_cluster(path)
    assert parse_cluster(to_toml(learned), "again") == learned
    (run,) = runs_on(path, learned)
    assert len(run.steps) == 3
    now = simulate(program, learned).step_seconds
    assert now == pytest.approx(1.2 * program.plan.prediction.simulated_seconds, rel=0.03)
    path.write_text(to_toml(learned))
    assert load_cluster(path) == learned


def test_several_writers_lose_nothing_and_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    path, cluster = file_of(tmp_path, slow_network()), replace(slow_network(), name="ours")
    plans = [replace(priced("data_parallel", cluster).plan, bucket_bytes=k + 1) for k in range(8)]
    threads = [threading.Thread(target=remember, args=(path, cluster, plan, Seen(0.1))) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tomllib.loads((tmp_path / "ours.record.toml").read_text())["run"]) == 8
    with pytest.warns(UserWarning, match="was not recorded"):
        remember(tmp_path / "none.toml" / "x.toml" if path.exists() else path, toy(1.0), plans[0], Seen(0.1))


def test_trainings_of_a_build_are_read_from_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITC_CACHE", str(tmp_path))
    cluster = slow_network()
    plan = priced("data_parallel", cluster).plan
    for seconds in (0.9, 1.1, 1.0):
        note(json.loads(plan.to_json()), seconds * 1.2 * plan.prediction.simulated_seconds)
    assert journal(tmp_path, digest(cluster)).is_file()
    learned = fitted(cluster, None)
    assert learned.learned is not None
    assert learned.learned.ran == {plan.hash: pytest.approx(1.2 * plan.prediction.simulated_seconds)}


def test_a_factor_of_every_kind_makes_what_it_names_slower_and_one_below_1_keeps_efficiencies_valid() -> None:
    cluster = replace(slow_network(), local_link=toy(1e9).link, ranks_per_host=2)
    changing = [factor for factor in FACTORS if slowed(cluster, {factor: 1.5}) != cluster]
    assert [factor for factor in FACTORS if factor not in changing] == ["all_gather", "reduce_scatter", "all_to_all"]
    fast = slowed(cluster, dict.fromkeys(FACTORS, 0.25))
    assert max(fast.device.efficiency.values()) <= 1
    program = planned(2, "data_parallel").program
    assert simulate(program, fast).step_seconds == pytest.approx(simulate(program, cluster).step_seconds / 4, rel=1e-6)


def test_a_run_that_was_disturbed_hardly_moves_the_fit(tmp_path: Path) -> None:
    path = file_of(tmp_path, slow_network())
    program = priced("data_parallel", load_cluster(path))
    remember(path, load_cluster(path), program.plan, Seen(1.1 * program.plan.prediction.simulated_seconds))
    (run,) = runs_on(path, load_cluster(path))
    good = [replace(run, plan=str(k)) for k in range(4)]
    bad = replace(run, plan="bad", steps=(2.5 * run.predicted,))
    alone, both = fit(good), fit([*good, bad])
    assert math.prod(both[f] / alone[f] for f in alone) < 1.1
