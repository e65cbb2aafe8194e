"""`splitc run --measure`: the table, the correction of a cluster file, and everything that is wrong said beforehand."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from splitc.cli.plan_file import read_plan_file
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.simulation.timeline import simulate
from splitc.errors import LaunchError
from splitc.ir.cluster import Cluster, Unlike
from splitc.ir.cluster_file import digest, parse_cluster, to_toml
from splitc.ir.plan import Plan
from splitc.report.figures import as_json
from splitc.report.measurement import Factors, factors_of
from splitc.runtime.launch import torchrun
from splitc.runtime.transport.phases import Phases
from tests.cost_models.simulation.test_timeline import toy
from tests.cost_models.simulation.test_trace import rows_are_disjoint
from tests.support.command import splitc
from tests.support.compiled import CLUSTER
from tests.support.launched import BATCH, WORLD, program

Capture = pytest.CaptureFixture[str]
PREDICTED = [Phases(rank, 0.050, 0.040, 0.010, 0.020, 4000.0) for rank in range(WORLD)]
MEASURED = [Phases(0, 0.100, 0.060, 0.040, 0.050, 4000.0), Phases(1, 0.098, 0.060, 0.038, 0.050, 4400.0)]
KNOWN = load_cluster(CLUSTER)


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    program().save(tmp_path / "build")
    return Path("build")


def with_phases(plan: Plan, phases: Sequence[Phases], cluster: Cluster) -> Plan:
    """The plan, as if these phases had been simulated for it on `cluster`."""
    own = digest(cluster)
    told = replace(plan.prediction, cluster=cluster.name, priced_on=own, based_on=own)
    prediction = replace(told, phases=tuple(phases), weights={})
    return replace(plan, prediction=prediction)


def predicting(build: Path, cluster: Cluster = KNOWN, predicted: Sequence[Phases] = PREDICTED) -> Plan:
    """Put a prediction into a build; the plan that is then in it."""
    plan = with_phases(read_plan_file(build / "plan.json"), predicted, cluster)
    (build / "plan.json").write_text(plan.to_json())
    return plan


def unpredicted(plan: Plan) -> Plan:
    """The plan as nobody had simulated it."""
    return replace(plan, prediction=replace(plan.prediction, phases=(), priced_on="", step_seconds=0.0))


def file_of(steps: Sequence[Sequence[Phases]], examples: int = BATCH, between: float = 0.0) -> str:
    """What launch.py would have written."""
    measured = [{"examples": examples, "phases": [{**asdict(e), "between": between} for e in step]} for step in steps]
    span = {"rank": 1, "stream": "wait", "name": "receive from rank 0", "start": 1.0, "end": 1.5, "nbytes": 0.0}
    return json.dumps({"schema": 1, "warm_up": 3, "world": WORLD, "steps": measured, "spans": [span]})


Ran = list[list[str]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Let torchrun write this in place of starting ranks; what it was called with."""

    def leave(text: str | None = None, code: int = 0, errors: str = "") -> Ran:
        called: Ran = []

        def run(arguments: list[str], world: int, quiet: bool = False) -> subprocess.CompletedProcess[str]:
            called.append(arguments)
            if text is not None:
                Path(arguments[arguments.index("--measure") + 1]).write_text(text)
            return subprocess.CompletedProcess(arguments, code, "", errors)

        monkeypatch.setattr(torchrun, "torchrun", run)
        return called

    return leave


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_file_without_a_prediction_can_still_be_read(tmp_path: Path) -> None:
    plan = unpredicted(program().plan)
    data = json.loads(plan.to_json())
    del data["predicted"], data["priced_on"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert read_plan_file(tmp_path / "plan.json") == plan


def test_a_prediction_that_makes_no_sense_is_told(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        (3, "predicted is 3; it must be a list"),
        ([{"rank": 0}, {"rank": 1}], "predicted: number 0: step is missing"),
        ([asdict(PREDICTED[0])], "predicted: it must be for each rank of a world of 2"),
        ([asdict(PREDICTED[1]), asdict(PREDICTED[0])], "it must be for each rank of a world of 2, in their order"),
        ([{**asdict(each), "step": -1} for each in PREDICTED], "predicted: all numbers must be at least 0"),
        (
            [{**asdict(each), "step": "1 s"} for each in PREDICTED],
            "number 0: step is '1 s'; it must be a finite number",
        ),
    ]
    for predicted, problem in cases:
        data = {**json.loads(program().plan.to_json()), "predicted": predicted}
        (tmp_path / "plan.json").write_text(json.dumps(data))
        with pytest.raises(LaunchError, match=problem):
            read_plan_file(tmp_path / "plan.json")


def test_the_digest_of_a_cluster_is_that_of_its_prices() -> None:
    cluster = toy()
    device = cluster.device
    alike = replace(cluster, name="other", source="elsewhere", device=replace(device, name="x", memory=3e9))
    assert digest(alike) == digest(cluster)
    others = [
        cluster.with_bandwidth(2e7),
        replace(cluster, link=replace(cluster.link, latency=1e-3)),
        replace(cluster, device=device.scaled(1.1)),
        replace(cluster, device=replace(device, efficiency={**device.efficiency, "conv": 0.3})),
        replace(cluster, unlike=(Unlike((1,), device.scaled(2.0), cluster.link),)),
        replace(cluster, ranks_share_device=True),
    ]
    assert len({digest(each) for each in (cluster, *others)}) == len(others) + 1


# -- the comparison ----------------------------------------------------------------------------------------------------


def test_the_medians_of_all_steps_are_compared_with_the_prediction(
    build: Path, ranks: Callable[..., Ran], capsys: Capture
) -> None:
    plan = predicting(build)
    slow = [replace(each, step=9.0, compute=7.0, waiting=2.0) for each in MEASURED]
    fast = [replace(each, step=0.05, compute=0.001, waiting=0.049) for each in MEASURED]
    called = ranks(file_of([MEASURED, slow, fast]))
    done = splitc(capsys, "run build --measure --steps 6 --seed 3")
    assert (done.code, done.err) == (0, "")
    assert called[0][:-1] == ["build/launch.py", "--steps", "6", "--seed", "3", "--measure"]
    rows = [re.split(r"  +", line.strip()) for line in done.out.splitlines()]
    role, other = plan.roles
    assert ["0", role, "compute", "40 ms", "60 ms", "-33 %"] in rows
    assert ["1", other, "compute", "40 ms", "60 ms", "-33 %"] in rows
    assert ["sent", "4.00 kB", "4.00 kB", "0 %"] in rows and ["sent", "4.00 kB", "4.40 kB", "-9.1 %"] in rows
    assert ["communication", "20 ms", "50 ms", "-60 %"] in rows and ["step", "50 ms", "98 ms", "-49 %"] in rows
    assert "medians of 3 steps after 3 of warm-up" in done.out.replace("\n", " ")
    assert f"samples/s: predicted {BATCH / 0.05:,.0f}, measured {BATCH / 0.1:,.0f}, +100 %" in done.out
    assert "steps took 50 ms to 9 s" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    words = "this machine computes 1.50 times slower than cluster v100-10gbe says; its transfers are 2.50 times slower"
    assert words in done.out.replace("\n", " ")
    assert "  splitc run build --measure --correct v100-10gbe-measured.toml\n" in done.out
    assert not Path("v100-10gbe-measured.toml").exists()


def test_the_figures_of_rounds_are_means_over_as_many_steps_as_a_round_has(
    build: Path, ranks: Callable[..., Ran], capsys: Capture
) -> None:
    program("local_sgd(period=3)").save(build)
    within = [replace(each, step=0.01, compute=0.01, waiting=0.0, sent_bytes=0.0) for each in MEASURED]
    called = ranks(file_of([within, within, MEASURED, within, MEASURED, within, within]))
    done = splitc(capsys, "run build --measure --json")
    assert done.code == 0 and "--steps" not in called[0], "10 are enough"
    measured = json.loads(done.out)["ranks"][0]["measured"]
    assert measured["sent_bytes"] == pytest.approx(4000 / 3) and measured["step"] == pytest.approx(0.12 / 3)
    ranks(file_of([within, within, MEASURED, within, MEASURED, within, within]))
    text = " ".join(splitc(capsys, "run build --measure").out.split())
    assert "medians of 2 rounds of 3 steps after 3 of warm-up" in text
    few = splitc(capsys, "run build --measure --steps 5")
    assert (
        few.code == 2 and "--steps 5: --measure leaves out the first 3 steps and takes whole rounds; give 6" in few.err
    )


def test_without_a_prediction_the_table_has_what_was_measured_and_says_why(
    build: Path, ranks: Callable[..., Ran], capsys: Capture
) -> None:
    ranks(file_of([MEASURED]))
    (build / "plan.json").write_text(unpredicted(program().plan).to_json())
    done = splitc(capsys, "run build --measure")
    assert done.code == 0
    assert re.search(r"communication +50 ms$", done.out, re.MULTILINE) and "%" not in done.out
    assert "samples/s: measured 40\n" in done.out
    assert "has no predicted phases; compile the model again" in done.out
    assert "--correct" not in done.out


def test_what_passes_between_steps_and_another_batch_are_told(
    build: Path, ranks: Callable[..., Ran], capsys: Capture
) -> None:
    predicting(build)
    ranks(file_of([MEASURED], examples=2, between=0.1))
    done = splitc(capsys, "run build --measure --correct new.toml")
    assert done.code == 1 and not Path("new.toml").exists()
    text = " ".join(done.out.split())
    assert "samples/s: predicted 80, measured 10" in text
    assert "between two steps 100 ms pass" in text
    assert "the data gave 2 examples a step, the prediction is for 4" in text
    assert "new.toml was not written: nothing could be compared" in text


def test_json_is_all_of_standard_output(build: Path, ranks: Callable[..., Ran], capsys: Capture) -> None:
    plan = predicting(build)
    ranks(file_of([MEASURED]))
    done = splitc(capsys, "run build --measure --json --trace t.json")
    data = json.loads(done.out)
    assert (data["schema"], data["plan"], data["steps"], data["examples"]) == (1, plan.hash, 1, BATCH)
    one = data["ranks"][1]
    assert one["rank"] == 1 and one["roles"] == list(plan.roles_of(1))
    assert (one["predicted"]["step"], one["measured"]["step"]) == (0.05, 0.098)
    assert one["error"]["compute"] == pytest.approx(-1 / 3)
    assert data["samples_per_second"]["measured"] == pytest.approx(BATCH / 0.1)
    assert data["factors"] == pytest.approx({"compute": 1.5, "communication": 2.5})
    assert "wrote t.json" in done.err


# -- the correction ----------------------------------------------------------------------------------------------------


def test_factors_are_of_sums_over_ranks_and_of_links_only_where_much_was_predicted() -> None:
    predicted = [Phases(0, 1, 1.0, 0, 0.0005, 0), Phases(1, 1, 3.0, 0, 0.5, 0)]
    measured = [Phases(0, 1, 2.0, 0, 9.0, 0), Phases(1, 1, 3.0, 0, 0.25, 0)]
    assert factors_of(predicted, measured) == Factors(1.25, 0.5)
    assert factors_of(predicted[:1], measured[:1]) == Factors(2.0, None)
    assert factors_of([Phases(0, 1, 0, 1, 0, 0)], measured[:1]).empty


def test_a_users_cluster_file_is_corrected_and_kept_as_it_was(
    build: Path, ranks: Callable[..., Ran], capsys: Capture
) -> None:
    cluster = replace(toy(), name="ours", source="guessed", ranks_share_device=True)
    hand_written = "# do not lose me\n" + to_toml(cluster)
    Path("ours.toml").write_text(hand_written)
    predicting(build, cluster)
    ranks(file_of([MEASURED]))
    done = splitc(capsys, "run build --measure --correct ours.toml")
    assert done.code == 0, done.err
    assert "wrote ours.toml; as it was it is kept in ours.toml.bak" in done.out
    assert Path("ours.toml.bak").read_text() == hand_written
    found = parse_cluster(Path("ours.toml").read_text(), "ours.toml")
    assert found.name == "ours" and found.device.memory == cluster.device.memory
    assert found.device.efficiency_of("matmul") == pytest.approx(cluster.device.efficiency_of("matmul") / 1.5, rel=0.2)
    assert found.link.bandwidth == pytest.approx(cluster.link.bandwidth / 2.5, rel=0.25)
    assert re.fullmatch(
        r"guessed; corrected on \d{4}-\d\d-\d\d by build build, plan \w{12}: "
        r"computing took 1.5 times as long as predicted, transfers took 2.5 times as long as predicted",
        found.source,
    )
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["build", "ours.toml", "ours.toml.bak"]

    again = splitc(capsys, "run build --measure --correct ours.toml")  # would apply the same factors twice
    assert again.code == 2 and "other numbers than those that the build was priced on" in again.err
    predicting(build, found)  # as compiling again would
    assert splitc(capsys, "run build --measure --correct ours.toml").code == 0
    assert Path("ours.toml.bak").read_text() == hand_written
    assert parse_cluster(Path("ours.toml.bak2").read_text(), "") == found


def test_a_cluster_is_known_by_its_numbers_and_not_by_its_name(
    build: Path, ranks: Callable[..., Ran], capsys: Capture
) -> None:
    Path("renamed.toml").write_text(to_toml(replace(toy(), name="renamed")))
    predicting(build, replace(toy(), name="ours"))
    ranks(file_of([MEASURED]))
    assert splitc(capsys, "run build --measure --correct renamed.toml").code == 0
    predicting(build, replace(toy(), name=KNOWN.name))  # a file of that name with other numbers
    done = splitc(capsys, "run build --measure")
    assert f"into the file of cluster {KNOWN.name}" in done.out
    assert splitc(capsys, "run build --measure --correct new.toml").code == 2


# -- what is wrong -----------------------------------------------------------------------------------------------------


WRONG = [
    ("--trace t.json", "--trace belongs to --measure"),
    ("--measure --steps 3", "--measure leaves out the first 3 steps; give 4 or more"),
    ("--measure --trace nowhere/t.json", "--trace nowhere/t.json: there is no folder"),
    ("--measure --trace build", "--trace build: it is a folder"),
    ("--measure --correct mine", "a cluster file ends in .toml"),
    ("--measure --correct other.toml", "describes cluster other, but the build was planned for cluster v100-10gbe"),
    ("--measure --correct broken.toml", "broken.toml is no TOML file"),
    ("--measure --mesure", "did you mean --measure?"),
]


def test_what_is_wrong_is_said_before_a_process_starts(
    build: Path, ranks: Callable[..., Ran], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicting(build)
    Path("other.toml").write_text(to_toml(replace(toy(), name="other")))
    Path("broken.toml").write_text("name = ")
    called = ranks()
    for options, problem in WRONG:
        done = splitc(capsys, f"run build {options}")
        assert done.code == 2 and problem in done.err
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "t.json")  # root may write anywhere
    Path("t.json").touch()
    done = splitc(capsys, "run build --measure --trace t.json")
    assert done.code == 2 and "--trace t.json: t.json cannot be written to" in done.err
    assert called == []


def test_a_correction_needs_a_prediction_and_a_cluster_that_can_be_found(
    build: Path, ranks: Callable[..., Ran], capsys: Capture
) -> None:
    called = ranks()
    (build / "plan.json").write_text(unpredicted(program().plan).to_json())
    done = splitc(capsys, "run build --measure --correct mine.toml")
    assert done.code == 2 and "no predicted phases to compare with" in done.err
    predicting(build, replace(toy(), name="ours"))
    done = splitc(capsys, "run build --measure --correct mine.toml")
    assert done.code == 2 and "ours is none of the clusters that splitc knows by name" in done.err
    assert called == []


def test_a_build_that_brings_the_runtime_of_another_splitc_is_not_measured(
    tmp_path: Path, ranks: Callable[..., Ran], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program().save(tmp_path / "build", standalone=True)
    ranks(file_of([MEASURED]))
    assert splitc(capsys, "run build --measure").code == 0
    (tmp_path / "build" / "splitc" / "runtime" / "transport" / "recorder.py").unlink()
    done = splitc(capsys, "run build --measure")
    assert done.code == 2 and "brings the runtime of another splitc" in done.err


def test_ranks_that_fail_or_leave_nothing_are_told(build: Path, ranks: Callable[..., Ran], capsys: Capture) -> None:
    ranks(code=1, errors="rank 1 failed: because\n")
    done = splitc(capsys, "run build --measure --json")
    assert (done.code, done.out) == (1, "") and "rank 1 failed: because" in done.err
    for text in (None, "{}", "[", json.dumps({"steps": [{"phases": [{"rank": 0}]}]})):
        ranks(text)
        done = splitc(capsys, "run build --measure")
        assert done.code == 2 and "the ranks left no measurement" in done.err


# -- real processes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.processes
def test_a_build_is_measured_on_real_ranks_and_its_cluster_corrected(build: Path, capfd: Any) -> None:
    plan = predicting(build)
    done = splitc(capfd, "run build --measure --trace t.json --correct mine.toml --save state.pt")
    assert done.code == 0, done.err
    assert "step 10  loss" in done.out and "medians of 7 steps" in " ".join(done.out.split())
    rows = [re.split(r"  +", line.strip()) for line in done.out.splitlines()]
    sent = [row for row in rows if row[0] == "sent"]
    assert len(sent) == WORLD and all(row[1] == "4.00 kB" for row in sent)
    expected = simulate(program().program, toy()).phases
    found = [float(row[2].split()[0]) for row in sent]
    assert found == pytest.approx([phases.sent_bytes for phases in expected], abs=3.0)
    assert load_cluster("mine.toml").name == "mine"
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["pid"] for span in spans} == set(range(2 * plan.world))
    assert {span["name"] for span in spans if span["pid"] == 0 and span["cat"] == "compute"} >= {"first"}
    rows_are_disjoint({"traceEvents": events})
    assert {span["cat"] for span in spans} == {"compute", "wait", "comm"}
    assert max(span["ts"] + span["dur"] for span in spans) < 60e6
    torch.load("state.pt", weights_only=True)


def test_measuring_writes_a_page_with_both_steps_of_each_rank(
    build: Path, ranks: Callable[..., Ran], capsys: Capture
) -> None:
    ranks(file_of([MEASURED]))
    done = splitc(capsys, "run build --measure --html page.html")
    text = Path("page.html").read_text()
    assert done.code == 0 and "wrote page.html" in done.out
    assert '<td class="t">predicted</td>' in text and '<td class="t">measured</td>' in text
    assert "does not tell the memory of its ranks" in text
    figures = json.loads(text.partition('id="figures">')[2].partition("</script>")[0])
    plan = read_plan_file(build / "plan.json")
    seconds = plan.prediction.simulated_seconds * plan.period * plan.accumulate
    assert figures["timeline"]["seconds"] == pytest.approx(seconds) and figures["timeline"]["lanes"]
    whole = as_json(program().program)
    assert figures["layers"] == json.loads(json.dumps(whole["layers"])) and figures["layers"][0]["sent_bytes"]
    sent = sum(each["sent_bytes"] for each in whole["ranks"])
    assert sum(each["bytes"] for each in figures["collectives"]) == pytest.approx(sent, abs=WORLD)
    for name, text in (("timeline", '[["no span"]]'), ("figures", "[1]")):
        kept = (build / f"{name}.json").read_text()
        (build / f"{name}.json").write_text(text)
        done = splitc(capsys, "run build --measure --html page.html")
        assert done.code == 2 and f"{name}.json is damaged" in done.err and "Traceback" not in done.err
        (build / f"{name}.json").write_text(kept)
