"""Everything a user can get wrong ends with exit code 2 and one text: what, where, what to do.  Never a traceback."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from splitc.cli import compiling
from splitc.cli.launching import check_data
from splitc.cli.plan_file import read_plan_file
from splitc.cost_models.clusters import named
from splitc.errors import LaunchError
from tests import ROOT
from tests.support.command import NET, edited, splitc

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("net")


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "net.py").write_text(NET)
    from splitc.cli import main

    plan = "layer_separation(n_c=2, n_f=1)"
    arguments = ["--world", "3", "--strategy", plan, "--cluster", "v100-10gbe", "-q", "-o", str(folder / "build")]
    assert main(["compile", str(folder / "net.py"), *arguments]) == 0
    return folder / "build"


@pytest.fixture
def build(original: Path, tmp_path: Path) -> Path:
    """A build for 3 ranks, in the current folder."""
    return Path(shutil.copytree(original, tmp_path / "build"))


def refused(capsys: Capture, arguments: str, *words: str) -> None:
    """The command ends with 2, prints nothing on stdout, and the text holds all words."""
    done = splitc(capsys, arguments)
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.startswith("splitc: ")
    flat = " ".join(done.err.split())
    for word in words:
        assert word in flat


OPTIONS = [
    ("", "the following arguments are required: COMMAND", "see splitc --help"),
    ("inspekt net.py", "unknown command 'inspekt'; did you mean inspect?"),
    ("inspect --world 2", "required: model", "see splitc inspect --help"),
    ("explain net.py", "required: --world"),
    ("inspect net.py", "say how many ranks: --world 4"),
    ("inspect net.py --world 0", "argument --world: '0' is not a whole number of at least 1"),
    ("inspect net.py --world 2 --clutser x", "unknown option --clutser; did you mean --cluster?"),
    ("inspect net.py --world 2 --glob 4", "unknown option --glob; "),
    ("inspect net.py other.py --world 2", "'other.py' is one argument too many"),
    ("inspect net.py --world 2 --memory lots", "'lots' is no amount of memory; write 16GB, 40GiB"),
    ("inspect net.py --world 2 --global-batch 0", "argument --global-batch: '0'"),
    ("verify net.py --world 2 --dtype float46", "unknown --dtype 'float46'; did you mean float64?"),
    ("verify net.py --world 2 --steps none", "argument --steps: 'none' is not a whole number"),
    ("inspect net.py --world 2 --cluster v100-10gb", "unknown cluster 'v100-10gb'; did you mean v100-10gbe?"),
    ("inspect net.py --world 2 --cluster mine.toml", "cannot read the cluster file mine.toml"),
    ("inspect net.py --world 2 --strategy data_paralel", "unknown strategy", "did you mean data_parallel?"),
    ("inspect net.py --world 2 --strategy local_sgd(period=4,delay=4)", "delay is 4, but a fragment arrives"),
    ("inspect net.py --world 2 --strategy parameter_server(servers=0)", "servers is 0; it must be a whole number of"),
    ("inspect net.py --world 2 --strategy modulo_shard(mp=1)", "mp is 1; it must be a whole number of at least 2"),
    ("inspect net.py --world 2 --strategy modulo_shard(scheme=KB)", "scheme is 'KB'; it must be one of BK, B, B/K"),
    ("inspect net.py --world 2 --strategy modulo_shard(updates=0)", "updates is 0; it must be one of once, every"),
    ("inspect net.py --world 2 --strategy layer_separation(nc=1)", "no option 'nc'; did you mean n_c?"),
    ("inspect net.py --world 2 --strategy layer_separation(1)", "as in layer_separation(n_c=1)"),
    ("inspect net.py --world 2 --strategy layer_separation(n_c=1", "write its options in parentheses"),
    ("inspect net.py --world 2 --pin first", "--pin first: write PATTERN=PLACEMENT, for example --pin "),
    ("inspect net.py --world 2 --pin first=haed", "--pin first=haed: role is 'haed'; did you mean head?"),
    ("inspect net.py --world 2 --pin first=holdng:sharded", "there is no part 'holdng'; did you mean holding?"),
    ("inspect net.py --world 2 --pin first=holding:shard", "holding is 'shard'; did you mean sharded?"),
    ("inspect net.py --world 2 --pin first=group:0", "--pin first=group:0: group is 0; it must be a whole number"),
    ("inspect net.py --world 2 --pin first=fc,group:2", "'fc' has no name; write parts as in --pin"),
    ("inspect net.py --world 2 --pin first=sync:", "--pin first=sync:: sync has no value"),
    ("inspect net.py --world 2 --pin first=group:2,group:4", "group is given twice"),
    ("inspect net.py --world 2 --pin first=a:1,group:x --pin second", "no part 'a'", "second: write PATTERN=PLACE"),
    ("inspect net.py --world 2 --pin first=fc --pin first=conv", "--pin first=conv: first has role 'fc' already"),
    ("inspect net.py --world 2 --strategy no --cluster no --pin x", "unknown strategy", "unknown cluster", "PATTERN="),
    ("inspect net.py --world 2 --input 4x", "--input 4x: write sizes as in 4x3x224x224"),
    ("inspect net.py --world 2 --input 0x6", "every size must be at least 1"),
    ("inspect net.py --world 2 --input 4x6,5x6", "inputs have different batch sizes"),
]  # fmt: skip


def test_options_are_looked_at_before_a_model_is_loaded(capsys: Capture) -> None:
    Path("net.py").write_text("raise AssertionError('the model was loaded')")
    for case in OPTIONS:
        refused(capsys, *case)


def test_a_model_is_looked_at_before_this_machine_is_measured(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes seconds, what is wrong with a model is known in less."""
    monkeypatch.setattr(named, "measure_this_machine", lambda: pytest.fail("this machine was measured"))
    monkeypatch.setattr(compiling, "measured_before", lambda: None)
    fails = edited(forward="        return self.second(x)")
    for command, text, said in (
        ("try net.py", "model = 3", "not a torch.nn.Module"),
        ("verify net.py --world 2", "1 / 0", "ZeroDivisionError"),
        ("inspect net.py --world 2 --require step<=1s", fails, "does not run on its example"),
    ):
        Path("net.py").write_text(text)
        refused(capsys, f"{command} --cluster this-machine", said)


