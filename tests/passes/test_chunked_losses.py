"""Losses over chunks of the batch: one loss over classes, computed chunk by chunk, and divided by classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from splitc.compiled import CompiledProgram
from splitc.ir import comm_ops
from splitc.ir.placements import Placement
from splitc.ir.regions import regions
from splitc.ir.transitions import shard
from splitc.ir.wire import wire
from splitc.passes.planner.dividing import divisible_kinds
from splitc.runtime.transport.base import Transport
from tests.passes.test_heads import Largest, holds
from tests.support.compiled import analysed, compiled
from tests.support.ranks import on_ranks, worker_of

CLASSES, MANY, WIDTH, LENGTH = 13, 50_000, 6, 3
Loss = Callable[[Any, Tensor, Tensor], Any]


class Language(nn.Module):
    """A language model whose loss is over chunks.  run: of the model, its hidden states (B, T, D) and the target."""

    def __init__(self, run: Loss, classes: int = CLASSES, tied: bool = False) -> None:
        super().__init__()
        self.wte, self.fc = nn.Embedding(classes, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, classes, bias=not tied)
        self.norm = nn.LayerNorm(WIDTH)
        self.run = run
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return self.run(self, torch.tanh(self.fc(self.wte(ids))), y)


def rows(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return h.reshape(-1, WIDTH), y.reshape(-1)


def chunks(net: Any, h: Tensor, y: Tensor) -> Any:
    total = torch.zeros(())
    h, y = rows(h, y)
    for x, t in zip(h.chunk(4), y.chunk(4), strict=True):
        total = total + F.cross_entropy(x @ net.lm_head.weight.t(), t, reduction="sum")
    return total / y.numel()


def splits(net: Any, h: Tensor, y: Tensor) -> Any:
    h, y = rows(h, y)
    losses = [
        F.cross_entropy(net.lm_head(x).float(), t, reduction="sum")
        for x, t in zip(h.split(5), y.split(5), strict=False)
    ]
    return torch.stack(losses).sum() / y.size(0)


def ignoring(net: Any, h: Tensor, y: Tensor) -> Any:
    h, y = rows(h, y)
    y = y.where(y > 2, -100)
    total, count = h.new_zeros(()), h.new_zeros(())
    for x, t in zip(torch.chunk(h, 3), torch.chunk(y, 3), strict=True):
        total += F.cross_entropy(F.linear(x, net.lm_head.weight, net.lm_head.bias), t, reduction="sum")
        count += (t != -100).sum()
    return total / count


def checkpointed(net: Any, h: Tensor, y: Tensor) -> Any:
    def loss(x: Tensor, t: Tensor) -> Any:
        return F.cross_entropy(net.lm_head(net.norm(x)), t, reduction="sum", label_smoothing=0.1, ignore_index=1)

    h, y = rows(h, y)
    return (
        sum(checkpoint(loss, x, t, use_reentrant=False) for x, t in zip(h.split(4), y.split(4), strict=False))
        / y.numel()
    )


def masked(net: Any, h: Tensor, y: Tensor) -> Any:
    total: Any = 0.0
    mask = (y > 2).to(h.dtype)
    for x, t, m in zip(h.split(2), y.split(2), mask.split(2), strict=True):
        logits = net.lm_head(x)
        each = F.cross_entropy(logits.view(-1, logits.size(-1)), t.flatten(), reduction="none")
        total = total + (each * m.flatten()).sum()
    return total / mask.sum()


LOSSES: dict[str, Loss] = {
    "chunks": chunks,
    "splits": splits,
    "ignoring": ignoring,
    "checkpointed": checkpointed,
    "masked": masked,
}


def text(rows: int = 8, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    ids = torch.randint(classes, (rows, LENGTH))
    return ids, ids.roll(1, 1)


def joined(
    model: nn.Module, batch: tuple[Tensor, ...], world: int, tied: bool = False, **options: Any
) -> CompiledProgram:
    """A program whose head and table are divided over all ranks, with one loss over chunks."""
    torch.manual_seed(0)
    pins = {"*": Placement(group=world), "lm_head": Placement(None, "sharded", group=world, split="columns")}
    pins["wte"] = Placement(None, "sharded", group=world, split="rows")
    program = compiled(model.double(), batch, None, None, world, "mixed", pins=pins, **options)
    assert losses_of(program) == ["features"]
    return program


def losses_of(program: CompiledProgram) -> list[str]:
    graph = program.program.graph
    found = graph.find_nodes(op="call_function", target=comm_ops.linear_cross_entropy)
    return ["features" if "features" in node.kwargs else "whole" for node in found]


@pytest.mark.slow
def test_a_loss_over_chunks_is_divided_by_classes_and_trains_as_one_process_does() -> None:
    holds(joined(Language(chunks), text(), 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_every_way_to_write_chunks_is_exact(name: str) -> None:
    holds(joined(Language(LOSSES[name]), text(), 3))


@pytest.mark.slow
def test_ranks_with_all_classes_compute_chunks_of_their_own_examples() -> None:
    program = compiled(Language(checkpointed).double(), text(), None, None, 2, "data_parallel")
    assert losses_of(program) == ["whole"] and not any(regions(program.program))
    holds(program)


@pytest.mark.slow
def test_a_tied_table_is_divided_once() -> None:
    holds(joined(Language(splits, tied=True), text(), 3))


@pytest.mark.slow
def test_ranks_exchange_the_sums_of_all_rows_at_once() -> None:
    program = joined(Language(splits), text(6), 3).program
    (node,) = program.graph.find_nodes(op="call_function", target=comm_ops.linear_cross_entropy)
    found = [op.shape for op in wire(program, 0) if op.payload.name == node.name]
    assert found == [(1, 6 * LENGTH), (2, 6 * LENGTH)] * 3, "in each of three microbatches, and nothing in backward"


@pytest.mark.slow
def test_loops_over_parts_of_sequences_are_divided_as_other_layers_are() -> None:
    def steps(net: Any, h: Tensor, y: Tensor) -> Any:
        parts = zip(h.chunk(LENGTH, dim=1), y.chunk(LENGTH, dim=1), strict=True)
        return sum(F.cross_entropy(net.lm_head(x).flatten(0, 1), t.flatten(), reduction="sum") for x, t in parts) / 24

    pins = {"*": Placement(group=3), "lm_head": Placement(None, "sharded", group=3, split="columns")}
    model = Language(steps).double()
    program = compiled(model, text(), None, None, 3, "mixed", pins=pins)
    assert divisible_kinds(analysed(model, text()), frozenset({"lm_head"}))["lm_head"].features
    functions = [node.target for node in program.program.graph.nodes]
    assert functions.count(comm_ops.cross_entropy) == LENGTH and shard not in functions
    holds(program)


@pytest.mark.slow
def test_autocast_and_other_dtypes_of_logits_are_those_of_the_loop() -> None:
    program = compiled(Language(splits), text(), None, None, 2, "data_parallel", autocast=torch.bfloat16)
    (node,) = program.program.graph.find_nodes(op="call_function", target=comm_ops.linear_cross_entropy)
    assert node.kwargs["dtype"] is torch.float32
    assert program.verify(steps=2).holds


# -- what is no loss over chunks ---------------------------------------------------------------------------------------


def of_means(net: Any, h: Tensor, y: Tensor) -> Any:
    h, y = rows(h, y)
    return sum(F.cross_entropy(net.lm_head(x), t) for x, t in zip(h.split(5), y.split(5), strict=False)) / 4


def of_chunk_means(net: Any, h: Tensor, y: Tensor) -> Any:
    h, y = h[:, 0], y[:, 0]
    return sum(F.cross_entropy(net.lm_head(x), t) / 4 for x, t in zip(h.chunk(4), y.chunk(4), strict=True))


def weighted_by_turn(net: Any, h: Tensor, y: Tensor) -> Any:
    h, y = rows(h, y)
    each = [F.cross_entropy(net.lm_head(x), t, reduction="sum") for x, t in zip(h.split(5), y.split(5), strict=False)]
    return sum(loss * (k + 1) for k, loss in enumerate(each)) / y.numel()


def halves(net: Any, h: Tensor, y: Tensor) -> Any:
    first, second = net.lm_head(h).chunk(2)
    return (first - second).square().mean()


def with_logits(net: Any, h: Tensor, y: Tensor) -> Any:
    total: Any = 0.0
    h, y = rows(h, y)
    for x, t in zip(h.split(5), y.split(5), strict=False):
        logits = net.lm_head(x)
        total = total + F.cross_entropy(logits, t, reduction="sum") + 0.1 * logits.logsumexp(-1).square().sum()
    return total / y.numel()


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def own_function(net: Any, h: Tensor, y: Tensor) -> Any:
    total: Any = 0.0
    h, y = rows(h, y)
    for x, t in zip(h.split(5), y.split(5), strict=True):
        x = Own.apply(x)  # type: ignore[no-untyped-call]
        total = total + F.cross_entropy(net.lm_head(x), t, reduction="sum")
    return total / y.numel()


ROWS: dict[Loss, int] = {of_chunk_means: 30, with_logits: 32}  # of which one more make as many chunks


@pytest.mark.slow
@pytest.mark.parametrize("run", [of_means, of_chunk_means, weighted_by_turn, halves, with_logits, own_function])
def test_other_loops_over_chunks_run_on_the_whole_batch(run: Loss) -> None:
    program = compiled(Language(run).double(), text(ROWS.get(run, 8)), None, None, 2, "data_parallel")
    assert losses_of(program) == []
    holds(program)


# -- 50,000 classes ----------------------------------------------------------------------------------------------------


class Transformer(Language):
    """A language model with attention between its table and its head."""

    def __init__(self, run: Loss, classes: int) -> None:
        super().__init__(run, classes)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
        return self.run(self, self.block(self.wte(ids), src_mask=mask, is_causal=True), y)


@pytest.mark.slow
def test_no_rank_makes_a_tensor_of_more_than_its_part_of_a_chunk() -> None:
    """Each of four ranks has 12,500 of 50,000 classes, of 6 of 24 rows at once."""
    model, batch = Transformer(chunks, MANY), text(8, MANY)
    program = joined(model, tuple(each[:2] for each in batch), 4)

    def rank(transport: Transport) -> tuple[list[float], dict[str, Tensor] | None, int]:
        worker, rows = (
            worker_of(program, transport, torch.optim.Adam),
            slice(2 * transport.rank, 2 * transport.rank + 2),
        )
        with Largest() as largest:
            losses = [float(worker.step(*(each[rows] for each in batch)).detach()) for _ in range(3)]
        return losses, worker.state_dict(), largest.numbers

    (losses, state, _), *_ = found = on_ranks(4, rank)
    own, expected = torch.optim.Adam(model.parameters()), []
    for _ in range(3):
        own.zero_grad()
        loss = model(*batch)
        loss.backward()
        own.step()
        expected.append(float(loss.detach()))
    assert state is not None and losses == pytest.approx(expected, rel=1e-8)
    torch.testing.assert_close(state, {**model.state_dict()}, rtol=1e-8, atol=1e-8)
    assert max(largest for *_, largest in found) <= 6 * MANY // 4, found


@pytest.mark.slow
def test_a_plan_divides_the_classes_where_that_gains_and_the_report_says_so() -> None:
    program = compiled(Language(chunks, MANY), text(2, MANY), None, None, 4)
    assert losses_of(program) == ["features"]
    assert "is one loss of all chunks, whose logits are computed chunk by chunk" in " ".join(program.report().split())
    assert "comm.linear_cross_entropy(" in "".join(program.files.values())
