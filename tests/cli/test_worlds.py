"""Builds for fewer ranks, beside that of all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from splitc.cli import launching
from splitc.cli.plan_file import read_plan_file
from splitc.errors import LaunchError, PlacementError
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.launch.main import load_weights
from tests.support.command import splitc
from tests.support.worlds import program


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program().save(tmp_path_factory.mktemp("built") / "build", min_world=2)


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
        assert launching._checked(folder) == plan


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


def test_rungs_sum_as_many_batches_to_an_update_as_the_plan_of_all_ranks() -> None:
    made = program("data_parallel", accumulate=8)
    assert made.plan.accumulate > 1
    assert {each.program.plan.accumulate for each in made.ladder(1) if each.program} == {made.plan.accumulate}


def test_a_ladder_that_goes_nowhere_is_refused() -> None:
    for least in (0, 4, 9):
        with pytest.raises(PlacementError, match=f"min_world is {least}, and the world 4: give at least 1, and fewer"):
            program().ladder(least)


def test_commands_print_what_losses_cost_and_refuse_ladders_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], net: None
) -> None:
    done = splitc(capsys, "compile net.py --world 3 --min-world 2 -o build")
    assert done.code == 0, done.err
    (line,) = re.findall(r"^2 ranks: \w+, .* of the samples/s$", done.out, re.M)
    assert Path("build/worlds/2/launch.py").is_file()
    shown = splitc(capsys, "inspect net.py --world 3 --min-world 2 --json")
    assert json.loads(shown.out)["ladder"] == [{"world": 2, "text": line}]
    Path("broken.py").write_text("raise ValueError")
    done = splitc(capsys, "compile broken.py --world 3 --min-world 3")
    assert (done.code, done.err) == (2, "splitc: min_world is 3, and the world 3: give at least 1, and fewer than 3\n")
