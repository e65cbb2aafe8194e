"""Optimizers whose options follow from positions or groups train as in one process, whatever part a rank has."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from tests.support.compiled import compiled
from tests.support.ranks import assert_same, on_workers, one_process, train
from tests.support.sampling import along

Params = Iterable[tuple[str, nn.Parameter]]

PLANS = {
    "data_parallel": 2,
    "layer_separation(n_c=2, n_f=1)": 3,
    "layer_separation(n_c=1, n_f=1)": 2,
    "modulo_shard(mp=2)": 2,
    "late_multiply": 2,
    "hybrid_single": 2,
    "parameter_server(servers=1)": 3,
    "parameter_server(servers=2, beside=True)": 2,
}
"""Strategy -> ranks."""


class Unused(nn.Module):
    """A layer that nothing reads stands before those that are trained; the last one shares the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)
        self.trunk = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 8), nn.ReLU())
        self.middle = nn.Linear(8, 8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head[0].weight = self.middle.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.middle(self.trunk(x)))
        return scores


@cache
def made(strategy: str) -> tuple[nn.Module, CompiledProgram]:
    torch.manual_seed(4)
    model = Unused()
    middle = "conv" if "n_c=2" in strategy else "fc"  # which has the weight of the head's first layer
    pins = {"trunk*": "conv", "middle": middle, "head*": "fc"} if strategy.startswith("layer") else {}
    options: dict[str, Any] = {"pins": pins} if pins else {}
    x, y = torch.randn(4, 1, 6, 6), torch.randint(4, (4,))
    return model, compiled(model, (x,), y, F.cross_entropy, PLANS[strategy], strategy, **options)


def by_position(params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 0.2 * 0.8**k} for k, (_, p) in enumerate(params)], momentum=0.9)


def last_faster(params: Params) -> torch.optim.Optimizer:
    named = list(params)
    last = {name for name, _ in named[-3:]}
    groups = [{"params": [p for n, p in named if (n in last) == fast], "lr": 0.2 if fast else 0.01} for fast in (0, 1)]
    return torch.optim.SGD([each for each in groups if each["params"]])


def first_without_decay(params: Params) -> torch.optim.Optimizer:
    named = [(name, p) for name, p in params if p.requires_grad]
    groups: Any = [{"params": [named[0]], "weight_decay": 0.0}, {"params": named[1:]}]
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.5)


def by_total(params: Params) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.Adagrad([p for _, p in params], lr=0.5 / len(params))


FACTORIES = [by_position, last_faster, first_without_decay, by_total]


@pytest.mark.slow
@along(3, strategy=PLANS, factory=FACTORIES)
def test_options_by_position_are_those_of_one_process(strategy: str, factory: Any) -> None:
    model, program = made(strategy)
    batches = [(torch.randn(n, 1, 6, 6), torch.randint(4, (n,))) for n in [program.plan.global_batch] * 4]
    losses, state = one_process(copy.deepcopy(model), batches, factory)
    for got, last in on_workers(program, lambda worker: train(worker, batches), optimizer=factory):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(losses), rtol=1e-5, atol=1e-5)
        if last is not None:
            assert_same(last, state)


# -- refusals ----------------------------------------------------------------------------------------------------------


def hooked(params: Params) -> torch.optim.Optimizer:
    params = list(params)
    params[2][1].register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return torch.optim.SGD(params, lr=0.1)


def accumulating(params: Params) -> torch.optim.Optimizer:
    params = list(params)
    params[-1][1].register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
    return torch.optim.SGD(params, lr=0.1)


def freezing(params: Params) -> torch.optim.Optimizer:
    params = list(params)
    params[2][1].requires_grad_(False)
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.slow
@along(
    strategy=["data_parallel", "layer_separation(n_c=1, n_f=1)", "modulo_shard(mp=2)"],
    case=[
        (hooked, "puts a hook on trunk.0.weight"),
        (accumulating, "puts a hook on head.2.bias"),
        (freezing, "puts a hook on trunk.0.weight, or freezes it"),
    ],
)
def test_what_a_factory_does_to_parameters_is_refused_by_name(strategy: str, case: tuple[Any, str]) -> None:
    factory, problem = case
    with pytest.raises(LaunchError, match=f"the optimizer's factory {problem}"):
        on_workers(made(strategy)[1], lambda worker: None, optimizer=factory)


def by_size(params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 0.1 if p.numel() == 32 else 0.2} for _, p in params])


def test_options_that_follow_from_the_part_that_a_rank_has_are_refused_by_name() -> None:
    _, program = made("modulo_shard(mp=2)")
    with pytest.raises(LaunchError, match=r"gives head.2.weight lr=0.2, and 0.1 among whole parameters"):
        on_workers(program, lambda worker: None, optimizer=by_size)


@pytest.mark.parametrize("strategy", ["data_parallel", "layer_separation(n_c=1, n_f=1)"])
def test_what_is_no_optimizer_is_refused(strategy: str) -> None:
    program = made(strategy)[1]
    for answer, kind in ((lambda params: None, "NoneType"), (lambda params: [torch.optim.SGD(params)], "list")):
        with pytest.raises(LaunchError, match=f"the optimizer's factory returns a {kind}; let it return an optimizer"):
            on_workers(program, lambda worker: None, optimizer=answer)


def test_a_factory_that_fails_without_the_values_of_other_ranks_is_told_so() -> None:
    def by_norm(params: Params) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.1 * float(p.norm())} for _, p in params])

    with pytest.raises(
        LaunchError, match=r"factory fails, .* those of other ranks have names, shapes and dtypes, but no values"
    ):
        on_workers(made("layer_separation(n_c=1, n_f=1)")[1], lambda worker: None, optimizer=by_norm)


def test_a_rank_that_trains_nothing_has_a_scheduler_with_the_groups_of_the_model() -> None:
    def rates(worker: Any) -> int:
        rules = [lambda step: 1.0, lambda step: 0.5]
        return len(worker.scheduler(lambda o: torch.optim.lr_scheduler.LambdaLR(o, rules)).get_last_lr())

    assert on_workers(made("parameter_server(servers=1)")[1], rates, optimizer=last_faster) == [2, 2, 2]
