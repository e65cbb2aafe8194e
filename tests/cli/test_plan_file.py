"""Plans written by hand: what may be left out, every mistake by its place, and every command that follows them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitc.cli.plan_file import read_plan_file
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import LaunchError
from splitc.ir.cluster_file import to_toml
from tests.cli.test_wrong_uses import refused
from tests.support.command import splitc

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("net")
SHORT = {
    "schema": 1,
    "world": 3,
    "roles": {"trunk": [0, 1], "head": [2]},
    "placements": {"*": "trunk", "second": "head"},
}


def write(data: object, name: str = "mine.json") -> None:
    Path(name).write_text(data if isinstance(data, str) else json.dumps(data, indent=1))


@pytest.mark.slow
def test_a_short_plan_is_followed_by_every_command(capsys: Capture) -> None:
    write(SHORT)
    done = splitc(capsys, "compile net.py --plan mine.json -o build -q")
    assert done.code == 0 and "Net on 3 ranks: by_hand" in done.out, done.err
    whole = read_plan_file(Path("build"))
    assert whole.batch_offsets == {"trunk": (0, 4, 8), "head": (0, 8)}
    assert {name: (place.role, place.sync) for name, place in whole.placements.items()} == {
        "first": ("trunk", "all_reduce"), "second": ("head", "none")
    }  # fmt: skip
    assert splitc(capsys, "verify net.py --plan mine.json --dtype float64 -q").code == 0
    done = splitc(capsys, "inspect net.py --plan build -q")
    assert "has no price, since the plan was written or edited by hand" in " ".join(done.out.split())
    done = splitc(capsys, "inspect net.py --plan build --cluster rtx3090-1gbe -q")
    assert "on 3 ranks of rtx3090-1gbe: by_hand" in done.out and "samples/s (predicted by" in done.out
    done = splitc(capsys, "simulate net.py --plan mine.json --strategies data_parallel --bandwidth 1g,10g --json -q")
    cells = json.loads(done.out)["models"]["Net"]
    assert {cell["strategy"] for cell in cells} == {"plan", "data_parallel"} and len(cells) == 4
    assert all(cell["samples_per_second"] > 0 for cell in cells)
    assert splitc(capsys, "diff mine.json build --json").code == 1


@pytest.mark.slow
def test_without_roles_and_placements_all_ranks_train_copies(capsys: Capture) -> None:
    write({"schema": 1, "world": 2})
    assert splitc(capsys, "compile net.py --plan mine.json -o build -q").code == 0
    splitc(capsys, "compile net.py --world 2 --strategy data_parallel --cluster v100-10gbe -o planned -q")
    mine, planned = (read_plan_file(Path(name)).decision for name in ("build", "planned"))
    assert {**mine, "strategy": "data_parallel"} == planned


def test_a_name_counts_before_a_pattern_and_a_later_pattern_before_an_earlier_one(capsys: Capture) -> None:
    write({**SHORT, "placements": {"second": "head", "fi*": "head", "*": "trunk"}})
    assert splitc(capsys, "compile net.py --plan mine.json -o build -q").code == 0
    assert [place.role for place in read_plan_file(Path("build")).placements.values()] == ["trunk", "head"]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"world": "3"}, "world is '3'; it must be a whole number"),
    ({"world": 0}, "world is 0; it must be a whole number of at least 1 and at most 100000"),
    ({"world": 2}, "roles: head has rank 2, but the world has ranks 0 to 1"),
    ({"roles": {}}, 'roles is {}; it must be a table of the ranks of each role, as {"trunk": [0, 1], "head": [2]}'),
    ({"roles": {"trunk": [0, 1], "head": 2}}, "roles: head is 2; it must be a list"),
    ({"roles": {"trunk": [0, 0], "head": [2]}}, "roles: trunk has a rank twice"),
    ({"roles": {"trunk": [0, "1"], "head": [2]}}, "roles: trunk: number 1 is '1'; it must be a whole number"),
    ({"placements": {"*": "trnk"}}, "placements: * has role 'trnk'; did you mean trunk? there are trunk, head"),
    ({"placements": {"*": {"rol": "trunk"}}}, "placements: *: rol is an unknown key; did you mean role?"),
    ({"placements": {"*": 1}}, "placements: * is 1; it must be a text or a table of role, holding, sync"),
    (
        {"placements": {"*": "trunk", "secnd": "head"}},
        "'secnd' matches no layer; did you mean second? the first are first, se",
    ),
    ({"placements": {"second": "head"}}, "placements: nothing matches first; place them, or '*'"),
    (
        {"placements": {"*": "trunk", "first": "head"}},
        "placements: second, in role 'trunk', reads first, in role 'head'",
    ),
    (
        {"placements": {"*": {"role": "trunk", "sync": "allreduce"}}},
        "placements: *: sync is 'allreduce'; did you mean all_reduce? it must be one of all_reduce, late_multiply",
    ),
    ({"placements": {"*": {"role": "trunk", "sync": "parameter_server"}}}, "but servers is empty"),
    ({"placements": {"*": "trunk", "second": {"role": "head", "group": 2}}}, "groups has nothing for its role 'head'"),
    ({"microbatch": 2}, "microbatch is an unknown key; did you mean microbatches? there are accumulate, all_reduce"),
    ({"microbatches": 5}, "microbatches is 5, but a rank of trunk reads 4 examples: take at most 4"),
    ({"schedule": "f1b1"}, "schedule is 'f1b1'; did you mean 1f1b? it must be one of all_forward, 1f1b"),
    ({"examples": {"trunk": [0, 4], "head": [0, 4]}}, "examples: trunk is [0, 4]; by roles it must be 3 bounds"),
    ({"groups": {"haed": {"size": 2}}}, "groups: there is no role 'haed'; did you mean head?"),
    ({"rounds": {"step": 2}}, "rounds: step is an unknown key; did you mean steps?"),
    ({"part_of": {}}, "part_of is an unknown key"),
    ({"schema": 2}, "has schema 2, this splitc reads plans of schema 1"),
    ({"schema": None}, 'has no "schema": 1'),
]


@pytest.mark.slow
def test_a_mistake_is_told_with_its_place_and_what_is_possible(capsys: Capture) -> None:
    for change, message in MISTAKES:
        write({**SHORT, **change})
        refused(capsys, "compile net.py --plan mine.json -q", message)


def test_broken_json_is_told_by_line_and_column(capsys: Capture) -> None:
    for text, message in (
        ('{"schema": 1,\n "world": 3,\n}', "line 3 column 1"),
        ('{"schema": 1,\n "world" 3}', "Expecting ':' delimiter: line 2 column 10"),
        ('{"schema": 1, "world": 3, "world": 4}', "'world' is there twice in one table"),
        ("[" * 100_000, "is no JSON"),
    ):
        write(text)
        refused(capsys, "compile net.py --plan mine.json -q", message, "mend it, or compile the model again")


def test_mistakes_of_all_kinds_are_told_at_once(capsys: Capture) -> None:
    wrong = {"world": 2, "microbtches": 2, "schedule": "f1b1", "servers": ["x"], "overlap": 1}
    places = {"first": {"role": "trunk", "sync": "gossip"}, "second": {"role": "head", "group": "two"}}
    write({**SHORT, **wrong, "placements": places})
    refused(
        capsys,
        "inspect net.py --plan mine.json -q",
        *("microbtches is an unknown key", "second: group is 'two'", "number 0 is 'x'", "overlap is 1", "'f1b1'"),
        *("head has rank 2", "first: sync is 'gossip'"),
    )


@pytest.mark.slow
def test_the_prices_of_a_plan_that_was_edited_since_are_not_taken_for_its_own(capsys: Capture) -> None:
    splitc(capsys, "compile net.py --world 3 --strategy layer_separation(n_f=1) --cluster v100-10gbe -o build -q")
    made = json.loads(Path("build/plan.json").read_text())
    assert read_plan_file(Path("build")).step_seconds == made["step_seconds"] > 0
    write({**made, "examples": {"trunk": [0, 2, 8], "head": [0, 8]}})
    edited = read_plan_file(Path("mine.json"))
    assert edited.step_seconds == 0 and edited.prediction.cluster == "" and not edited.candidates
    done = splitc(capsys, "inspect net.py --plan mine.json --cluster v100-10gbe --json -q")
    assert json.loads(done.out)["step_seconds"] > 0


@pytest.mark.slow
def test_a_plan_is_held_to_the_memory_and_the_world_of_a_cluster(capsys: Capture) -> None:
    write(SHORT)
    refused(capsys, "inspect net.py --plan mine.json --memory 100 -q", "the plan by_hand does not fit into memory")
    write(to_toml(replace(load_cluster("a6000-1gbe"), world=2)), "small.toml")
    refused(capsys, "inspect net.py --plan mine.json --cluster small.toml -q", "has 3 ranks, but a6000-1gbe has 2")
    refused(capsys, "simulate net.py --plan mine.json --world 4 -q", "is a plan for 3 ranks, not for --world 4")


def test_a_plan_of_one_batch_can_be_read_where_no_model_is() -> None:
    write({"schema": 1, "world": 4, "examples": {"all": [0, 3, 4, 6, 8]}})
    assert read_plan_file(Path("mine.json")).global_batch == 8
    with pytest.raises(LaunchError, match="examples: all is"):
        write({"schema": 1, "world": 4, "examples": {"all": [0, 8]}})
        read_plan_file(Path("mine.json"))
