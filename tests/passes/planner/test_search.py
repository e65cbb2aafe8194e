"""The search finds what trying every assignment of every division finds, and never claims more."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitc.ir.cluster import Cluster
from splitc.ir.plan_checks import decision_problems
from splitc.ir.program import Program
from splitc.passes.planner.cuts import cut_rules
from splitc.passes.planner.options import make_problem, role_options
from splitc.passes.planner.pins import resolve_pins
from splitc.passes.planner.priced_plan import simulated
from splitc.passes.planner.propose import propose
from splitc.passes.planner.request import Request, smallest
from splitc.passes.planner.search import Search, kinds_of, search
from splitc.passes.planner.strategy import Strategy
from splitc.strategies.data_parallel import DataParallel
from splitc.strategies.hybrid_single import HybridSingle
from splitc.strategies.late_multiply import LateMultiply
from splitc.strategies.layer_separation import LayerSeparation
from splitc.strategies.mixed import Mixed
from splitc.strategies.modulo_shard import ModuloShard
from tests.support.compiled import analyse
from tests.support.models import Made
from tests.support.sampling import sampled
from tests.support.separations import brute_force
from tests.support.small_problems import broken_equations, least_step
from tests.support.small_programs import Row, place, small_cluster, small_program


def random_program(rng: random.Random) -> Program:
    """Two to six layers in any shape that a graph can have, on wires of any speed."""
    rows: list[Row] = []
    count = rng.randint(2, 6)
    for i in range(count):
        earlier = [row.name for row in rows] + ["images"]
        reads = set(rng.sample(earlier, min(len(earlier), rng.randint(1, 3))))
        if i == count - 1:
            reads |= {"labels"} | ({rows[-1].name} if rows else set())
        kind = rng.choice(["conv", "fc", "none"]) if i else "conv"
        rows.append(
            Row(
                f"layer{i}",
                tuple(sorted(reads)),
                parameters={"conv": rng.randint(10, 500), "fc": rng.randint(500, 30_000)}.get(kind, 0),
                width=rng.randint(1, 300),
                flops=rng.uniform(1e3, 1e6),
                moved=rng.uniform(1e2, 1e6),
                kept=rng.uniform(0, 1e4),
                trains=rng.random() > 0.2,
                batched=rng.random() > 0.1,
            )
        )
    if rng.random() < 0.3 and rows[0].parameters and count > 3:
        rows[2] = replace(rows[2], parameters=0, shares=rows[0].name)
    return small_program(rows, batch=rng.randint(1, 6))


def random_case(seed: int) -> tuple[Program, int, dict[str, Any]]:
    """A program, its world, and the options of its placement."""
    rng = random.Random(seed)
    program = random_program(rng)
    names = [layer.name for layer in program.layers]
    return (
        program,
        rng.randint(2, 5),
        {
            "cluster": small_cluster(10 ** rng.uniform(3, 7), 10 ** rng.uniform(-6, -2)),
            "memory": rng.choice([1e9, 1e9, 10 ** rng.uniform(3.5, 5.5)]),
            "global_batch": rng.choice([None, None, rng.randint(1, 20)]),
            "pins": rng.choice([{}, {}, {rng.choice(names): rng.choice(["conv", "fc"])}]),
        },
    )


def request_of(
    program: Program,
    world: int,
    cluster: Cluster,
    memory: float = 1e9,
    global_batch: int | None = None,
    pins: Mapping[str, str] | None = None,
    time_limit: float = 60.0,
) -> Request:
    names = [layer.name for layer in program.layers]
    return Request(
        program, cluster, world, resolve_pins(pins or {}, names), global_batch, memory, time_limit=time_limit
    )


def searched(request: Request, strategy: Strategy) -> Search:
    divided = [each for each in strategy.divisions(request) if all(smallest(role.bounds) for role in each.roles)]
    return search(request, cut_rules(request.program), divided, strategy.space(request, False))


def enumerated(request: Request, strategy: Strategy) -> float:
    """Samples per second of the best assignment of all divisions; 0 where there is none."""
    rules, space = cut_rules(request.program), strategy.space(request, False)
    best = 0.0
    for division in strategy.divisions(request):
        if all(smallest(role.bounds) for role in division.roles):
            best = max(best, division.global_batch / least_step(make_problem(request, rules, division, space)))
    return best


SEEDS = range(30)


@sampled("seed", SEEDS, one_in=15)
def test_the_best_of_a_strategy_is_the_best_assignment_of_all_its_divisions(seed: int) -> None:
    """Of a separation priced from the graph, too; without time the search claims no more than it knows."""
    program, world, options = random_case(seed)
    best, _ = brute_force(program, world, **options)
    found = searched(request_of(program, world, **options), LayerSeparation())
    assert (found.found[0].rate if found.found else 0.0) == pytest.approx(best, rel=1e-6)
    assert found.proved == bool(found.found)
    assert bool(found.found) or not found.bound
    hurried = searched(request_of(program, world, **options, time_limit=0.0), LayerSeparation())
    assert hurried.bound >= best * (1 - 1e-9)
    if hurried.found:
        assert hurried.found[0].rate <= best * (1 + 1e-9)
        assert not hurried.proved or hurried.found[0].rate == pytest.approx(best, rel=1e-6)
    request = request_of(program, min(world, 4), **options)
    for strategy in (DataParallel(), HybridSingle(), Mixed()):
        assert_best(request, strategy)


def assert_best(request: Request, strategy: Strategy) -> None:
    best, found = enumerated(request, strategy), searched(request, strategy)
    assert (found.found[0].rate if found.found else 0.0) == pytest.approx(best, rel=1e-6), strategy
    assert found.bound >= best * (1 - 1e-6)
    for each in found.found:
        assert not broken_equations(each.problem, each.chosen)


@cache
def three_linear_layers() -> Program:
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.Linear(96, 24))
    return analyse(model, torch.randn(4, 64), torch.randint(24, (4,)), F.cross_entropy)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "bandwidth"), [(4, 1e6), (2, 1e5), (3, 1e7), (2, 1e7)])
def test_the_best_way_to_divide_linear_layers_is_the_best_of_all(world: int, bandwidth: float) -> None:
    request = request_of(three_linear_layers(), world, small_cluster(bandwidth))
    for strategy in (LateMultiply(), ModuloShard(), Mixed()):
        assert_best(request, strategy)


@pytest.mark.slow
def test_the_random_programs_meet_every_case() -> None:
    """Else the tests above prove less than they say."""
    found = possible = tied = pinned = beyond_a_chain = 0
    for seed in SEEDS:
        program, world, options = random_case(seed)
        best, fc = brute_force(program, world, **options)
        names = [layer.name for layer in program.layers]
        held = [h for layer in program.layers for h in layer.tensors]
        found += 1
        possible += best > 0
        pinned += best > 0 and bool(options["pins"])
        tied += best > 0 and len(held) > len(set(held))
        beyond_a_chain += best > 0 and names[-len(fc) :] != [n for n in names if n in fc]
    assert 15 <= possible < found
    assert min(tied, pinned, beyond_a_chain) >= 1, (tied, pinned, beyond_a_chain)


# -- little time -------------------------------------------------------------------------------------------------------


def branching(blocks: int) -> Program:
    """Blocks of three layers that read the sum before them, and a sum; large layers at the end."""
    rng = random.Random(0)
    rows = [Row("stem", ("images",), parameters=100, width=32, flops=1e4, kept=64)]
    for k in range(blocks):
        before = rows[-1].name
        several = [
            Row(f"block{k}_{x}", (before,), rng.randint(10, 500), 32, rng.uniform(1e3, 1e5), kept=64) for x in "abc"
        ]
        rows += [*several, Row(f"block{k}_sum", (before, *(row.name for row in several)), width=32, moved=64)]
    rows.append(Row("fc", (rows[-1].name,), parameters=60_000, width=10, flops=1e4))
    return small_program([*rows, Row("loss", ("fc", "labels"))])


@pytest.mark.slow
@pytest.mark.parametrize("reads", [1, 4])
def test_a_second_for_hundreds_of_branching_layers_gives_a_checked_plan_and_its_gap(
    reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = branching(75)
    assert len(program.layers) > 300
    clock = itertools.chain(itertools.repeat(0.0, reads), itertools.repeat(10.0))
    monkeypatch.setattr("splitc.passes.planner.search.time", SimpleNamespace(monotonic=lambda: next(clock)))
    found = searched(request_of(program, 4, small_cluster(), time_limit=1.0), LayerSeparation())
    assert not any(broken_equations(each.problem, each.chosen) for each in found.found)
    assert found.found[0].rate <= found.bound < math.inf
    monkeypatch.setattr(
        "splitc.passes.planner.search.time", SimpleNamespace(monotonic=itertools.count(0.0, 10).__next__)
    )
    plan = place(program, 4, LayerSeparation(), time_limit=1.0)
    assert set(plan.placements) == {layer.name for layer in program.layers}
    assert not decision_problems(plan)
    assert plan.prediction.proof == "heuristic"
    assert 0.0 < plan.prediction.gap < 0.5


@pytest.mark.slow
def test_layers_with_the_same_numbers_have_the_options_that_each_would_have_by_itself() -> None:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(6)]
    blocks[2][0].requires_grad_(False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), *blocks, nn.Linear(16, 8, bias=False), nn.Linear(8, 16))
    program = analyse(model, torch.randn(8, 3, 16), torch.randint(16, (8,)), F.cross_entropy)
    request = Request(program, small_cluster(1e6), 4)
    assert 4 < len(set(request.alike.values())) < len(request.alike) - 6, "some repeat, and not all"
    rules = cut_rules(program)
    several = [each for each in Mixed().divisions(request) if len(each.roles) > 1]
    shared = [role_options(request, rules, each, role) for each in several for role in (0, 1)]
    object.__setattr__(request, "alike", {layer: layer for layer in request.alike})
    request.options.clear()
    assert [role_options(request, rules, each, role) for each in several for role in (0, 1)] == shared


def test_layers_that_are_alike_are_priced_once_in_a_walk() -> None:
    rows = [Row("fc0", ("images",), parameters=100, width=32, flops=1e4)]
    rows += [Row(f"fc{k}", (f"fc{k - 1}",), parameters=100, width=32, flops=1e4) for k in range(1, 9)]
    request = request_of(small_program([*rows, Row("loss", ("fc8", "labels"))]), 4, small_cluster())
    division, space = next(iter(LayerSeparation().divisions(request))), LayerSeparation().space(request, False)
    kinds = kinds_of(problem := make_problem(request, cut_rules(request.program), division, space))
    assert len(kinds) == len(problem.options) and len({*kinds[1:9]}) == 1


def positions() -> Program:
    """Embeddings of tokens, and of positions that no example has of its own."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.head(m.tokens(x) + m.positions(torch.arange(x.size(1)))).transpose(1, 2)

    parts = {"tokens": nn.Embedding(512, 64), "positions": nn.Embedding(16, 64), "head": nn.Linear(64, 512)}
    return analyse(Made(run, **parts), *TOKENS, F.cross_entropy)


