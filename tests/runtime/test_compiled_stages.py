"""Stages under torch.compile train as those without it, sum buckets during backward, and give way where they do not."""

from __future__ import annotations

import inspect
import itertools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from splitc.compiled import CompiledProgram
from splitc.runtime import compiled_stages
from splitc.runtime.compiled_parts import compiled_methods
from splitc.runtime.compiled_stages import TRIED, WARM_UP, CompiledStages
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.every_strategy import planned
from tests.support.ranks import assert_same, batch_of, on_workers, part_of, plain, train

of_torch = pytest.mark.filterwarnings("ignore")
"""Warnings of torch's own code: its compiler hides some for a moment, which other threads undo."""

# -- cutting -----------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """As codegen writes one, and as a person may edit it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.ModuleDict({"0": nn.Linear(3, 3), "1": nn.Linear(3, 3)})

    def forward(self, comm: Any, x: Tensor) -> Any:
        """Ten lines."""
        h1 = F.relu(self.a(x))
        a = h1 + h1 * 2
        h2 = comm.double(F.relu(a))
        h3 = F.relu(comm.dropout(self.b["0"](h2), 0.5))
        h4 = F.relu(self.b["1"](h3)) + a
        if h4.dim() > 1:
            h4 = h4.exp()
        alone = h4.sin()
        return alone, comm.double(h3)

    def loss(self, comm: Any, y: Tensor, weight: Any) -> Tensor:
        total = y.square().sum()
        return total / weight.wait()


