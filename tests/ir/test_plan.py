"""The plan: shares, who serves whom, routes, and what its text keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from splitc.errors import LaunchError
from splitc.ir.placements import SCHEMES, Grouping, LayerPlacement
from splitc.ir.plan import Plan
from splitc.ir.plan_checks import decision_problems
from splitc.ir.prediction import Prediction
from splitc.ir.shares import serve, share_out
from tests.conftest import GOLDEN


def plan(n_c: int, n_f: int, batch: int) -> Plan:
    conv = share_out(batch, n_c)
    return Plan(
        strategy="layer_separation",
        world=n_c + n_f,
        roles={"conv": tuple(range(n_c)), "fc": tuple(range(n_c, n_c + n_f))},
        placements={
            "a": LayerPlacement("conv", "replicated", "all_reduce"),
            "b": LayerPlacement("fc", "replicated", "none"),
        },
        batch_offsets={"conv": conv, "fc": serve(conv, n_f)},
    )


def test_shares_are_nearly_equal_and_the_first_are_the_larger() -> None:
    assert share_out(10, 3) == (0, 4, 7, 10)
    assert share_out(2, 3) == (0, 1, 2, 2)


def test_a_server_takes_whole_producers_while_there_are_enough() -> None:
    for producers, servers, expected in [
        ((0, 4, 8, 12), 1, (0, 12)),
        ((0, 4, 8, 12), 2, (0, 8, 12)),
        ((0, 4, 8, 12, 16), 2, (0, 8, 16)),
        ((0, 6), 4, (0, 2, 4, 5, 6)),
    ]:
        assert serve(producers, servers) == expected


def test_routes_cover_every_example_once_and_both_sides_agree() -> None:
    for n_c, n_f, batch in [(3, 1, 10), (2, 3, 7), (5, 2, 13), (1, 4, 9), (4, 4, 4)]:
        made = plan(n_c, n_f, batch)
        sent = [(rank, peer, a, b) for rank in made.roles["conv"] for peer, a, b in made.routes(rank, "conv", "fc")]
        received = [(peer, rank, a, b) for rank in made.roles["fc"] for peer, a, b in made.routes(rank, "fc", "conv")]
        assert sorted(sent) == sorted(received)
        covered = sorted(example for _, _, a, b in sent for example in range(a, b))
        assert covered == list(range(batch))
        for rank in range(made.world):
            (role,) = made.roles_of(rank)
            start, stop = made.interval(role, rank)
            parts = [(a, b) for _, a, b in made.routes(rank, role, "fc" if role == "conv" else "conv")]
            assert parts[0][0] == start and parts[-1][1] == stop
            assert all(left[1] == right[0] for left, right in pairwise(parts))


def in_both(scheme: str = "B/K", size: int = 2) -> Plan:
    """Ranks 0 to 3 are in both roles, in fc in groups; rank 4 serves and rank 5 does nothing."""
    bounds = (0, 3, 4, 9, 12)
    return Plan(
        strategy="hybrid",
        world=6,
        roles={"conv": (0, 1, 2, 3), "fc": (0, 1, 2, 3)},
        placements={
            "a": LayerPlacement("conv", "replicated", "parameter_server"),
            "b": LayerPlacement("fc", "sharded", "none", group=size),
        },
        batch_offsets={"conv": bounds, "fc": bounds},
        groups={"fc": Grouping(size, scheme)},
        servers=(4,),
        all_reduce="recursive_doubling",
    )


def test_a_rank_may_be_in_several_roles_and_keeps_its_own_examples() -> None:
    made = in_both()
    assert [made.roles_of(rank) for rank in range(6)] == [("conv", "fc")] * 4 + [()] * 2
    assert made.ranks_by_roles == {("conv", "fc"): (0, 1, 2, 3), ("server",): (4,)}
    assert made.is_local("conv", "fc")
    assert made.routes(1, "conv", "fc") == ((1, 3, 4),)
    moved = replace(made, batch_offsets={**made.batch_offsets, "fc": (0, 2, 6, 9, 12)})
    assert not moved.is_local("conv", "fc")
    assert moved.routes(0, "conv", "fc") == ((0, 0, 2), (1, 2, 3))
    assert moved.interval("conv", 1) == (3, 4) and moved.interval("fc", 1) == (2, 6)
    assert moved.batch("conv", 1) == 1 and moved.batch("fc", 1) == 4


def test_ranks_of_one_combination_of_roles_run_one_part() -> None:
    made = replace(
        in_both(), roles={"conv": (0, 1, 2), "fc": (2, 3)}, groups={}, servers=(3, 5),
        batch_offsets={"conv": (0, 4, 8, 12), "fc": (0, 6, 12)},
    )  # fmt: skip
    assert made.ranks_by_roles == {("conv",): (0, 1), ("conv", "fc"): (2,), ("fc", "server"): (3,), ("server",): (5,)}


def test_groups_are_consecutive_ranks_and_replicas_hold_the_same_place_in_them() -> None:
    made = in_both()
    assert [made.group("fc", rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [made.replicas("fc", rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [made.group("conv", rank) for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    assert made.replicas("conv", 2) == (0, 1, 2, 3)


def test_the_microbatches_of_a_group_are_its_examples_once() -> None:
    for scheme, size in product(SCHEMES, (1, 2, 4)):
        made = in_both(scheme, size)
        number = made.groups["fc"].turns
        assert number == made.turns("fc") == (1 if scheme == "BK" else size)
        for rank in range(4):
            sizes, group = [made.sizes_at("fc", rank, k) for k in range(number)], made.group("fc", rank)
            assert all(len(each) == size for each in sizes)
            assert [sum(own) for own in zip(*sizes, strict=True)] == [made.batch("fc", member) for member in group]
            assert made.peak_batch("fc", rank) == max(map(sum, sizes))


def test_the_schemes_take_all_examples_one_members_or_a_part_of_each_members() -> None:
    assert in_both("BK").sizes_at("fc", 2, 0) == (5, 3)
    assert in_both("B").sizes_at("fc", 2, 1) == (0, 3)
    assert in_both("B/K").sizes_at("fc", 2, 1) == (3, 2)
    assert [in_both(scheme).peak_batch("fc", 2) for scheme in SCHEMES] == [8, 5, 5]


def test_what_decides_the_programs_changes_the_hash() -> None:
    changes: list[dict[str, Any]] = [
        {"groups": {"fc": Grouping(4)}},
        {"groups": {"fc": Grouping(2, "B")}},
        {"servers": (5,)},
        {"overlap": False},
        {"groups": {"fc": Grouping(2, "B/K", "every")}},
        {"all_reduce": "backend"},
        {"synchronised": True},
    ]
    for change in changes:
        assert replace(in_both(), **change).hash != in_both().hash, change


def test_a_prediction_changes_neither_the_hash_of_a_plan_nor_its_equality() -> None:
    priced = replace(in_both(), prediction=Prediction(cluster="none", gap=0.1, step_seconds=2.0))
    assert priced == in_both() and priced.hash == in_both().hash
    assert priced.samples_per_second == 6.0


def test_a_plan_file_of_before_predictions_stood_apart_still_loads() -> None:
    for name in ["mlp_modulo_4", "alexnet_mixed_4"]:
        text = (GOLDEN / "old_plans" / f"{name}.json").read_text()
        made, old = Plan.from_json(text), json.loads(text)
        again = json.loads(made.to_json())
        since = {"program_seconds": 0.0, "microbatches": 1}
        candidates = [{**candidate, **since} for candidate in old["candidates"]]
        expected = {**old, "advice": "", "program_seconds": 0.0, "candidates": candidates}
        assert {**again, "hash": old["hash"]} == expected, "the file's keys and values, and what came since"
        assert made.candidates[0].roles == {"all": (0,)} and made.prediction.cluster == "v100-10gbe", name
        assert len(made.prediction.phases) == made.world == 4, name


def test_a_plan_reads_back_from_its_text() -> None:
    made = plan(3, 2, 11)
    assert all(Plan.from_json(each.to_json()) == each for each in (made, in_both()))
    assert made.local_batches == (4, 4, 3) and made.reader == "conv" and made.global_batch == 11


def test_text_that_is_no_plan_is_refused() -> None:
    for text in ["", "{}", "[1]", '{"schema": 1, "hash": "x"}', '{"schema": 2, "hash": "x"}']:
        with pytest.raises(LaunchError, match=r"compile (again|the model again)"):
            Plan.from_json(text)


def test_updates_in_every_microbatch_are_never_exact() -> None:
    plan = Plan("s", 2, {"a": (0,), "b": (0, 1)}, {}, {"a": (0, 4), "b": (0, 2, 4)}, groups={"b": Grouping(2)})
    assert plan.exact
    edited = plan.to_json().replace('"updates": "once"', '"updates": "every"')
    assert '"exact": true' in edited
    assert not Plan.from_json(edited).exact


def test_what_a_plan_decides_is_checked_as_a_file_is() -> None:
    made = plan(2, 1, 8)
    assert not decision_problems(made)
    for wrong, what in [
        (replace(made, world=2), "roles: fc has rank 2, but the world has ranks 0 to 1"),
        (
            replace(made, batch_offsets={**made.batch_offsets, "conv": (0, 8, 4)}),
            "it must be 3 bounds that grow from 0",
        ),
    ]:
        assert any(what in line for line in decision_problems(wrong)), wrong