@pytest.mark.slow
def test_a_table_that_no_example_indexes_is_priced_as_it_is_gathered() -> None:
    request = Request(positions(), small_cluster(1e8), 4)
    assert not request.dividing["positions"].features and request.dividing["tokens"].features
    for each in propose(request, Mixed()):
        real = simulated(request, each)
        assert real.seconds == pytest.approx(each.program_seconds, rel=0.1), each.plan


TOKENS = torch.randint(512, (8, 16)), torch.randint(512, (8, 16))


def tied() -> Program:
    """An embedding whose table is the weight of the head, too, and a large layer between them."""
    tokens, head = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
    head.weight = tokens.weight
    model = Made(lambda m, x: m.head(m.middle(m.tokens(x))).transpose(1, 2), tokens=tokens, middle=nn.Linear(64, 64))
    model.head = head
    return analyse(model, *TOKENS, F.cross_entropy)


@pytest.mark.slow
def test_a_tied_weight_is_used_in_one_way_so_that_its_gradient_travels_once() -> None:
    program = tied()
    request, rules = Request(program, small_cluster(1e5), 4), cut_rules(program)
    grouped = next(each for each in Mixed().divisions(request) if each.roles[-1].group == 4)
    problem = make_problem(request, rules, grouped, Mixed().space(request, False))
    whole = {
        layer: [o for o in problem.options[layer] if o.role and o.holding == "replicated"] for layer in problem.options
    }
    own, alike = ({layer: few[k] for layer, few in whole.items()} for k in (0, 1))
    assert {o.reads for o in own.values()} == {"batch"} and {o.reads for o in alike.values()} == {"replicate"}
    assert "eq9" not in problem.broken(own) and "eq9" not in problem.broken(alike)
    assert "eq9" in problem.broken({**own, "head": alike["head"]})
