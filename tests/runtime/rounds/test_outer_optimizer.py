"""An outer optimizer and fragments that take turns: DiLoCo and streaming DiLoCo against loops written by hand."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.errors import PlacementError
from splitc.ir.plan import Plan
from splitc.ir.plan_checks import plan_problems
from splitc.passes.planner.strategy import parse_strategy
from splitc.runtime.spec import Rounds
from splitc.runtime.worker import Worker
from splitc.strategies.local_sgd import LocalSGD
from tests.runtime.rounds.test_local_sgd import EXACT, doubles, known, planned
from tests.support.ranks import adam, assert_same, on_workers, sgd, train
from tests.support.sampling import along, in_pairs
from tests.support.units import exchanged, mean, parts

LR, MOMENTUM = 0.7, 0.9


class Outer:
    """SGD with (Nesterov's) momentum on the averaged change of a fragment, by its formulas."""

    def __init__(self, start: dict[str, Tensor], lr: float, momentum: float, nesterov: bool = True) -> None:
        self.kept = {name: tensor.clone() for name, tensor in start.items()}
        self.speed: dict[str, Tensor] = {}
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov

    def step(self, name: str, value: Tensor) -> Tensor:
        if (self.lr, self.momentum) == (1.0, 0.0) or name.endswith(("running_mean", "running_var")):
            self.kept[name] = value.clone()
            return value
        change = self.kept[name] - value
        self.speed[name] = change + self.momentum * self.speed[name] if name in self.speed else change.clone()
        ahead = change + self.momentum * self.speed[name] if self.nesterov else self.speed[name]
        self.kept[name] = self.kept[name] - self.lr * ahead
        return self.kept[name]


def stream(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    sizes: list[int],
    period: int,
    fragments: list[list[str]],
    delay: int = 0,
    mixing: float | None = 0.0,
    optimizer: Any = sgd,
    outer: tuple[Any, ...] = (LR, MOMENTUM),
) -> dict[str, Tensor]:
    """Train units whose fragments leave in turns and arrive later, and average all at the very end."""
    units = [copy.deepcopy(model) for _ in sizes]
    inner = [optimizer(list(unit.named_parameters())) for unit in units]
    rule = Outer(exchanged(model), *outer)
    turns = [(f + 1) * period // len(fragments) for f in range(len(fragments))]
    travelling: dict[int, tuple[int, dict[str, Tensor]]] = {}
    left: dict[str, list[Tensor]] = {}  # what each unit had when a fragment left
    trained = [0] * len(fragments)  # updates since a fragment left

    def leave(f: int, now: int) -> None:
        travelling[f] = now + delay, {name: mean(units, name, sizes) for name in fragments[f]}
        left.update({name: [exchanged(unit)[name].detach().clone() for unit in units] for name in fragments[f]})
        trained[f] = 0

    def arrive(f: int, own: float | None) -> None:
        for name, value in travelling.pop(f)[1].items():
            result = rule.step(name, value)
            for unit, before in zip(units, left[name], strict=True):
                if own is None:
                    exchanged(unit)[name].add_(result - before)
                else:
                    exchanged(unit)[name].mul_(own).add_(result * (1 - own))

    for now, batch in enumerate(batches, 1):
        for unit, (x, y), updates in zip(units, parts(batch, sizes), inner, strict=True):
            updates.zero_grad()
            F.cross_entropy(unit(x), y).backward()
            updates.step()
        trained = [count + 1 for count in trained]
        for f, turn in enumerate(turns):
            if now % period == turn % period:
                leave(f, now)
        for f in [f for f, (when, _) in travelling.items() if when == now]:
            arrive(f, mixing)
    for f in list(travelling):
        arrive(f, mixing if trained[f] else 0.0)
    for f in range(len(fragments)):
        if trained[f]:
            leave(f, 0)
            arrive(f, 0.0)
    return {key: tensor.detach().clone() for key, tensor in units[0].state_dict().items()}


def fragments_of(program: Any) -> list[list[str]]:
    (stage,) = program.program.stages
    found: list[list[str]] = [[] for _ in range(max(stage.fragments) + 1)]
    for bucket, fragment in zip(stage.averaged, stage.fragments, strict=True):
        found[fragment] += bucket
    return found


# -- DiLoCo ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@along(1, name=["counting", "norm"], optimizer=[adam, sgd])
def test_the_averaged_change_of_a_round_is_the_gradient_of_an_outer_optimizer(name: str, optimizer: Any) -> None:
    sizes = [2, 3, 4]
    batches = doubles(9, 8)
    program = planned(name, f"local_sgd(period=3, outer_lr={LR}, outer_momentum={MOMENTUM})", 3)
    _, got = on_workers(program, lambda worker: train(worker, batches, sizes), optimizer=optimizer)[0]
    assert_same(got, stream(known(name)[0], batches, sizes, 3, fragments_of(program), optimizer=optimizer), EXACT)


# -- streaming DiLoCo --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@in_pairs(
    2,
    fragments=[2, 1, 3],
    delay=[1, 0, 2],
    outer=[(LR, MOMENTUM), (1.0, 0.0)],
    mixing=[None, 0.5],
    optimizer=[adam, sgd],
)
def test_fragments_take_turns_under_computing(
    fragments: int, delay: int, outer: tuple[Any, ...], mixing: float | None, optimizer: Any
) -> None:
    period, sizes = 4, [2, 4]
    batches = doubles(6, 11)
    mixing = mixing if delay else None
    options = LocalSGD(
        period, fragments=fragments, delay=delay, mixing=mixing, outer_lr=outer[0], outer_momentum=outer[1]
    )
    program = planned("norm", str(options), 2)
    own = fragments_of(program)
    assert len(own) == fragments and all(own)
    results = on_workers(program, lambda worker: train(worker, batches, sizes), optimizer=optimizer)
    expected = stream(known("norm")[0], batches, sizes, period, own, delay, mixing, optimizer, outer)
    assert_same(results[0][1], expected, EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 5])
