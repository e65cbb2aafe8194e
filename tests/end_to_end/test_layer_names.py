"""A model whose layers are named as parts of the compiler's own vocabulary is compiled like any other."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.ir.program import Program
from splitc.ir.wire import wire
from splitc.runtime.launch.trial import run_trial
from splitc.runtime.transport.simulated import run_ranks
from tests.support.compiled import analyse, compiled
from tests.support.sampling import sampled

WORLD = 4
PLAIN = ("conv", "first", "second", "third", "fourth", "fifth", "sixth", "last")
TELLING = ("modulo", "bucket_proj", "tied0", "bucket.0", "cut0", "pull", "send_target", "loss")
STRATEGIES = (
    "data_parallel",
    "late_multiply",
    "hybrid_single",
    "layer_separation",
    "parameter_server",
    "parameter_server(beside=True)",
    "modulo_shard(mp=2, scheme=B/K)",
    "modulo_shard(mp=4, scheme=BK)",
)


class Net(nn.Module):
    """A convolution and seven linear layers with these names; a dot in a name makes a module inside a module."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        torch.manual_seed(3)
        sizes = (36, 24, 20, 16, 28, 12, 8, 5)
        layers = [nn.Conv2d(1, 4, 3), *(nn.Linear(*pair) for pair in pairwise(sizes))]
        for path, layer in zip(names, layers, strict=True):
            parent: nn.Module = self
            *folders, name = path.split(".")
            for folder in folders:
                inner = nn.Module()
                parent.add_module(folder, inner)
                parent = inner
            parent.add_module(name, layer)

    def forward(self, images: Tensor) -> Tensor:
        conv, *linears = (self.get_submodule(name) for name in self.names)
        x: Tensor = F.max_pool2d(F.relu(conv(images)), 2).flatten(1)
        for linear in linears[:-1]:
            x = F.relu(linear(x))
        scores: Tensor = linears[-1](x)
        return scores


def batch(examples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn((examples, 1, 8, 8), generator=generator), torch.randint(0, 5, (examples,), generator=generator)


@cache
def analysed(names: tuple[str, ...]) -> Program:
    images, target = batch(4)
    return analyse(Net(names), (images,), target, F.cross_entropy)


@cache
def planned(names: tuple[str, ...], strategy: str) -> CompiledProgram:
    images, target = batch(4)
    return compiled(Net(names), (images,), target, F.cross_entropy, WORLD, strategy, analysed=analysed(names))


@pytest.mark.slow
@sampled("strategy", [*STRATEGIES[::-1], "auto"], one_in=9)
def test_names_of_layers_change_no_price_no_message_and_no_loss(strategy: str) -> None:
    plain, telling = (planned(names, strategy).plan for names in (PLAIN, TELLING))
    assert [p.role for p in plain.placements.values()] == [p.role for p in telling.placements.values()]
    for a, b in zip(plain.prediction.priced, telling.prediction.priced, strict=True):
        assert (a.strategy, a.step_seconds, a.feasible) == (b.strategy, b.step_seconds, b.feasible)
    assert plain.prediction.phases == telling.prediction.phases
    assert [messages(PLAIN, strategy, rank) for rank in range(WORLD)] == [
        messages(TELLING, strategy, rank) for rank in range(WORLD)
    ]
    assert losses(PLAIN, strategy) == losses(TELLING, strategy)


def messages(names: tuple[str, ...], strategy: str, rank: int) -> list[tuple[object, ...]]:
    ops = wire(planned(names, strategy).program, rank)
    return [(op.kind, op.payload.what, op.ranks, op.shape, op.dtype, op.sent) for op in ops]


def losses(names: tuple[str, ...], strategy: str) -> list[list[float]]:
    program = planned(names, strategy)
    sizes = program.plan.local_batches
    images, target = batch(sum(sizes))
    feeds = [list(zip(images.split(sizes), target.split(sizes), strict=True)) for _ in range(3)]
    weights = program.weights()
    trials = run_ranks(WORLD, lambda t: run_trial(program.files, t, weights, feeds, sizes, 0.01, 0.9))
    return [trial.losses for trial in trials]


@pytest.mark.slow
def test_a_model_with_such_names_trains_like_one_process() -> None:
    assert planned(TELLING, "modulo_shard(mp=2, scheme=B/K)").verify().holds
