"""Optimizers on ranks that have a part of the model: what reads more of it than they have is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from splitc.runtime.optimizers import ELEMENTWISE
from splitc.runtime.transport.base import Transport
from tests.support.compiled import compiled
from tests.support.ranks import on_ranks, on_workers, worker_of

Params = Iterable[tuple[str, nn.Parameter]]
DIVIDED = ["modulo_shard(mp=2)", "parameter_server(servers=2,beside=True)"]
PARTS = [*DIVIDED, "layer_separation(n_c=1, n_f=1)"]


@cache
def program(strategy: str) -> CompiledProgram:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return compiled(model, torch.randn(4, 6), torch.randint(3, (4,)), F.cross_entropy, 2, strategy)


def made(strategy: str, factory: Any, **options: Any) -> list[torch.optim.Optimizer | None]:
    return on_workers(program(strategy), lambda worker: worker.optimizer, optimizer=factory, **options)


class Own(torch.optim.Optimizer):
    """Descends along what `direction` makes of a tensor, its gradient and the number of the step."""

    def __init__(self, params: Any, direction: Callable[[Tensor, Tensor, int], Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.direction, self.steps = direction, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(group["lr"] * self.direction(p.data, p.grad, self.steps))


def lars(p: Tensor, g: Tensor, step: int) -> Tensor:
    return g * (p.norm() / g.norm())


def centralised(p: Tensor, g: Tensor, step: int) -> Tensor:
    return g - g.mean(tuple(range(1, g.dim())), keepdim=True) if g.dim() > 1 else g


def now_and_then(p: Tensor, g: Tensor, step: int) -> Tensor:
    return g / g.abs().max() if step % 10 == 0 else g


def columns(p: Tensor, g: Tensor, step: int) -> Tensor:
    return g / (1 + g.abs().amax(0, keepdim=True))


class Nesterov(torch.optim.SGD):
    """Whose step is another one than that of its base."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(1 + p.grad.std())
        super().step()


def hooked(params: Params) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)

    def centralise(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = centralised(p, p.grad, 1)

    optimizer.register_step_pre_hook(centralise)
    return optimizer


def by_shape(params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 1.0 / p.shape[0]} for _, p in params])


OF_WHOLE_TENSORS: dict[str, Any] = {
    "Adafactor": lambda params: torch.optim.Adafactor([p for _, p in params]),
    **{f.__name__: lambda params, f=f: Own(params, f) for f in (lars, centralised, now_and_then, columns)},
    "subclass": lambda params: Nesterov(params, lr=0.1),
    "hook": hooked,
    "lr by shape": by_shape,
}


@pytest.mark.slow
def test_an_optimizer_of_whole_tensors_is_refused_where_a_rank_has_parts() -> None:
    message = r"(Adafactor|Own|Nesterov|SGD) looks at whole tensors, and this rank has a part of .*\d\.(weight|bias)"
    for (name, factory), strategy in zip(OF_WHOLE_TENSORS.items(), DIVIDED * len(OF_WHOLE_TENSORS), strict=False):
        with pytest.raises(LaunchError, match=f"{message}.*; use an optimizer that works element by element"):
            made(strategy, factory)
            pytest.fail(name)
        made("data_parallel", factory)
        made(strategy, factory, elementwise=True)


class Clipping(torch.optim.SGD):
    """Clips the norm of all its gradients together."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        super().step()


@pytest.mark.slow
def test_an_optimizer_that_reads_several_tensors_is_refused_where_ranks_have_different_ones() -> None:
    with pytest.raises(LaunchError, match="Clipping looks at several tensors together"):
        made("layer_separation(n_c=1, n_f=1)", lambda params: Clipping(params, lr=0.1))
    made("data_parallel", lambda params: Clipping(params, lr=0.1))


DENSE_KINDS = [kind for kind in ELEMENTWISE if kind is not torch.optim.SparseAdam]
OWN_KINDS = [*DENSE_KINDS, lambda groups, lr: Own(groups, lambda p, g, step: g.sign(), lr)]


@pytest.mark.slow
def test_the_elementwise_optimizers_of_torch_pass_with_groups_by_name() -> None:
    for kind, strategy in zip(OWN_KINDS, PARTS * len(OWN_KINDS), strict=False):

        def factory(params: Params, kind: Any = kind) -> torch.optim.Optimizer:
            named = list(params)
            decayed = [p for name, p in named if name.endswith("weight")]
            others = [p for name, p in named if not name.endswith("weight")]
            groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1, "lr": 0.02}, {"params": others}]
            optimizer: torch.optim.Optimizer = kind([group for group in groups if group["params"]], lr=0.01)
            return optimizer

        assert any(optimizer is not None for optimizer in made(strategy, factory)), kind


def test_a_factory_that_runs_on_the_real_parameters_only_passes_with_a_known_optimizer_and_one_rate() -> None:
    def picky(params: Params) -> torch.optim.Optimizer:
        assert all(p.dtype == torch.float32 for _, p in params), "not mine"
        return torch.optim.SGD(params, lr=0.1)

    made("modulo_shard(mp=2)", picky)
    with pytest.raises(LaunchError, match="Own cannot be tried on small tensors, AssertionError: not mine"):
        made("modulo_shard(mp=2)", lambda params: picky(params := list(params)) and Own(params, lambda p, g, step: g))


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["data_parallel", "modulo_shard(mp=2)"])
def test_an_optimizer_of_other_parameters_than_the_given_ones_is_refused(strategy: str) -> None:
    model = nn.Linear(6, 5)
    message = "SGD updates 2 parameters that its factory was not given, the first of shape (5, 6)"
    with pytest.raises(LaunchError, match=re.escape(message)):
        made(strategy, lambda params: torch.optim.SGD(model.parameters(), lr=0.1))


def test_parameters_that_the_optimizer_leaves_out_are_named_once() -> None:
    with pytest.warns(UserWarning, match=re.escape("leaves out 0.weight, 0.bias, 2.bias")):
        made("data_parallel", lambda params: torch.optim.SGD([p for n, p in params if n == "2.weight"], lr=0.1))


def test_a_factory_that_fails_on_one_rank_fails_on_all_and_another_worker_can_be_made() -> None:
    compiled_program = program("layer_separation(n_c=1, n_f=1)")

    def run(transport: Transport) -> tuple[str, bool]:
        def picky(params: Params) -> torch.optim.Optimizer:
            if transport.rank == 0:
                raise KeyError("2.weight")
            return torch.optim.SGD(dict(params).values(), lr=0.1)

        with pytest.raises(LaunchError) as caught:
            worker_of(compiled_program, transport, picky)
        return str(caught.value), worker_of(compiled_program, transport).optimizer is not None

    first, second = on_ranks(2, run)
    why = "the optimizer's factory fails, KeyError: '2.weight'; it is called with all parameters of the model"
    assert first[0].startswith(why) and second[0].startswith(f"rank 0 could not make its optimizer: LaunchError: {why}")
    assert first[1] and second[1]