MODELS = [
    ("nett.py", NET, "nett.py: there is no such file; did you mean net.py?"),
    (".", NET, "'.' names no model; a model is given as path/model.py[:name] or package.module:name"),
    ("net", NET, "'net' names no model; did you mean net.py?"),
    ("net.py:modle", NET, "net.py has no 'modle'; did you mean"),
    ("nothere.net:model", NET, "there is no module nothere here or among the installed packages"),
    ("net:modell", NET, "net has no 'modell'"),
    ("net.py", "", "net.py has no 'model'; it should offer `model`"),
    ("net.py", edited(model="net = Net()"), "net.py has no 'model'; did you mean net.py:net?"),
    ("net.py", edited(model="model = 3"), "net.py: model is a int, not a torch.nn.Module"),
    ("net.py", edited(model="def model(width):\n    return Net()"), "it must work without arguments"),
    ("net.py", edited(model="def model():\n    return 1 / 0"), "ZeroDivisionError", "net.py: model() fails (line 16)"),
    ("net.py", "def broken(:\n    pass\n", "SyntaxError in net.py:1 (def broken(:)"),
    ("net.py", "x = 1\ny = x / 0\n", "ZeroDivisionError in net.py:2"),
    ("net.py", "import nonesuch_package\n", "No module named 'nonesuch_package'; install it"),
    ("net.py", "import sys\nsys.exit(3)\n", "it ends Python itself, by sys.exit in net.py:2"),
    ("net.py", edited(model="model = nn.ReLU()"), "no trainable parameter", "there is nothing to train"),
    ("net.py", edited(example=""), "net.py has no `example`; add one (a tuple of tensors), or give --input"),
    ("net.py", edited(target=""), "has a `loss` but no `target`"),
    ("net.py", edited(loss=""), "has a `target` but no `loss`; add one"),
    ("net.py", edited(loss="", target=""), "returns a tensor of shape (-1, 3), not a loss"),
    ("net.py", edited(loss="loss = 'mean'"), "loss is a str; give a function of (output, target)"),
    ("net.py", edited(example="example = [[1.0, 2.0]]"), "example has no tensor; give a tensor, a tuple"),
    ("net.py", edited(example="import numpy\nexample = numpy.zeros((4, 6))"), "torch.from_numpy makes a tensor of it"),
    ("net.py", edited(example="example = 3"), "example is a int; give a tensor"),
    ("net.py", edited(example="example = ()"), "example has no tensor"),
    ("net.py", edited(example="example = {'y': torch.randn(4, 6)}"), "does not fit Net.forward(x)", "missing"),
    ("net.py", edited(example="example = torch.randn(4, 6), torch.randn(4, 6)"), "too many positional arguments"),
    ("net.py", edited(example="example = torch.randn(4, 7)"), "does not run on its example at net.py:12", "(4, 7)"),
    ("net.py", edited(example="example = torch.randn(4, 6).double()"), "same dtype", "x (4, 6) float64"),
    ("net.py", edited(example="example = torch.ones(4, 6).long()"), "does not run on its example", "x (4, 6) int64"),
    ("net.py", edited(example="example = torch.zeros(0, 6)"), "x has 0, target has 4 rows", "dim 0 must be the batch"),
    ("net.py", edited(example="example = torch.tensor(1.0)"), "0-d tensor; dim 0 of every input must be the batch"),
    ("net.py", edited(example="def example(rows):\n    return rows"), "net.py: example() fails", "without arguments"),
    ("net.py", edited(target="target = torch.zeros(5).long()"), "x has 4, target has 5 rows", "must be the batch"),
    ("net.py", edited(target="target = [0, 1, 2, 0]"), "target is a list with a int; give a tensor"),
    ("net.py", edited(target="target = torch.zeros(4)"), "the loss of Net does not run on its example"),
    ("net.py", edited(target="target = torch.full((4,), 9)"), "target holds 9, out of bounds", "below 3"),
    ("net.py", edited(forward="        return self.first(x).missing()"), "no attribute 'missing'", "net.py:12"),
    ("net.py", edited(forward="        return self.second(x)"), "the model of Net does not run", "net.py:12"),
]  # fmt: skip


