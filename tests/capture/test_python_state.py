"""Python state that a model or its loss changes is refused by name; what only looks like it is not."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.validate.python_state import changed, python_state
from splitc.errors import CaptureError
from tests.support.capturing import captured, refusal, validated
from tests.support.models import CLASSES, labels, made, vectors
from tests.support.sampling import in_tiers

CE = F.cross_entropy
CALLS = 0
TABLE = {"calls": 0}


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def next(self) -> int:
        self.n += 1
        return self.n


def bump(counter: Any, key: Any) -> Any:
    counter[key] += 1
    return counter[key]


def global_calls(m: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return m.fc(x) * (2 if CALLS > 1000 else 1)


def averaged(m: Any, x: Tensor) -> Tensor:
    h = m.fc(x)
    m.mean = 0.9 * m.mean + 0.1
    return h * m.mean


def stepped(m: Any, x: Tensor) -> Tensor:
    m.t = m.t + 1
    return m.fc(x) * m.t


def cached(m: Any, x: Tensor) -> Tensor:
    before = m.before if m.before is not None else x
    m.before = x.detach()
    return m.fc(x + before[: x.size(0)])


def text(m: Any, x: Tensor) -> Tensor:
    m.name = m.name + "a"
    return m.fc(x) * (2 if len(m.name) > 1000 else 1)


def once(m: Any, x: Tensor) -> Tensor:
    scale = next(m.numbers)
    return m.fc(x) * scale


STATES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], Any], str]] = {
    "n": (lambda m, x: m.fc(x) * bump(m.n, 0), lambda: [0], "changes n[0]"),
    "seen": (lambda m, x: m.fc(x) * (2 if bump(m.seen, "all") > 99 else 1), lambda: {"all": 0}, "seen['all']"),
    "counter": (lambda m, x: m.fc(x) * (2 if m.counter.next() > 99 else 1), Counter, "changes counter.n"),
    "numbers": (once, lambda: itertools.count(1), "changes numbers"),
    "rng": (lambda m, x: m.fc(x) * m.rng.random(), lambda: random.Random(1), "the random generator rng,"),
    "rng_np": (
        lambda m, x: m.fc(x) * float(m.rng_np.random()),
        lambda: np.random.default_rng(1),
        "the random generator rng_np,",
    ),
    "t": (stepped, lambda: torch.zeros(()), "t changed"),
    "mean": (averaged, lambda: torch.zeros(()), "mean changed"),
    "before": (cached, lambda: None, "before"),
    "name": (text, lambda: "a", "changes name"),
    "calls": (global_calls, lambda: None, "the global CALLS"),
    "queue": (lambda m, x: (m.queue.append(len(m.queue)), m.fc(x))[1], list, "changes queue"),
}


@in_tiers("cases", STATES, one_in=3)
def test_state_that_forward_changes_is_refused_by_name(cases: list[Any]) -> None:
    for name in cases:
        run, state, said = STATES[name]
        model = made(run, fc=nn.Linear(8, CLASSES))
        setattr(model, name, state())
        assert said in refusal(model, torch.zeros(4, 8), torch.zeros(4, dtype=torch.long), CE), name


class Held:
    __slots__ = ("own",)

    def __init__(self, own: random.Random) -> None:
        self.own = own


GENERATORS: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "RandomState": (np.random.RandomState(3), lambda g: float(g.rand())),
    "default_rng": (np.random.default_rng(3), lambda g: float(g.random())),
    "Random": (random.Random(3), lambda g: float(g.random())),
    "Generator": (torch.Generator(), lambda g: float(torch.rand((), generator=g))),
    "in a list": ([np.random.RandomState(3)], lambda g: float(g[0].rand())),
    "in a slot": (Held(random.Random(3)), lambda g: float(g.own.random())),
}


@in_tiers("cases", GENERATORS, one_in=6)
def test_a_generator_of_ones_own_is_refused_by_name_in_a_region_too(cases: list[Any]) -> None:
    for name in cases:
        generator, draw = GENERATORS[name]
        model = made(
            lambda m, x, draw=draw: m.fc(x) * (1 + (m.own[0].item() > 1e9)) * draw(m.generator),
            fc=nn.Linear(8, CLASSES),
        )
        model.own, model.generator = nn.Parameter(torch.ones(1)), generator
        with pytest.raises(CaptureError, match=r"the random generator generator.*draw from torch, random or numpy"):
            validated(model, torch.randn(4, 8), torch.zeros(4, dtype=torch.long), CE)


def test_a_counter_in_the_loss_is_refused() -> None:
    calls = [0]

    class Loss:
        epoch = 0

        def __call__(self, out: Tensor, y: Tensor) -> Tensor:
            self.epoch += 1
            return CE(out, y) * (2 if self.epoch > 1000 else 1)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return CE(out, y) * (2 if calls[0] > 1000 else 1)

    assert "calls of loss[0]" in refusal(nn.Linear(8, CLASSES), vectors()(), labels()(), loss)
    assert "loss.epoch" in refusal(nn.Linear(8, CLASSES), vectors()(), labels()(), Loss())


def test_a_counter_of_the_class_is_refused() -> None:
    class Net(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Net.calls += 1
            return super().forward(x) * (2 if Net.calls > 1000 else 1)

    assert "Net.calls" in refusal(Net(8, CLASSES), vectors()(), labels()(), CE)


def test_a_buffer_that_counts_is_part_of_the_graph_run_after_run() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        m.steps.add_(1)
        return m.fc(m.bn(x)) * (m.steps / (m.steps + 1))

    model = made(run, fc=nn.Linear(8, CLASSES), bn=nn.BatchNorm1d(8))
    model.register_buffer("steps", torch.zeros(()))
    assert captured(model, vectors()(), labels()(), CE).coupled == ()


def test_activations_that_are_kept_for_others_to_read_are_no_state() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        m.hidden = m.fc(x)
        m.shape = tuple(x.shape[1:])
        return m.hidden

    model = made(run, fc=nn.Linear(8, CLASSES))
    assert validated(model, vectors()(), labels()(), CE).notes == ()
    assert not hasattr(model, "hidden")


def test_compiling_leaves_model_example_and_generators_as_they_were() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        m.steps.add_(1)
        x.mul_(2)
        return m.fc(m.bn(x)) + m.offset

    model = made(run, fc=nn.Linear(8, CLASSES), bn=nn.BatchNorm1d(8))
    model.register_buffer("steps", torch.zeros(()))
    model.offset = torch.zeros(CLASSES)
    x, y = vectors()(), labels()()
    before = (
        copy.deepcopy(model.state_dict()),
        x.clone(),
        torch.get_rng_state(),
        random.getstate(),
        repr(np.random.get_state()),
    )
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    validated(model, x, y, CE)
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values(), strict=True))
    assert torch.equal(before[1], x) and torch.equal(before[2], torch.get_rng_state())
    assert before[3] == random.getstate() and before[4] == repr(np.random.get_state())
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(p.grad is None for p in model.parameters()) and torch.get_default_dtype() == torch.float32


def test_state_has_a_name_that_a_user_knows() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    numbers = [1, 2]
    model[0].note = {"a": numbers}  # type: ignore[assignment]
    before = python_state(model, None)
    numbers[1] = 3
    assert changed(before, python_state(model, None)) == ["0.note['a'][1]"]
