"""Builds for fewer ranks, and runs on hosts that go on with them."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from splitc.cli import hosts as hosts_module
from splitc.cli import launching
from splitc.cli.hosts import GROWS, Host, fitting, run_on_hosts
from splitc.cli.plan_file import read_plan_file
from splitc.errors import LaunchError, PlacementError
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.launch.main import load_weights
from tests import ROOT
from tests.support import worlds
from tests.support.command import splitc
from tests.support.worlds import HOSTS, STEPS, program, seen


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program().save(tmp_path_factory.mktemp("built") / "build", min_world=2)


# -- the builds --------------------------------------------------------------------------------------------------------


def test_a_build_holds_builds_for_fewer_ranks_with_its_batch_and_one_file_of_weights(build: Path) -> None:
    whole = read_plan_file(build)
    assert sorted(path.name for path in (build / "worlds").iterdir()) == ["2", "3"]
    for world in (2, 3):
        folder = build / "worlds" / str(world)
        plan = read_plan_file(folder)
        assert (plan.world, plan.global_batch, plan.accumulate) == (world, whole.global_batch, whole.accumulate)
        assert plan.model == whole.model
        assert (folder / "weights.pt").is_symlink()
        assert load_weights(folder)[0].keys() == load_weights(build)[0].keys()
        assert [load_rank(folder, rank).rank.world for rank in range(world)] == [world] * world
        assert launching.check_build(folder) == plan


def test_a_build_with_builds_for_fewer_ranks_is_replaced_unless_one_of_them_was_edited(tmp_path: Path) -> None:
    build = program().save(tmp_path / "build", standalone=True, min_world=3)
    assert (build / "worlds" / "3" / "splitc" / "runtime" / "worker.py").is_file()
    program().save(build, min_world=3)
    assert not (build / "worlds" / "3" / "splitc").exists()
    with (build / "worlds" / "3" / "rank0.py").open("a") as file:
        file.write("# mine\n")
    with pytest.raises(LaunchError, match=r"worlds/3/rank0\.py was edited"):
        program().save(build)


def test_each_rung_says_what_the_loss_costs() -> None:
    made = program()
    for each in made.ladder(2):
        assert each.program is not None
        plan = each.program.plan
        ratio = made.plan.step_seconds / plan.step_seconds  # of one global batch
        assert re.fullmatch(
            rf"{each.world} ranks: layer_separation, \S+ \ws a step, {ratio:.2f} of the samples/s", each.text
        )
    assert [each.world for each in made.ladder(1)] == [3, 2, 1]
    assert made.ladder(2) == made.ladder(1)[:2]


def test_a_rung_without_a_plan_says_why_and_has_no_build(tmp_path: Path) -> None:
    made = program("layer_separation(n_f=2)")
    three, two = made.ladder(2)
    assert three.program is not None
    assert two.program is None
    assert two.text.startswith("2 ranks: no plan: layer_separation(n_f=2) is not possible: ")
    build = made.save(tmp_path / "build", min_world=2)
    assert [path.name for path in (build / "worlds").iterdir()] == ["3"]
    rounds = program("local_sgd(period=4)").ladder(3)
    assert [each.text for each in rounds] == [
        "3 ranks: no plan: checkpoints of rounds resume under their own plan only"
    ]


@pytest.mark.slow
def test_rungs_sum_as_many_batches_to_an_update_as_the_plan_of_all_ranks() -> None:
    made = program("data_parallel", accumulate=8)
    assert made.plan.accumulate > 1
    assert {each.program.plan.accumulate for each in made.ladder(1) if each.program} == {made.plan.accumulate}


def test_a_ladder_that_goes_nowhere_is_refused() -> None:
    for least in (0, 4, 9):
        with pytest.raises(PlacementError, match=f"min_world is {least}, and the world 4: give at least 1 and at most"):
            program().ladder(least)


def test_compile_prints_what_losses_cost_and_refuses_a_ladder_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], net: None
) -> None:
    done = splitc(capsys, "compile net.py --world 3 --min-world 2 -o build")
    assert done.code == 0, done.err
    assert re.search(r"^2 ranks: \w+, .* of the samples/s$", done.out, re.M)
    assert Path("build/worlds/2/launch.py").is_file()
    Path("broken.py").write_text("raise ValueError")
    done = splitc(capsys, "compile broken.py --world 3 --min-world 3")
    assert (done.code, done.err) == (2, "splitc: min_world is 3, and the world 3: give at least 1 and at most 2\n")


@pytest.mark.slow
def test_inspect_shows_what_losses_cost_as_data_too(capsys: pytest.CaptureFixture[str], net: None) -> None:
    (rung,) = json.loads(splitc(capsys, "inspect net.py --world 3 --min-world 2 --json").out)["ladder"]
    assert rung["world"] == 2
    assert re.fullmatch(r"2 ranks: \w+, .* of the samples/s", rung["text"])


# -- runs --------------------------------------------------------------------------------------------------------------


def test_the_ranks_of_a_smaller_world_are_those_of_the_first_hosts_that_are_left() -> None:
    a, b, c = Host("a", 2), Host("b", 2), Host("c", 2)
    assert fitting([a, b, c], [6, 4]) == ([a, b, c], 6)
    assert fitting([a, c], [6, 5, 4]) == ([a, c], 4)
    assert fitting([a, c], [6, 3, 1]) == ([a, Host("c", 1)], 3)
    assert fitting([a, c], [6, 2]) == ([a], 2)
    assert fitting([a], [6, 4]) == ([], 0)


def test_hosts_that_refuse_a_build_are_left_out_until_more_ranks_may_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, ran = {"b", "c"}, []
    hosts, smaller = [Host(name, 1) for name in "abcd"], {2: (tmp_path / "2", "two"), 3: (tmp_path / "3", "three")}

    def copied(folder: Path, mark: str, to: list[Host]) -> dict[Host, LaunchError]:
        return {host: LaunchError(f"--hosts: {host.name}: gone") for host in to if host.name in lost}

    def together(left: list[Host], scripts: list[str], to: object, back: object = None) -> int:
        assert callable(back)
        ran.append(([host.name for host in left], scripts[0]))
        answers = [back()]
        lost.remove("b")
        answers.append(back())
        assert answers == [False, True]
        return 0

    monkeypatch.setattr(hosts_module, "_copied", copied)
    monkeypatch.setattr(hosts_module, "_together", together)
    with pytest.raises(LaunchError, match="--hosts: b: gone"):
        run_on_hosts(tmp_path, "four", hosts, [])
    assert run_on_hosts(tmp_path, "four", hosts, [], smaller=smaller) == 0
    ((names, script),) = ran
    assert names == ["a", "d"]
    assert "2-two-0" in script
    assert "--master-addr a " in script
    assert capsys.readouterr().err.splitlines() == [
        "splitc: --hosts: b: gone", "splitc: --hosts: c: gone", "splitc: goes on with 2 ranks, on a, d",
    ]  # fmt: skip


def test_growing_is_no_restart_and_smaller_builds_are_for_starts_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, build: Path, tmp_path: Path
) -> None:
    codes: Iterator[int] = iter([1, GROWS, 1, GROWS, 1])
    given: list[list[int]] = []

    def run(folder: Path, mark: str, hosts: list[Host], arguments: list[str], smaller: dict[int, object]) -> int:
        given.append(sorted(smaller))
        return next(codes)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPLITC_COMMAND", "")
    monkeypatch.setenv("SPLITC_MIN_WORLD", "")
    monkeypatch.setattr(hosts_module, "run_on_hosts", run)
    options = ["--hosts", "a,b", "--restarts", "2", "--min-world", "3"]
    assert launching.launch(build, options) == 1
    assert given == [[], [3], [3], [3], [3]]


def test_a_min_world_that_changes_nothing_is_refused_before_a_process_starts(build: Path, tmp_path: Path) -> None:
    for options in (["--restarts", "2"], ["--hosts", "a,b"], []):
        with pytest.raises(
            LaunchError, match="--min-world is for hosts that are lost: give --hosts A,B,C and --restarts"
        ):
            launching.launch(build, [*options, "--min-world", "2"])
    ladderless = program().save(tmp_path / "build")
    for folder, least in ((ladderless, "2"), (build, "4")):
        with pytest.raises(
            LaunchError, match=rf"--min-world {least}: \S+ has no build for so many ranks that are fewer"
        ):
            launching.launch(folder, ["--hosts", "a,b", "--restarts", "2", "--min-world", least])


def test_copies_in_memory_that_cannot_be_made_are_refused_before_a_process_starts(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = program("local_sgd(period=4)").save(tmp_path / "rounds")
    with pytest.raises(LaunchError, match=r"--neighbour-copy 3: nothing can be copied within the 4 .* at least 4"):
        launching.launch(rounds, ["--neighbour-copy", "3"])
    monkeypatch.setenv("SPLITC_MEMORY", "/nowhere")
    with pytest.raises(
        LaunchError, match="--neighbour-copy: no folder /nowhere to write to; name another one in memory"
    ):
        launching.launch(build, ["--neighbour-copy", "3"])


def test_launch_scripts_that_train_otherwise_are_refused(tmp_path: Path) -> None:
    build = program().save(tmp_path / "build", min_world=3)
    script = build / "launch.py"
    script.write_text(script.read_text().replace("lr=0.01", "lr=0.1"))
    with pytest.raises(LaunchError, match=r"worlds/3/launch\.py trains otherwise than \S+launch\.py below its PLAN"):
        launching.launch(build, ["--hosts", "a,b", "--restarts", "2", "--min-world", "2"])


# -- with processes ----------------------------------------------------------------------------------------------------


def trained(folder: Path, build: Path, options: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    folder.mkdir()
    monkeypatch.setenv(worlds.FOLDER, str(folder))
    common = ["--data", "tests.support.worlds:data", "--steps", str(STEPS), "--save", str(folder / "end.pt")]
    assert launching.launch(build, [*common, *options]) == 0
    state: dict[str, torch.Tensor] = torch.load(folder / "end.pt", weights_only=True)
    return state


@pytest.mark.slow
@pytest.mark.processes
def test_four_ranks_lose_one_go_on_as_three_and_as_four_when_it_is_back_and_train_the_same(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SPLITC_COMMAND", "")
    monkeypatch.delenv("SPLITC_MIN_WORLD", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    expected = trained(tmp_path / "undisturbed", build, [], monkeypatch)
    undisturbed = capfd.readouterr().out
    home = tmp_path / "changing"
    monkeypatch.setenv("SPLITC_MIN_WORLD", "")  # which is set
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setattr(hosts_module, "_LOOK", 0.3)
    worlds.stand_in_for_ssh(tmp_path, home)
    options = ["--hosts", ",".join(HOSTS), "--restarts", "1", "--min-world", "2", "--neighbour-copy", "4"]
    state = trained(home, build, [*options, "--checkpoints", str(tmp_path / "run")], monkeypatch)
    out, err = capfd.readouterr()
    assert "splitc: --hosts: 127.0.0.2: ssh: connect to host 127.0.0.2: No route to host\n" in err, err
    assert "splitc: goes on with 3 ranks, on 127.0.0.1\n" in err
    assert err.count("splitc: hosts are back: all ranks stop, and more go on\n") == 1

    lost, back = map(int, re.findall(r"^goes on after step (\d+)", out, re.M))
    assert lost in (4, 6)  # that of step 6 may not be whole yet
    assert f"goes on after step {lost}, from {home / 'memory-127.0.0.1'}/splitc-" in out
    assert not list(home.glob("memory-*/*"))
    assert back >= 11
    worlds_of = {step: 3 if lost < step <= back else 4 for step in range(1, STEPS + 1)}
    given, all_given = seen(home), seen(tmp_path / "undisturbed")
    assert [given[world, step] for step, world in worlds_of.items()] == [all_given[4, step] for step in worlds_of]
    assert [dict(losses(out))[step] for step in worlds_of] == [dict(losses(undisturbed))[step] for step in worlds_of]
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9)


def losses(output: str) -> list[tuple[int, str]]:
    return [(int(step), loss) for step, loss in re.findall(r"^step (\d+)  loss (\S+)", output, re.M)]


@pytest.mark.slow
@pytest.mark.processes
def test_batches_that_would_shrink_with_the_world_are_refused(
    build: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SPLITC_COMMAND", "")
    monkeypatch.setenv("SPLITC_MIN_WORLD", "2")
    assert launching.launch(build / "worlds" / "2", ["--data", "tests.support.worlds:of_readers"]) == 3
    error = "--min-world: tests.support.worlds:of_readers gives a DataLoader, whose batch is that of each reader"
    assert capfd.readouterr().err.count(error) == 1
