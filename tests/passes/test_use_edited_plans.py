"""Plans edited by hand: every field of plan.json, wrong in every way, is refused by name, or trains right."""

from __future__ import annotations

import copy
import json
import operator
import random
from collections.abc import Callable, Iterator
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitc.capture.example.example import Example
from splitc.cli.plan_file import read_plan_file
from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError, PlacementError
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.specialise import Settings, specialise
from tests.support.compiled import CLUSTER, analyse, compiled

Path_ = tuple[str | int, ...]
Edit = Callable[[Any, Any], Any]
STRATEGIES = {
    "modulo_shard(mp=2)": 4,
    "local_sgd(period=2)": 2,
    "modulo_shard(mp=2, period=2)": 4,
    "layer_separation(n_c=2, n_f=1)": 3,
    "parameter_server(servers=2)": 4,
}
WRONG: list[Any] = [
    *(None, True, 0, 1, -1, 3, 10**30, 1.5, float("nan"), float("inf"), "", "x", "../x", '"""\nraise SystemExit\n"""'),
    *(
        "trunk",
        "head",
        "launch",
        "json",
        "sharded",
        "subnet",
        "none",
        "late_multiply",
        "parameter_server",
        "every",
        "B",
    ),
    *([], [0], [1, 0], [[0]], ["0"], [True], {}, {"a": 1}),
]


@cache
def known() -> tuple[nn.Module, Example, Program]:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4))
    model, x, y = nn.Sequential(*layers), torch.randn(4, 4), torch.randint(4, (4,))
    return model, Example.bind(model, x, y, F.cross_entropy), analyse(model, x, y, F.cross_entropy)


@cache
def planned(strategy: str) -> Plan:
    model, example, program = known()
    x, y = example.tensors.values()
    return compiled(model, x, y, F.cross_entropy, STRATEGIES[strategy], strategy, analysed=program).plan


def paths(data: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Every key and index of the data, with those in it."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield (*at, key)
        yield from paths(data[key], (*at, key))


def replaced(new: Any, parent: Any, key: Any) -> None:
    parent[key] = copy.deepcopy(new)


def edits(value: Any) -> Iterator[tuple[str, Edit]]:
    """What a hand may do to a value."""
    yield "missing", lambda parent, key: parent.pop(key)
    new: list[Any] = [*WRONG]
    if isinstance(value, list) and len(value) > 1:
        new += [value[::-1], [*value, value[-1]], value[:-1]]
    if isinstance(value, dict) and len(value) > 1:
        keys, values = list(value), list(value.values())
        new += [dict(reversed(value.items())), dict(zip(keys, [*values[1:], values[0]], strict=True))]
        new += [{**value, f"{keys[0]}x": values[0]}, {f"../{keys[0]}": values[0], **dict(list(value.items())[1:])}]
    if type(value) in (int, float):
        new += [value + 1, value - 1, -value, 2 * value]
    for each in new:
        if each != value:
            yield repr(each), partial(replaced, each)


def edited(strategy: str, number: int) -> Iterator[tuple[Path_, str, str]]:
    """(field, what was done to it, the text) of so many of all edits of a plan."""
    data = json.loads(planned(strategy).to_json())
    every = [(path, what, edit) for path in paths(data) if path != ("hash",) for what, edit in edits(at(data, path))]
    for path, what, edit in random.Random(1).sample(every, number):
        changed = copy.deepcopy(data)
        edit(at(changed, path[:-1]), path[-1])
        yield path, what, json.dumps(changed)


def at(data: Any, path: Path_) -> Any:
    """What stands in a plan under a path."""
    return reduce(operator.getitem, path, data)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_field_that_is_edited_wrongly_is_named_and_what_is_followed_trains(strategy: str, tmp_path: Path) -> None:
    model, example, program = known()
    file = tmp_path / "plan.json"
    for path, what, text in edited(strategy, 40):
        file.write_text(text)
        try:
            plan = read_plan_file(file)
            settings = Settings(plan.world, cluster=CLUSTER)
            followed = CompiledProgram(specialise(program, settings, plan), model, example, settings)
            assert all("/" not in name for name in followed.files), (path, what)
            if path[0] in ("roles", "examples", "placements", "groups", "servers") and followed.plan.exact:
                assert followed.verify(steps=1).holds, (path, what)
        except PlacementError as error:
            assert path[0] in ("placements", "model"), (path, what, error)
        except LaunchError as error:
            fields = {"roles": ("roles", "placements", "groups")}.get(str(path[0]), (str(path[0]),))
            assert any(field in str(error) for field in fields), (path, what, error)


def test_what_does_not_fit_the_model_is_told_by_layer_and_field() -> None:
    program, plan = known()[2], planned("layer_separation(n_c=2, n_f=1)")

    def follow(layer: str, **parts: str) -> None:
        data = json.loads(plan.to_json())
        data["placements"][layer] |= parts
        specialise(program, Settings(plan.world, cluster=CLUSTER), Plan.from_json(json.dumps(data)))

    backwards = (
        "placements: 4, in role 'trunk', reads 2, in role 'head', but data pass through trunk, head in this order"
    )
    with pytest.raises(LaunchError, match=backwards):
        follow("4", role="trunk")
    with pytest.raises(LaunchError, match="placements: 0 has sync 'none', but ranks train copies of it"):
        follow("0", sync="none")
    with pytest.raises(
        LaunchError, match="placements: 4 has sync 'late_multiply', which linear layers and tables in roles without"
    ):
        follow("4", sync="late_multiply")


def test_sums_of_parts_that_one_rank_alone_has_are_refused() -> None:
    for strategy, world in [("modulo_shard(mp=2)", 2), ("modulo_shard(mp=4)", 4)]:
        model, example, program = known()
        x, y = example.tensors.values()
        made = compiled(model, x, y, F.cross_entropy, world, strategy, analysed=program)
        data = json.loads(made.plan.to_json())
        assert (data["placements"]["5"]["holding"], data["placements"]["5"]["sync"]) == ("sharded", "none"), strategy
        data["placements"]["5"]["sync"] = "all_reduce"
        with pytest.raises(
            LaunchError, match="placements: 5 has sync 'all_reduce', but no two ranks have the same part"
        ):
            specialise(program, Settings(world, cluster=CLUSTER), Plan.from_json(json.dumps(data)))


def test_a_role_that_could_not_be_a_file_or_a_variable_is_refused_before_anything_is_written() -> None:
    for name in ("../x", "launch", "rank0", "json", "class", "Trunk", "trunk_x", '"""', "a b", "stage"):
        text = planned("layer_separation(n_c=2, n_f=1)").to_json().replace('"head"', json.dumps(name))
        with pytest.raises(LaunchError, match=r"roles: .* cannot name a file and a variable"):
            specialise(known()[2], Settings(3, cluster=CLUSTER), Plan.from_json(text))


@pytest.mark.slow
def test_what_follows_from_the_rest_of_a_plan_may_be_left_out() -> None:
    for strategy in STRATEGIES:
        plan = planned(strategy)
        data = {key: value for key, value in json.loads(plan.to_json()).items() if key in plan.decision}
        del data["examples"], data["exact"], data["overlap"], data["synchronised"], data["model"]
        for place in data["placements"].values():
            for part in ("holding", *(["group"] if place["split"] else ["group", "split"])):
                del place[part]
            if place["sync"] != "parameter_server":
                del place["sync"]
        settings = Settings(plan.world, cluster=CLUSTER)
        short = Plan.from_json(json.dumps({"schema": 1, **data}))
        assert specialise(known()[2], settings, short).plan.decision == plan.decision, strategy
