"""Channels last in the user's model: parameters, their gradients and what is saved of them lie so, with one result."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from splitc.runtime.memory_format import dense, flat, shaped
from splitc.runtime.transport.base import Transport
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.every_strategy import images
from tests.support.ranks import assert_same, on_ranks, train, worker_of
from tests.support.sampling import along

LAST = torch.channels_last
STRATEGIES = {
    "data_parallel(all_reduce=recursive_doubling)": 2,
    "layer_separation(n_c=2, n_f=1)": 3,
    "parameter_server(servers=1)": 3,
    "data_parallel(sync_batchnorm=True)": 2,
    "hybrid_single": 3,
    "late_multiply": 3,
    "modulo_shard(mp=2, scheme=B/K)": 4,
    "parameter_server(servers=2, beside=True)": 2,
    "local_sgd(period=2)": 2,
}


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3)
        self.scores = nn.Linear(64, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.norm(self.first(images)))))
        scores: Tensor = self.scores(x.flatten(1))
        return scores


@cache
def program(strategy: str) -> tuple[nn.Module, CompiledProgram]:
    torch.manual_seed(0)
    model = Convolutions().to(memory_format=LAST)  # type: ignore[call-overload]
    x, y = images(4)
    return model, compiled(model, (x,), y, F.cross_entropy, STRATEGIES[strategy], strategy)


def laid(program: CompiledProgram, transport: Transport, form: torch.memory_format) -> Worker:
    """A worker of the program, whose weights lie as `form` says."""
    weights = {
        kind: {name: at(tensor, form) for name, tensor in tensors.items()}
        for kind, tensors in program.weights().items()
    }
    given = copy.copy(program)
    given.weights = lambda: weights  # type: ignore[method-assign]
    return worker_of(given, transport)


def at(tensor: Tensor, form: torch.memory_format) -> Tensor:
    return tensor.contiguous(memory_format=form) if tensor.dim() == 4 else tensor


def lie_so(tensors: Any) -> int:
    """How many of the tensors are weights of convolutions, which all are channels last."""
    found = [t for t in tensors if isinstance(t, Tensor) and t.dim() == 4 and t.size(1) > 1]
    assert all(t.is_contiguous(memory_format=LAST) and not t.is_contiguous() for t in found)
    return len(found)


@along(1, strategy=STRATEGIES)
def test_parameters_gradients_and_what_is_saved_lie_as_the_model_does(strategy: str, tmp_path: Path) -> None:
    _, built = program(strategy)
    batches = [images(built.plan.global_batch) for _ in range(4)]

    def run(transport: Transport) -> tuple[int, dict[str, Tensor] | None]:
        worker = worker_of(built, transport)
        train(worker, batches[:2])
        counts = [lie_so(worker.stage.parameters()), lie_so(dict(worker.gradients()).values())]
        state = worker.optimizer.state.values() if worker.optimizer else ()
        counts.append(lie_so(value for each in state for value in each.values()))
        worker.save(tmp_path / "saved")
        worker.export(tmp_path / "exported.pt")
        again = worker_of(built, transport)
        again.resume(tmp_path / "saved")
        state = again.optimizer.state.values() if again.optimizer else ()
        assert lie_so(again.stage.parameters()) == counts[0]
        assert lie_so(value for each in state for value in each.values()) == counts[2]
        whole = train(again, batches[2:])[1]
        assert transport.rank or lie_so((whole or {}).values()) == 1
        assert counts[1] == counts[2] and ("server" in strategy or counts[0] == counts[1])
        return counts[0], whole

    found = on_ranks(built.plan.world, run)
    assert sum(count for count, _ in found)
    assert lie_so(torch.load(tmp_path / "exported.pt").values()) == 1
    contiguous = on_ranks(
        built.plan.world, lambda transport: train(laid(built, transport, torch.contiguous_format), batches)
    )
    assert_same(found[0][1], contiguous[0][1] or {})


def test_ranks_whose_weights_lie_otherwise_are_refused() -> None:
    _, built = program("data_parallel(sync_batchnorm=True)")

    def run(transport: Transport) -> None:
        with pytest.raises(LaunchError, match=r"agree on the memory format of second.weight: rank 0 has 'ch"):
            laid(built, transport, torch.contiguous_format if transport.rank else LAST)

    on_ranks(2, run)


def test_numbers_travel_as_they_lie_in_memory() -> None:
    base = torch.arange(120.0)
    for like in (
        base.view(2, 3, 4, 5),
        base.view(2, 4, 5, 3).permute(0, 3, 1, 2),
        base.view(2, 1, 3, 4, 5).to(memory_format=torch.channels_last_3d),
        base.view(10, 12).t(),
        base[:6].view(6, 1, 1, 1),
        base[3],
        base[:0].view(0, 3),
    ):
        numbers = flat(like, like)
        assert numbers.dim() == 1 and numbers.data_ptr() == like.data_ptr(), "no copy"
        assert torch.equal(shaped(numbers, like), like)
        other = torch.randn(like.shape)
        assert torch.equal(shaped(flat(other, like), like), other)
    part = torch.randn(4, 6, 5, 5).to(memory_format=LAST)[:, 2:4]
    assert dense(part.clone()).is_contiguous(memory_format=LAST)
    assert dense(base.view(10, 12).t()).is_contiguous()
