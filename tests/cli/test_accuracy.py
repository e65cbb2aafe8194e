"""`splitc clusters --accuracy`: what ran beside its price."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitc.cost_models.calibration.record import Seen, remember
from splitc.cost_models.clusters.named import load_cluster
from tests.cost_models.calibration.test_record import file_of, priced, seen_on, slow_network
from tests.support.command import splitc


def test_what_ran_stands_beside_its_price_with_the_median_and_the_worst_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(tmp_path, slow_network())
    nothing = splitc(capsys, f"clusters --accuracy {path}")
    assert nothing.code == 0 and "nothing was measured on it yet" in nothing.out
    cluster = load_cluster(path)
    truth = slow_network().with_bandwidth(1.5e5)
    for strategy in ("data_parallel", "modulo_shard(mp=2)"):
        program = priced(strategy, cluster)
        remember(path, cluster, program.plan, seen_on(truth, program), "toy")
    lost = priced("layer_separation(n_c=1, n_f=1)", cluster).plan
    remember(path, cluster, lost, Seen(100.0), "elsewhere")
    done = splitc(capsys, f"clusters --accuracy {path}")
    assert done.code == 0 and max(map(len, done.out.replace(str(path), "ours.toml").splitlines())) <= 80
    assert done.out.count("toy") == 2 and "not this machine" in done.out
    assert "predicted before it ran: median error" in done.out and "by the fit: median error" in done.out
    told = json.loads(splitc(capsys, f"clusters --accuracy {path} --json").out)["clusters"][str(path)]
    errors = [abs(run["fitted"] / run["measured"] - 1) for run in told["runs"] if not run["elsewhere"]]
    assert max(errors) < 0.05 and told["factors"]["messages"] > 1