@pytest.mark.slow
def test_a_model_that_cannot_be_used_is_told_by_name_and_line(capsys: Capture) -> None:
    for argument, text, *words in MODELS:
        sys.modules.pop("net", None)
        Path("net.py").write_text(text)
        refused(capsys, f"inspect {argument} --world 2", *words)


PLANS = [
    ("--world 1 --strategy layer_separation", "a world of 1 cannot be divided into trunk and head ranks"),
    ("--world 2 --strategy layer_separation(n_c=2,n_f=1)", "n_c = 2 and n_f = 1 are 3 ranks, but the world has 2"),
    ("--world 2 --strategy layer_separation(n_c=2)", "n_c = 2 leaves no rank of 2 for the other role"),
    ("--world 2 --pin frist=fc", "pin 'frist' matches no layer; near it are first"),
    ("--world 2 --pin first=haed", "role is 'haed'; did you mean head? it must be one of all, worker, conv, fc"),
    ("--world 2 --strategy data_parallel --pin first=fc", "pin 'first' asks for role 'fc'"),
    ("--world 2 --pin first=all --pin second=fc", "no strategy has a plan for 2 ranks"),
    ("--world 2 --strategy layer_separation --pin first=fc --pin second=conv", "keeps to the pins: first is pinned by"),
    ("--world 2 --strategy modulo_shard(mp=3)", "groups of mp = 3 do not divide 2 ranks"),
    ("--world 2 --strategy parameter_server(servers=5)", "a world of 2 has no room for 5 servers and a worker"),
    ("--world 2 --memory 100", "no strategy has a plan", "role all (rank 0) needs", "and has 100 B"),
    ("--world 2 --memory 1kB --strategy data_parallel", "each rank of role all (ranks 0 to 1) needs", "has 1.00 kB"),
    ("--world 2 --memory 0.5kB --strategy layer_separation", "even in the cut that needs least"),
    ("--world 4 --global-batch 3 --strategy data_parallel", "3 examples cannot be shared out to 4 ranks"),
    ("--world 2 --input 4x9", "does not run on its example"),
    ("--world 2 --input 4x6,4x6", "--input gives 2 sizes, but the example has 1 tensor;"),
]  # fmt: skip


