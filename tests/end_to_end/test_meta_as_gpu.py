"""Steps run where the device is not the CPU: no tensor is left on the CPU, and no value is read on the host.

Fake tensors on meta stand for those of a GPU: an operation of tensors on two devices raises, as it does there, and so
does reading a value, for which a GPU would finish all that was issued.  A number on the CPU, of no dims, may meet any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
)

from splitc.codegen.role_file import role_file
from splitc.compiled import CompiledProgram
from splitc.cost_models.memory import rank_memory
from splitc.cost_models.memory.null_transport import NullTransport
from splitc.cost_models.memory.rank_memory import _batch, _module, _weights
from splitc.ir.interpreter import mode_of, quiet
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.every_strategy import Small, images
from tests.support.ranks import adam
from tests.support.sampling import sampled
from tests.support.subnet_networks import CLASSES, INPUTS, chain

META = torch.device("meta")


@contextmanager
def meta_as_gpu(program: CompiledProgram) -> Iterator[None]:
    """Let torch take meta for a device that it can compute on."""
    is_enabled, autocast = torch.is_autocast_enabled, torch.autocast
    with ExitStack() as stack:
        stack.enter_context(mode_of(program.program.root))
        stack.enter_context(quiet())
        stack.enter_context(patch("torch.is_autocast_enabled", lambda kind: kind != "meta" and is_enabled(kind)))
        stack.enter_context(
            patch("torch.autocast", lambda kind, *a, **k: nullcontext() if kind == "meta" else autocast(kind, *a, **k))
        )
        yield


def train(program: CompiledProgram, rank: int, steps: int = 2, **options: Any) -> None:
    """Let one rank without peers train on meta."""
    lowered = program.program
    with meta_as_gpu(program):
        transport = NullTransport(rank, lowered.plan, lambda tensors: None)
        transport.device = META
        worker = Worker(_module(lowered, rank), transport, _weights(lowered), {}, adam, elementwise=True, **options)
        for _ in range(steps):
            loss = worker.step(*_batch(lowered, rank))
            assert loss.device == META
        assert worker.grad_norm().device == META
        held = [*worker.stage.parameters(), *worker.stage.buffers(), *worker.gradients().values()]
        assert all(isinstance(tensor, FakeTensor) and tensor.device == META for tensor in held)


class Encoder(nn.Module):
    """Transformer layers with a causal mask and dropout, also inside the attention."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder, self.fc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), x.device, x.dtype)
        scores: Tensor = self.fc(self.encoder(x, mask=mask).mean(1))
        return scores


@cache
def models() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5))
    return {
        "conv": (Small(norm=True, drop=0.5), *images(4)),
        "transformer": (Encoder(), torch.randn(4, 6, 8), torch.randint(5, (4,))),
        "mlp": (mlp, torch.randn(4, 6), torch.randint(5, (4,))),
        "neurons": (chain(3, 4).model, torch.randn(4, INPUTS), torch.randint(CLASSES, (4,))),
    }


def made(model: str, strategy: str, world: int, **options: Any) -> CompiledProgram:
    return compiled(*models()[model], F.cross_entropy, world, strategy, **options)


USUAL: dict[str, Any] = {"clip_norm": 0.5, "ema": 0.9}
PLANS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("conv", "data_parallel(sync_batchnorm=True)", 3, USUAL),
    ("conv", "layer_separation(ranks=1+1+1, microbatches=2)", 3, USUAL),
    ("conv", "modulo_shard(mp=2, scheme=B/K)", 4, USUAL | {"accumulate": 2}),
    ("mlp", "late_multiply", 3, USUAL),
    ("conv", "data_parallel", 2, {}),
    ("conv", "data_parallel(all_reduce=recursive_doubling)", 3, USUAL),
    ("conv", "late_multiply(sync_batchnorm=True)", 3, USUAL),
    ("conv", "modulo_shard(mp=2, scheme=BK, sync_batchnorm=True)", 4, USUAL),
    ("conv", "hybrid_single", 3, USUAL),
    ("conv", "parameter_server", 3, {}),
    ("conv", "parameter_server(servers=2, beside=True)", 3, {"clip_norm": 0.5}),
    ("conv", "local_sgd(period=2, fragments=2, delay=1, outer_lr=0.7)", 3, {"clip_norm": 0.5}),
    ("neurons", "independent_subnets(local_steps=1)", 2, {}),
    ("transformer", "data_parallel", 2, USUAL),
    ("transformer", "late_multiply", 2, USUAL | {"accumulate": 2}),
    ("transformer", "modulo_shard(mp=2, scheme=BK)", 2, USUAL),
    ("transformer", "hybrid_single", 2, USUAL),
]


@sampled(("model", "strategy", "world", "options"), PLANS, PLANS[1:3], ids=str)
def test_a_step_leaves_no_tensor_on_the_cpu_and_reads_no_value(
    model: str, strategy: str, world: int, options: dict[str, Any]
) -> None:
    program = made(model, strategy, world)
    for part in program.program.rank_programs:
        train(program, part.ranks[0], **options)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, torch.float16])
def test_whether_gradients_are_finite_is_read_once_and_in_one_place(autocast: torch.dtype | None) -> None:
    """Where the user asks for that, and in float16, whose scale follows from it."""
    program = made("mlp", "data_parallel", 2, autocast=autocast)
    readers: list[str] = []

    def tolist(tensor: Tensor) -> list[bool]:
        assert isinstance(tensor, FakeTensor)
        readers.append(sys._getframe(1).f_code.co_qualname)
        return [False] * tensor.numel()

    with patch.object(FakeTensor, "tolist", tolist):
        train(program, 0, check_finite=autocast is None, **USUAL)
    assert readers == ["Updates.finish"] * 2


BROKEN: list[tuple[str, str, type[Exception]]] = [
    (r"(F\.relu\(self\.fc7\((\w+)\)\))", r"\1 + \2.new_ones(13, device='cpu')", FakeTensorDeviceMismatchError),
    (r"return total\.wait\(\)", "return total.wait() * loss.item()", DataDependentOutputException),
    (r"loss\.backward\(\)", "loss.backward() if loss > 0 else None", DataDependentOutputException),
]


@pytest.mark.parametrize(("old", "new", "error"), BROKEN)
def test_what_a_gpu_would_refuse_or_wait_for_raises(old: str, new: str, error: type[Exception]) -> None:
    program = made("conv", "data_parallel(sync_batchnorm=True)", 3)
    lowered = program.program
    text, number = re.subn(old, new, role_file(lowered, lowered.rank_program(0)))
    assert number
    with patch.object(rank_memory, "role_file", lambda *_: text), pytest.raises(error):
        train(program, 0, steps=1)
