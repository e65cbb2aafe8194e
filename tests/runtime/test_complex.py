"""Complex parameters train as in one process: sums, averages, clipping and what travels keep the imaginary part."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.ir.program import Program
from splitc.runtime.transport.base import Transport
from splitc.runtime.updates import clip, norm
from tests.support.compiled import analyse, compiled
from tests.support.ranks import assert_same, on_ranks, on_workers, one_process, sgd, train
from tests.support.sampling import along


class Waves(nn.Module):
    """Complex linear layers, a complex vector and a complex buffer, and a real layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.cdouble)
        self.second = nn.Linear(8, 8, dtype=torch.cdouble)
        self.gain = nn.Parameter(torch.randn(8, dtype=torch.cdouble))
        self.register_buffer("phase", torch.randn(8, dtype=torch.cdouble))
        self.last = nn.Linear(16, 3, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        z = self.second(torch.tanh(self.first(x.to(torch.cdouble)))) * self.gain.conj() * self.phase
        scores: Tensor = self.last(torch.cat([(z * z.conj() + z).real, z.imag], 1))
        return scores


def batch(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 6, dtype=torch.double), torch.randint(3, (examples,))


@cache
def known() -> tuple[Waves, Program]:
    torch.manual_seed(2)
    model = Waves()
    return model, analyse(model, *batch(4), F.cross_entropy)


PLANS = [
    ("modulo_shard(mp=2)", 2),
    ("parameter_server(servers=2,beside=True)", 2),
    ("late_multiply", 2),
    ("data_parallel(all_reduce=recursive_doubling)", 3),
    ("layer_separation(n_c=1, n_f=1)", 2),
]


@pytest.mark.slow
@along(2, plan=PLANS, options=[{"clip_norm": 0.05}, {"accumulate": 2}])
def test_complex_parameters_train_as_in_one_process(plan: tuple[str, int], options: dict[str, Any]) -> None:
    (strategy, world), (model, program) = plan, known()
    on_cluster = compiled(model, *batch(4), F.cross_entropy, world, strategy, analysed=program)
    batches = [batch(on_cluster.plan.global_batch) for _ in range(4)]
    results = on_workers(on_cluster, lambda worker: train(worker, batches), **options)
    _, expected = one_process(copy.deepcopy(model), batches, sgd, **options)
    assert_same(results[0][1], expected, 1e-9)


def test_the_norm_counts_the_imaginary_part() -> None:
    def run(transport: Transport) -> Tensor:
        gradient = torch.tensor([3 + 4j, 0])
        clip([gradient], norm(transport, [gradient] if transport.rank == 0 else [], (0, 1)), 1.0)
        return gradient

    for gradient in on_ranks(2, run):
        torch.testing.assert_close(gradient, torch.tensor([0.6 + 0.8j, 0]))