@pytest.mark.slow
def test_what_cannot_be_planned_is_told_with_its_numbers(capsys: Capture) -> None:
    for options, *words in PLANS:
        refused(capsys, f"inspect net.py {options}", *words)


CLUSTER = """name = "small"
world = 2
[device]
name = "d"
memory_bandwidth = 1e9
memory = 1e9
launch = 0
flop_rate.float32 = 1e9
efficiency = {matmul = 1, memory = 1}
[link]
bandwidth = 1e9
latency = 0
"""


def test_a_cluster_that_does_not_do_is_refused_before_the_model_is_loaded(capsys: Capture) -> None:
    Path("net.py").write_text("raise AssertionError")
    for text, message in (
        (CLUSTER, "3 ranks were asked for, but cluster small has 2 devices"),
        (CLUSTER.replace("latency", "latncy"), "link.latncy is an unknown key; did you mean latency?"),
        ("name =", "mine.toml is no TOML file"),
    ):
        Path("mine.toml").write_text(text)
        refused(capsys, "inspect net.py --world 3 --cluster mine.toml", message)


# -- builds ------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_a_build_is_not_written_to(capsys: Capture) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    refused(capsys, "compile net.py --world 2 -o mine", "mine is not empty and is no build of splitc")
    assert os.listdir("mine") == ["notes.txt"]


def test_a_file_in_the_place_of_the_folder_is_refused(capsys: Capture) -> None:
    refused(capsys, "compile net.py --world 2 -o net.py", "net.py is a file; give a folder")
    refused(capsys, "compile net.py --world 2 -o net.py/build", "cannot write net.py/build", "is not a folder")