class Comm:
    """Doubles what it is given, in place of communicating, and drops the first half."""

    @staticmethod
    def double(value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def dropout(value: Tensor, p: float) -> Tensor:
        return value * torch.tensor([0.0, 1.0, 1.0])

    @classmethod
    def masks(cls) -> type[Comm]:
        return cls


def cut(stage: nn.Module, **buckets: int) -> tuple[dict[str, Callable[..., Any]], list[str]]:
    """The methods of a stage, and a log of the parts that they call."""
    log: list[str] = []

    def noted(part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            log.append(part.__name__)
            return part(*arguments)

        return run

    return compiled_methods(stage, {f"self.{name}": k for name, k in buckets.items()}, noted), log


def test_a_method_is_cut_at_communication_and_buckets_and_computes_the_same() -> None:
    stage, x = Stage(), torch.randn(2, 3)
    for buckets, parts in (({}, ["_forward_0", "_forward_1"]), ({"b.1": 0, "b.0": 1}, ["_forward_0", *BY_BUCKET])):
        methods, log = cut(stage, **buckets)
        for got, expected in zip(methods["forward"](Comm, x), stage(Comm, x), strict=True):
            assert torch.equal(got, expected)
        assert log == parts
        assert "__init__" not in methods


BY_BUCKET = ["_forward_1", "_forward_2"]


def test_a_part_takes_and_returns_what_others_read_and_keeps_file_and_lines() -> None:
    found: dict[str, Any] = {}
    compiled_methods(Stage(), {}, lambda part: found.setdefault(part.__name__, part))
    assert [*inspect.signature(found["_forward_0"]).parameters] == ["self", "x"]
    assert [*inspect.signature(found["_forward_1"]).parameters] == ["self", "a", "comm", "h2"]
    assert found["_forward_0"].__code__.co_filename == __file__
    text, first = inspect.getsourcelines(Stage.forward)
    assert found["_forward_1"].__code__.co_firstlineno == first + next(k for k, t in enumerate(text) if "h3 =" in t)
    with pytest.raises(TypeError) as raised:
        found["_forward_0"](Stage(), "no tensor")
    assert "h1 = F.relu(self.a(x))" in str(raised.traceback[1].statement)


# -- training ----------------------------------------------------------------------------------------------------------


class Deep(nn.Sequential):
    """Layers that fill a bucket each."""

    def __init__(self) -> None:
        super().__init__(*(each for _ in range(2) for each in (nn.Linear(200, 200), nn.GELU())))


def deep() -> CompiledProgram:
    torch.manual_seed(0)
    return compiled(Deep(), (torch.randn(2, 200),), torch.randn(2, 200), F.mse_loss, 2, "data_parallel")


LOG = threading.local()


def noting_backward(module: Any, inputs: Any) -> Any:
    """A backend that notes when the backward of a part runs."""

    def backward(module: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            LOG.events.append("backward")
            return module(*arguments)

        return make_boxed_func(run)

    compiler: Any = aot_autograd(fw_compiler=lambda module, inputs: make_boxed_func(module), bw_compiler=backward)
    return compiler(module, inputs)


@pytest.mark.slow
@of_torch
def test_buckets_start_while_backward_still_runs_and_names_stay() -> None:
    torch._dynamo.register_backend(noting_backward, name="noting_backward")
    program = deep()
    batches = [(torch.randn(4, 200), torch.randn(4, 200)) for _ in range(2)]

    def run(worker: Worker) -> Any:
        LOG.events = []
        transport: Any = worker.rank.transport
        start = transport._all_reduce

        def issued(tensor: Tensor, *others: Any) -> Any:
            LOG.events += ["sum"] * (tensor.numel() > 1)
            return start(tensor, *others)

        transport._all_reduce = issued
        losses, state = train(worker, batches)
        mean = worker.evaluate(*part_of(worker, batches[0], (2, 2)))
        return [*losses, float(mean)], state, list(worker.stage.state_dict()), LOG.events

    plain_ones = on_workers(program, run)
    for got, expected in zip(on_workers(program, run, compile_stages="noting_backward"), plain_ones, strict=True):
        assert got[0] == pytest.approx(expected[0])
        assert got[2] == expected[2]
        assert got[3] == ["backward", "sum", "backward", "sum"] * 2
        assert expected[3] == ["sum", "sum"] * 2
        if expected[1] is not None:
            assert_same(got[1], expected[1])


@pytest.mark.parametrize(
    ("with_it", "without", "line"),
    [
        (1, 2, "splitc: stages run under torch.compile: 1 s a step, without it 2 s\n"),
        (2, 1, "splitc: stages run without torch.compile: 1 s a step, with it 2 s\n"),
    ],
)
def test_after_steps_of_both_kinds_all_ranks_go_on_as_is_faster(
    with_it: int, without: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", lambda part, backend: part)
    batch = batch_of(8)

    def run(worker: Worker) -> list[bool]:
        (stages,) = (each for each in worker._features if isinstance(each, CompiledStages))
        calls, kinds = itertools.count(), []
        monkeypatch.setattr(stages, "_now", lambda: next(calls) % 2 * (with_it if stages._is_on else without))
        for _ in range(WARM_UP + TRIED + 2):
            kinds.append(stages._is_on)
            worker.step(*part_of(worker, batch, (4, 4)))
        return kinds

    tried = [True, False, False, True] * (TRIED // 4)
    expected = [True] * WARM_UP + tried + [with_it < without] * 2
    assert on_workers(plain("data_parallel")[1], run, compile_stages=True) == [expected] * 2
    assert capsys.readouterr().err == line


def test_what_cannot_be_compiled_on_one_rank_runs_as_it_is_on_all_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = itertools.count()
    monkeypatch.setattr(torch, "compile", lambda part, backend: fails if next(made) == 1 else part)

    def fails(*arguments: Any) -> None:
        raise RuntimeError("no compiler\nis here")

    _, program = plain("data_parallel")
    batches = [batch_of(8) for _ in range(3)]
    results = on_workers(program, lambda worker: train(worker, batches), compile_stages=True)
    expected = on_workers(program, lambda worker: train(worker, batches))[0][1]
    assert expected is not None
    assert_same(results[0][1], expected, 0.0)
    assert next(made) == 2
    text = "splitc: stages run without torch.compile, which failed: RuntimeError: no compiler is here\n"
    assert capsys.readouterr().err == text


def test_a_rank_that_cannot_compile_a_later_batch_says_so_and_trains_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch of another size is compiled when it comes, after the ranks have decided together."""
    made = itertools.count()
    monkeypatch.setattr(compiled_stages, "WARM_UP", 1)
    monkeypatch.setattr(torch, "compile", lambda part, backend: later(part) if next(made) == 1 else part)

    def later(part: Any) -> Any:
        calls = itertools.count()

        def run(*arguments: Any) -> Any:
            if next(calls) == 2:
                raise RuntimeError("too many sizes")
            return part(*arguments)

        return run

    _, program = plain("data_parallel")
    batches = [batch_of(8) for _ in range(4)]
    results = on_workers(program, lambda worker: train(worker, batches), compile_stages="eager")
    expected = on_workers(program, lambda worker: train(worker, batches))[0][1]
    assert expected is not None
    assert_same(results[0][1], expected, 0.0)
    said = capsys.readouterr().err
    assert re.fullmatch(r"splitc: stages of rank \d run on without torch.compile: RuntimeError: too many sizes\n", said)


# -- with the compiler -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A perceptron of a transformer and its attention, with dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


@pytest.mark.slow
@of_torch
def test_a_transformer_with_dropout_is_compiled_once_and_trains_as_it_does_without() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    program = compiled(model, (torch.randn(4, 6, 32),), torch.randn(4, 6, 32), F.mse_loss, 2, "data_parallel")
    batches = [(torch.randn(8, 6, 32), torch.randn(8, 6, 32)) for _ in range(5)]

    def run(worker: Worker) -> Any:
        first = train(worker, batches[:1])
        with torch._dynamo.config.patch(error_on_recompile=True):
            return first, train(worker, batches[1:])

    for got, expected in zip(
        on_workers(program, run, compile_stages="inductor")[0], on_workers(program, run)[0], strict=True
    ):
        assert got[0] == pytest.approx(expected[0])
        assert_same(got[1], expected[1])


@pytest.mark.slow
@of_torch
@pytest.mark.parametrize(
    "strategy",
    [
        "data_parallel",
        "data_parallel(sync_batchnorm=True)",
        "late_multiply",
        "layer_separation(microbatches=2)",
        "modulo_shard",
        "local_sgd",
        "parameter_server",
    ],
)
def test_compiled_stages_hold_under_verify(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = planned(2, strategy, norm="microbatches" not in strategy)
    result = program.verify(compile_stages="aot_eager", steps=2, dtype=torch.float64)
    assert result.holds, result
    assert not capsys.readouterr().err  # nothing failed to compile
