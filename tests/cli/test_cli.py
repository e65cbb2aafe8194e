"""The commands: what they print, where they print it, how they end."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from splitc.cli.compiling import parse_pins
from splitc.cli.options import parse
from splitc.cli.trying import _planned
from splitc.cost_models.clusters.files import known_clusters
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import PlacementError
from splitc.ir.cluster_file import from_data, parse_cluster
from splitc.ir.placements import Placement
from splitc.runtime.progress import Step
from splitc.specialise import Settings, specialise
from tests import ROOT
from tests.support.command import splitc
from tests.support.compiled import CLUSTER, analyse

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("net")
COMMANDS = ("try", "inspect", "explain", "compile", "diff", "run", "export", "verify", "calibrate", "clusters")


# -- help --------------------------------------------------------------------------------------------------------------


def test_help_teaches_with_exit_codes_in_80_columns_and_examples_that_parse(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("", *COMMANDS):
        done = splitc(capsys, f"{command} --help")
        assert (done.code, done.err) == (0, "")
        assert "examples:" in done.out and f"  splitc {command}" in done.out
        assert "exit codes\n  0  done, or stopped by a signal" in done.out
        assert max(map(len, done.out.splitlines())) <= 80
        lines = re.findall(r"^  splitc (.*)$", done.out.replace("\\\n", " "), re.MULTILINE)
        assert lines
        for line in lines:
            words = [
                w.strip("\"'") for w in re.findall(r"\"[^\"]*\"|'[^']*'|\S+", line.split(" > ")[0].split("   ")[0])
            ]
            if line.startswith(COMMANDS):
                assert parse(words).command == words[0]


WRONG_NAMES = [
    ("inspect examples/alexnett.py --world 4", "there is no such file; did you mean alexnet.py?"),
    ("explain examples --world 4", "'examples' names no model"),
    ("compile examples/mlp.py --world 4 --cluster v100-10gb", "did you mean v100-10gbe?"),
    ("verify examples/mlp.py --world 4 --cluster mine.toml", "mine.toml: there is no such file"),
    ("inspect examples/mlp.py --world 4 --strategy late_multiplie", "did you mean late_multiply?"),
    ("simulate examples/nlp.py --world 4", "did you mean mlp.py?"),
    ("run nosuch", "nosuch is no build of splitc"),
    ("inspect nlp.py --world 4 --strategy lat --cluster v", "this cannot be started:"),
]


def test_help_and_wrong_names_load_no_torch() -> None:
    lines = ["import sys, splitc, splitc.cli.commands", "from splitc.cli import main", "main(['--help'])"]
    lines += [f"main({command.split()})" for command, _ in WRONG_NAMES]
    code = "\n".join([*lines, "assert 'torch' not in sys.modules"])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and all(text in " ".join(done.stderr.split()) for _, text in WRONG_NAMES), done.stderr


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_prints_the_report_and_nothing_on_stderr(capsys: Capture) -> None:
    done = splitc(capsys, "inspect net.py --world 3 --quiet --strategy layer_separation")
    assert (done.code, done.err) == (0, "")
    assert "Net on 3 ranks of v100-10gbe: layer_separation" in done.out
    for strategy in ("data_parallel", "single_device", "layer_separation"):
        assert re.search(rf"^{strategy} .*x$", done.out, re.MULTILINE)
    assert re.search(r"^parameter_server +2 worker, 1 server .*x$", done.out, re.MULTILINE)


@pytest.mark.slow
def test_a_pin_is_named_in_the_reasons_and_in_what_cannot_follow_it(capsys: Capture) -> None:
    done = splitc(capsys, "inspect net.py --world 3 --pin second=fc")
    flat = " ".join(done.out.split())
    assert "second pinned by 'second'; holds 27 parameters" in flat
    assert "data_parallel: pin 'second' asks for role 'fc' of second, but data_parallel has only all" in flat


@pytest.mark.slow
def test_a_pin_given_later_counts(capsys: Capture) -> None:
    pins = "--pin *=conv --pin first=conv --pin second=fc"
    done = splitc(capsys, f"inspect net.py --world 2 --strategy layer_separation {pins} --json")
    assert {layer["name"]: layer["role"] for layer in json.loads(done.out)["layers"]} == {
        "first": "trunk",
        "second": "head",
    }


def test_a_pin_of_parts_by_name_is_a_placement() -> None:
    assert parse_pins(["classifier.*=fc", "a = holding:sharded, group:2", "b=role:fc"]) == {
        "classifier.*": "fc",
        "a": Placement(holding="sharded", group=2),
        "b": "fc",
    }
    whole = "role:fc,holding:sharded,sync:none,group:2,split:rows"
    assert parse_pins([f"x={whole}"]) == {"x": Placement("fc", "sharded", "none", 2, "rows")}


def test_two_pins_with_one_pattern_have_the_parts_of_both_and_may_not_contradict_each_other() -> None:
    pins = parse_pins(["a=fc", "b=conv", "a=sync:none,group:4", "a=group:4"])
    assert pins == {"b": "conv", "a": Placement(role="fc", sync="none", group=4)} and list(pins) == ["b", "a"]
    with pytest.raises(
        PlacementError, match=r"--pin a=role:conv,group:2: a has role 'fc' already\n.*group '?4'? already"
    ):
        parse_pins(["a=fc", "a=group:4", "a=role:conv,group:2"])


@pytest.mark.slow
def test_pins_of_parts_make_a_mixture(capsys: Capture) -> None:
    pins = "--pin first=holding:sharded,group:2 --pin second=sync:late_multiply"
    done = splitc(capsys, f"inspect net.py --world 2 --strategy mixed {pins} --json")
    report = json.loads(done.out)
    assert done.code == 0 and report["strategy"] == "mixed"
    assert {layer["name"]: layer["role"] for layer in report["layers"]} == {"first": "stage1", "second": "stage2"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "splitc.cli", "inspect", "net.py", "--world", "2", "--cluster", "v100-10gbe", "-q"]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 0 and errors == b""


# -- compile, verify, clusters -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compile_writes_a_build_and_says_how_to_run_it(capsys: Capture) -> None:
    done = splitc(capsys, "compile net.py --world 2 --strategy data_parallel -o out/build")
    assert done.code == 0
    assert "wrote out/build/: all.py rank0.py..rank1.py launch.py" in done.out
    assert "splitc run out/build --steps 3" in done.out
    plan = Path("out/build/plan.json").read_text()
    for name in ("all.py", "rank0.py", "rank1.py", "launch.py"):
        assert f'PLAN = "{json.loads(plan)["hash"]}"' in Path("out/build", name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["layer_separation", "independent_subnets(insert_norm=True)"])
def test_a_plan_compiles_again_to_the_same_bytes(strategy: str, capsys: Capture) -> None:
    assert splitc(capsys, f"compile net.py --world 3 --strategy {strategy} -o build").code == 0
    done = splitc(capsys, "compile net.py --plan build/plan.json -o again")
    assert done.code == 0
    for path in Path("build").glob("*.py"):
        assert Path("again", path.name).read_bytes() == path.read_bytes()


def test_verify_says_that_it_holds_and_ends_with_0(capsys: Capture) -> None:
    done = splitc(capsys, "verify net.py --world 3 --strategy layer_separation --dtype float64 --json")
    assert done.code == 0 and json.loads(done.out)["holds"] is True
    done = splitc(capsys, "verify net.py --world 2 --strategy data_parallel")
    assert done.code == 0 and "holds: 3 steps of 8 examples in float32" in done.out


def test_verify_ends_with_1_when_it_does_not_hold(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.verify.verify.TOLERANCES", {})
    monkeypatch.setattr("splitc.verify.verify.Comparison.loss_error", lambda *_: 1.0)
    done = splitc(capsys, "verify net.py --world 2 --strategy data_parallel")
    assert done.code == 1 and "DOES NOT HOLD" in done.out


def test_clusters_are_a_table_with_devices_links_and_hosts(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = splitc(capsys, "clusters")
    assert done.code == 0
    rows = {line.split()[0]: line.split() for line in done.out.splitlines() if line}
    assert rows["v100-10gbe"][1:7] == ["15.7", "125", "16", "10", "30", "1"]
    assert rows["l4-pcie-100gbe"] == ["l4-pcie-100gbe", "30.3", "121", "24", "100*", "30", "8", "200", "L4"]
    assert rows["ivybridge-56ib"][1:7] == ["0.282", "64", "40", "5", "1", "32"]
    assert rows["-"] == ["-", "ranks", "4-7", "8.1", "65", "16", "5", "30", "1", "T4"]
    assert "this-machine  is not measured yet" in done.out
    names = [line.split()[0] for line in done.out.splitlines() if line.startswith("rtx3090")]
    assert names == ["rtx3090-1gbe", "rtx3090-2.5gbe", "rtx3090-10gbe"]


def test_clusters_are_data_or_files_of_all_their_numbers(capsys: Capture) -> None:
    data = json.loads(splitc(capsys, "clusters --json a6000-1gbe v100-nvlink-25gbe").out)
    assert [from_data(each, "") for each in data["clusters"]] == list(
        map(load_cluster, ("a6000-1gbe", "v100-nvlink-25gbe"))
    )
    assert {each["name"] for each in json.loads(splitc(capsys, "clusters --json").out)["clusters"]} >= set(
        known_clusters()
    )
    assert parse_cluster(splitc(capsys, "clusters cpu16-2.5gbe").out, "") == load_cluster("cpu16-2.5gbe")
    done = splitc(capsys, "clusters cpu16-2gbe")
    assert done.code == 2 and "did you mean cpu16-2.5gbe" in done.err


def test_ctrl_c_ends_with_130_and_without_a_traceback(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("splitc.cli.compiling.specialise", stop)
    done = splitc(capsys, "inspect net.py --world 2")
    assert (done.code, done.out, done.err) == (130, "", "splitc: stopped\n")


# -- progress ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_at_once_on_a_terminal_and_goes_away() -> None:
    stream = Terminal()
    with Step("tracing Net", quiet=False, stream=stream):
        time.sleep(0.05)
    assert stream.getvalue() == "\x1b[Ksplitc: tracing Net ...\r\x1b[K"


@pytest.mark.slow
def test_elsewhere_progress_shows_only_what_takes_long() -> None:
    for patience, quiet, text in ((60.0, False, ""), (0.05, False, "splitc: tracing Net ...\n"), (0.0, True, "")):
        stream = io.StringIO()
        with Step("tracing Net", quiet=quiet, stream=stream, patience=patience):
            time.sleep(0.5 if patience == 0.05 else 0.05)
        assert stream.getvalue() == text


# -- run ---------------------------------------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "splitc.cli", *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's children ignore it else
    )


def descendants(pid: int) -> set[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: set[int] = set()
    todo = [pid]
    while todo:
        below = {child for child, parent in parents.items() if parent in todo}
        todo = list(below - found)
        found |= below
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.from_scratch
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see whether a process is left")
def test_run_trains_and_ctrl_c_ends_all_ranks_after_a_step(capsys: Capture) -> None:
    splitc(capsys, "compile net.py --world 2 --strategy data_parallel -o build")
    process = start("run", "build", "--steps", "1000000")
    assert process.stdout is not None
    assert re.match(r"step 1  loss \d\.\d+", process.stdout.readline())
    ranks = descendants(process.pid)
    assert len(ranks) >= 3  # torchrun and two ranks
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        for pid in (process.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
        raise
    assert process.returncode == 0
    assert re.search(r"^stopped by SIGINT after step \d+; nothing was saved, which --checkpoints FOLDER", errors, re.M)
    assert "Traceback" not in errors
    assert [pid for pid in ranks if runs(pid)] == []


@pytest.mark.slow
@pytest.mark.processes
def test_try_plans_verifies_and_trains_and_leaves_nothing(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = sorted(Path.cwd().iterdir())
    done = splitc(capfd, "try net.py --strategy data_parallel --input 32")
    assert done.code == 0, done.err
    lines = done.out.replace("\n", " ")
    assert re.search(
        r"Net on 2 ranks of v100-10gbe: data_parallel, \S+ samples/s predicted \(one process \S+\) all",
        lines,
    )
    assert "all on ranks 0-1: first, second; 83 parameters" in lines
    assert "holds: 2 steps of 16 examples in float32 on simulated ranks against one process; the worst" in lines
    assert re.search(r"step 10  loss \d\.\d+  \d+\.\d{3} s  +\d+ samples/s then  splitc", lines)
    assert done.out.endswith("then  splitc compile net.py --world 2 --cluster v100-10gbe -o build\n")
    assert sorted(Path.cwd().iterdir()) == before
    done = splitc(capfd, "try nett.py")
    assert (done.code, done.out) == (2, "") and "did you mean net.py?" in done.err


@pytest.mark.slow
def test_try_tells_roles_as_they_were_decided_and_leaves_out_those_that_compute_nothing() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model = analyse(net, torch.randn(4, 8), torch.randint(4, (4,)), nn.functional.cross_entropy)
    placed = specialise(model, Settings(2, cluster=CLUSTER, strategy="modulo_shard(mp=2, microbatches=2)"))
    assert list(placed.plan.roles) == ["trunk", "head", "head_2"], "divided, for its schedule"
    said = ["trunk on ranks 0-1: 0; 72 parameters", "head on ranks 0-1: 2, 4; 212 parameters"]
    assert list(_planned(placed))[1:] == said
    everything = {name: replace(place, role="head") for name, place in placed.plan.placements.items()}
    told = _planned(replace(placed, plan=replace(placed.plan, placements=everything)))
    assert list(told)[1:] == ["head on ranks 0-1: 0, 2, 4; 284 parameters"]


@pytest.mark.slow
@pytest.mark.processes
def test_run_passes_arguments_on_and_ends_with_3_when_the_data_are_wrong(capsys: Capture) -> None:
    splitc(capsys, "compile net.py --world 2 --strategy data_parallel -o build")
    role = Path("build/all.py")
    role.write_text(
        role.read_text().replace("    return total.wait()", "    print('edited')\n    return total.wait()", 1)
    )
    process = start("run", "build", "--steps", "2")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "step 2  loss" in output and "step 3" not in output and "edited" in output
    Path("mydata.py").write_text("def batches(worker):\n    return []\n")
    process = start("run", "build", "--data", "mydata:batches")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 3 and "ended after 0 of 10 steps" in errors