def test_a_round_that_ends_while_fragments_travel_waits_for_them_and_leaves_all_ranks_alike(steps: int) -> None:
    batches, sizes = doubles(6, steps), [3, 3]
    options = LocalSGD(4, fragments=2, delay=2, mixing=0.3, outer_lr=LR, outer_momentum=MOMENTUM)
    program = planned("norm", str(options), 2)

    def run(worker: Worker) -> dict[str, Tensor]:
        train(worker, batches, sizes)
        worker.end_round()  # nothing is left to be done
        return {key: tensor.clone() for key, tensor in worker.stage.state_dict().items()}

    expected = stream(known("norm")[0], batches, sizes, 4, fragments_of(program), 2, 0.3)
    for state in on_workers(program, run):
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, expected[key], rtol=EXACT, atol=EXACT)


def test_the_actions_tell_which_fragment_travels_when() -> None:
    program = planned("norm", "local_sgd(period=8, fragments=2, delay=3, outer_lr=0.7)", 2).program
    told = [str(action) for action in program.rank_programs[0].actions if "of a round" in str(action)]
    assert told == [
        "all: average bucket0 (after update 4 of a round)",
        "all: average bucket1 (after update 4 of a round)",  # of statistics
        "all: average bucket2 (after update 8 of a round)",
        "all: arrive bucket0 (after update 7 of a round)",
        "all: arrive bucket1 (after update 7 of a round)",
        "all: arrive bucket2 (after update 3 of a round)",
    ]


def test_options_without_sense_are_refused() -> None:
    for options, why in (
        ("outer_lr=0", "outer_lr is 0; it must be more than 0"),
        ("outer_lr=fast", "outer_lr is 'fast'; it must be a finite number"),
        ("outer_momentum=1", "outer_momentum is 1; it must be at least 0 and less than 1"),
        ("nesterov=True", "nesterov is a rule for momentum, but outer_momentum is 0"),
        ("fragments=9", "9 fragments cannot take turns in 8 updates; take 1 to 8"),
        ("delay=8", "delay is 8, but a fragment arrives before it leaves again, 8 updates later"),
        ("mixing=0.5", "mixing is 0.5; it must be 0 to 1, and 0 without a delay"),
        ("delay=1, mixing=2", "mixing is 2; it must be 0 to 1"),
        ("fragments=2.5", "fragments is 2.5; it must be a whole number of at least 1"),
    ):
        with pytest.raises(PlacementError, match=re.escape(why)):
            parse_strategy(f"local_sgd(period=8, {options})")


@pytest.mark.slow
def test_a_plan_file_holds_all_of_it() -> None:
    options = LocalSGD(16, outer_lr=0.7, outer_momentum=0.9, fragments=2, delay=3, mixing=0.25)
    plan = planned("net", str(options), 2).plan
    assert plan.rounds == Rounds(16, 1, 0.7, 0.9, True, 2, 3, 0.25)
    assert not plan.exact and Plan.from_json(plan.to_json()) == plan
    data = json.loads(plan.to_json())
    data["rounds"] |= {"delay": 16, "outer_momentum": 2}
    problems = plan_problems(data)
    assert len(problems) == 2 and all(problem.startswith("rounds: ") for problem in problems)