def test_a_folder_that_cannot_be_written_is_refused(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root, who may write everywhere
    refused(capsys, "compile net.py --world 2 -o there", "cannot write there", "cannot be written to; give another")


@pytest.mark.slow
def test_a_build_that_was_edited_is_not_overwritten(build: Path, capsys: Capture) -> None:
    with (build / "head.py").open("a") as file:
        file.write("# mine\n")
    refused(capsys, "compile net.py --world 2 -o build", "head.py was edited")


RUNS = [
    ("run nowhere", "nowhere is no build of splitc", "splitc compile MODEL --world N -o nowhere"),
    ("run", "the following arguments are required: build"),
    ("run build --stepps 3", "launch.py has no option --stepps; did you mean --steps?"),
    ("run build --steps zero", "argument --steps: 'zero' is not a whole number of at least 1"),
    ("run build --backend ncl", "unknown --backend 'ncl'; did you mean nccl?"),
    ("run build --save nowhere/state.pt", "there is no folder"),
    ("run build --data mydata", "--data mydata: write module:function"),
    ("run build --data nosuch:batches", "there is no module nosuch here"),
    ("run build --data nosuch.data:batches", "No module named 'nosuch'"),
    ("run build --data net:batches", "net has no batches; it has "),
]  # fmt: skip


def test_a_run_that_cannot_work_starts_no_process(
    build: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    for case in RUNS:
        refused(capsys, *case)


def edit(path: Path, changes: dict[str, object]) -> None:
    """Change a plan, or the placement of its first layer, where the key is one of a placement."""
    plan = json.loads(path.read_text())
    for key, value in changes.items():
        part = key in ("role", "holding", "sync", "group", "split", "splits")
        (plan["placements"]["first"] if part else plan)[key] = value
    path.write_text(json.dumps(plan))


def groups(role: str = "trunk", **changes: object) -> dict[str, object]:
    return {"groups": {role: {"size": 2, "scheme": "B", "updates": "once", **changes}}}


EDITS: list[tuple[dict[str, object], str]] = [
    ({"placments": {}}, "placments is an unknown key; did you mean placements?"),
    ({"examples": {"trunk": [0, 4, 8], "head": [0, 7]}}, "examples: the roles differ in the global batch"),
    ({"examples": {"trunk": [0, 9, 8], "head": [0, 8]}}, "it must be 3 bounds that grow from 0"),
    ({"holding": "halved"}, "first: holding is 'halved'; did you mean sharded? it must be one of replicated, sharded"),
    ({"split": "diagonal"}, "first: split is 'diagonal'; it must be one of columns, rows"),
    ({"splits": "rows"}, "placements: first: splits is an unknown key; did you mean split?"),
    ({"sync": "gossip"}, "first: sync is 'gossip'; it must be one of all_reduce, late_multiply, parameter_server"),
    ({"holding": "sharded"}, "first is sharded, but groups has nothing for its role 'trunk'"),
    ({"holding": "sharded", "group": 4, **groups()}, "first has group 4, but the groups of its role have size 2"),
    ({"groups": [2]}, "groups is [2]; it must be a table"),
    ({"groups": {"trunk": 2}}, "groups: trunk is 2; it must be a table of size, scheme, updates"),
    ({"groups": {"trunk": {"scheme": "B"}}}, "groups: trunk: size is missing"),
    (groups(sizes=2), "groups: trunk: sizes is an unknown key; did you mean size?"),
    (groups(size=0), "groups: trunk: size is 0; it must be a whole number of at least 1"),
    (groups(size=3), "groups: trunk has groups of 3, which do not divide its 2 ranks"),
    (groups(scheme="KB"), "groups: trunk: scheme is 'KB'; it must be one of BK, B, B/K"),
    (groups(updates="never"), "groups: trunk: updates is 'never'; did you mean every?"),
    (groups(scheme="BK"), "groups: trunk reads the data, which no group does; let a role before it read"),
    (
        {
            "roles": {"trunk": [0, 1], "mid": [0, 1], "head": [2]},
            "examples": {"trunk": [0, 4, 8], "mid": [0, 4, 8], "head": [0, 8]},
            **groups("mid"),
        },
        "groups: mid has scheme 'B', but only head, with the loss, has several microbatches: BK",
    ),
    ({"servers": 3}, "servers is 3; it must be a list"),
    ({"servers": [3]}, "servers: there is no rank 3, the world has ranks 0 to 2"),
    ({"servers": [2, 2]}, "servers: a rank is there twice"),
    ({"all_reduce": "ring"}, "all_reduce is 'ring'; it must be one of backend, recursive_doubling"),
    ({"overlap": 1}, "overlap is 1; it must be true or false"),
]


def test_a_build_whose_code_cannot_be_imported_starts_no_process(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "gated.py").write_text(
        NET.replace("return self.second", "x = x * x.sum().item()\n        return self.second")
    )
    assert splitc(capsys, "compile gated.py --world 2 --cluster v100-10gbe -q -o build").code == 0
    refused(capsys, "run build --steps 1", "build runs the user's own code of gated", "into PYTHONPATH")


@pytest.mark.slow
def test_a_plan_that_was_edited_wrongly_is_refused_by_compile_and_by_run(build: Path, capsys: Capture) -> None:
    whole = (build / "plan.json").read_text()
    for changes, message in EDITS:
        (build / "plan.json").write_text(whole)
        edit(build / "plan.json", changes)
        refused(capsys, "compile net.py --plan build/plan.json -o again", message)
        refused(capsys, "run build", message)


def test_a_plan_of_an_older_splitc_which_has_fewer_fields_is_followed(build: Path, capsys: Capture) -> None:
    path = build / "plan.json"
    whole, old = read_plan_file(path), json.loads(path.read_text())
    for name in ("groups", "servers", "overlap", "all_reduce", "synchronised", "exact"):
        del old[name]
    for placement in old["placements"].values():
        del placement["split"]
    path.write_text(json.dumps(old))
    assert read_plan_file(path) == whole
    assert splitc(capsys, "compile net.py --plan build/plan.json -o again").code == 0
    assert (Path("again") / "rank0.py").read_text() == (build / "rank0.py").read_text()


def test_a_plan_that_is_cut_off_or_missing_is_refused(build: Path, capsys: Capture) -> None:
    text = (build / "plan.json").read_text()
    (build / "plan.json").write_text(text[: len(text) // 2])
    refused(capsys, "run build", "build/plan.json is no JSON, it is cut off or was edited wrongly")
    refused(capsys, "compile net.py --plan build/plan.json -o again", "is no JSON")
    refused(capsys, "compile net.py --plan nowhere.json -o again", "cannot read the plan nowhere.json")


def test_a_plan_says_the_world_and_decides_the_rest(build: Path, capsys: Capture) -> None:
    start = "compile net.py --plan build/plan.json -o again"
    refused(capsys, f"{start} --world 4", "is a plan for 3 ranks, not for --world 4")
    refused(capsys, f"{start} --strategy auto --pin first=conv", "has decided everything already; leave out --pin")
    Path("net.py").write_text(NET.replace("nn.Linear(8, 3)", "nn.Linear(8, 4)"))
    refused(capsys, start, "the plan was made for another model than Net")


def test_a_build_whose_files_come_from_two_plans_is_stale(build: Path, capsys: Capture) -> None:
    role = (build / "head.py").read_text()
    (build / "head.py").write_text(re.sub(r'^PLAN = ".*"', 'PLAN = "0123456789ab"', role, flags=re.MULTILINE))
    refused(capsys, "run build", "the build is stale", "plan 0123456789ab: head.py", "compile the model again")


def test_a_build_whose_plan_was_edited_afterwards_is_stale(build: Path, capsys: Capture) -> None:
    edit(build / "plan.json", {"examples": {"trunk": [0, 3, 8], "head": [0, 8]}})
    refused(capsys, "run build", "plan.json was edited after the scripts were written", "splitc compile MODEL --plan")


def test_a_build_that_lost_a_file_is_refused(build: Path, capsys: Capture) -> None:
    for name in ("weights.pt", "trunk.py", "rank1.py"):
        (build / name).rename(name)
        refused(capsys, "run build", f"build has no {name}; compile the model again")
        Path(name).rename(build / name)


def test_an_example_is_written_once_and_overwrites_nothing(capsys: Capture) -> None:
    assert splitc(capsys, "example mlp").out == "wrote mlp.py\n"
    assert Path("mlp.py").read_bytes() == (ROOT / "examples" / "mlp.py").read_bytes()
    Path("mlp.py").write_text("mine")
    refused(capsys, "example alexnet mlp", "mlp.py is here already and was left as it is")
    assert Path("mlp.py").read_text() == "mine" and not Path("alexnet.py").exists()
    refused(capsys, "example alexnett", "there is no example 'alexnett'; did you mean alexnet?")


# -- bugs of ours, and real processes ----------------------------------------------------------------------------------


def test_a_bug_of_ours_says_so_and_asks_for_a_report(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from splitc.cli import compiling
    from splitc.errors import InternalError

    def broken(*_: object, **__: object) -> None:
        raise InternalError("place broke the program:\n  - has_plan: no plan")

    monkeypatch.setattr(compiling, "specialise", broken)
    done = splitc(capsys, "inspect net.py --world 2")
    assert done.code == 1
    assert "has_plan: no plan" in done.err and "this is a bug of splitc" in done.err and "please report it" in done.err
    monkeypatch.setattr(compiling, "specialise", lambda *_: os.environ["NONE"])
    done = splitc(capsys, "inspect net.py --world 2")
    assert done.code == 1
    assert "KeyError: 'NONE'" in done.err and "at splitc/cli/compiling.py:" in done.err and "-v shows more" in done.err


def test_a_dependency_that_is_missing_or_broken_is_named_and_is_no_bug_of_ours(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    (tmp_path / "none" / "networkx.py").write_text("raise ModuleNotFoundError(name='networkx')")
    for name, code in (("torch", "torch"), ("networkx", "networkx")):
        paths = {**os.environ, "PYTHONPATH": f"{tmp_path / 'none'}{os.pathsep}{ROOT}"}
        command = f"import sys; from splitc.cli import entry; entry.run = lambda _: __import__('{code}'); "
        command += "sys.exit(entry.main(['clusters']))"
        done = subprocess.run([sys.executable, "-c", command], env=paths, capture_output=True, text=True, check=False)
        assert f"cannot import {name}, which splitc needs" in done.stderr and "bug" not in done.stderr
        assert f"install it there: python -m pip install {name}" in done.stderr and done.returncode == 1


def test_a_full_disk_is_no_bug_of_ours(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from splitc.cli import entry

    def full(_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "trace.json")

    monkeypatch.setattr(entry, "run", full)
    done = splitc(capsys, "inspect net.py --world 2")
    assert (done.code, done.err) == (1, "splitc: cannot write trace.json: No space left on device\n")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "splitc.cli", "inspect", "nett.py", "--world", "2"], "splitc: nett.py: there is no such file"),
        (["-m", "splitc.cli", "run", "build", "--steps", "0"], "splitc: argument --steps: '0' is not a whole number"),
        (["build/launch.py"], "not started by torchrun"),
    ],
)
def test_in_a_process_of_its_own_there_is_no_traceback_either(arguments: list[str], message: str, build: Path) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode in (1, 2, 3)
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("code", ["", "0", "3", "'bye'"])
def test_a_model_that_ends_python_is_named(capsys: Capture, code: str) -> None:
    Path("net.py").write_text(edited(forward=f"        raise SystemExit({code})"))
    refused(capsys, "inspect net.py --world 2 -q", "the code of the model ends Python, by sys.exit")


@pytest.mark.parametrize(
    "line", ["{} --world 2", "{}.py --world 2", "net.py --plan {}", "net.py --world 2 --cluster {}.toml"]
)
def test_a_name_that_no_file_can_have_is_that_of_none(capsys: Capture, line: str) -> None:
    refused(capsys, f"inspect {line.format('x' * 300)}", "x" * 300)


def test_a_function_for_data_is_found_wherever_its_module_defines_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = "try:\n    from json import loads as first\nexcept ImportError:\n    first = None\n"
    Path("own.py").write_text(f"{first}if first:\n    def second(worker): ...\n")
    Path("made.py").write_text("for name in ('third',):\n    globals()[name] = print\n")
    for name in ("own:first", "own:second", "made:third"):
        check_data(name, "--data")
    with pytest.raises(LaunchError, match="own has no third; it has first, second"):
        check_data("own:third", "--data")
