"""What single ops compute, move and launch: by hand, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from splitc.cost_models.compute.counting import OpCounter, merged, merged_pairs, sum_of
from splitc.ir.costs import OpCost

N, IN, OUT = 5, 3, 7
FLOAT, LONG = 4, 8


def counted(run: Callable[[], Any], backward: bool = True) -> list[OpCost]:
    """The ops of `run`, and of the backward of the tensor that it returns."""
    seen: list[OpCost] = []
    with OpCounter(seen.append):
        out = run()
    if backward and isinstance(out, Tensor) and out.requires_grad:
        gradient = torch.ones_like(out)
        with OpCounter(seen.append, backward=True):
            out.backward(gradient)
    return seen


def ops(run: Callable[[], Any], backward: bool = True) -> dict[tuple[str, bool], OpCost]:
    """Name and direction -> all ops of that name as one."""
    together: dict[tuple[str, bool], list[OpCost]] = {}
    for each in counted(run, backward):
        together.setdefault((each.name, each.backward), []).append(each)
    return {key: sum_of(each) for key, each in together.items()}


def of(module: nn.Module, *shape: int, first: bool = False) -> dict[tuple[str, bool], OpCost]:
    given = torch.randn(*shape).requires_grad_(not first)
    return ops(lambda: module(given))


# -- products ----------------------------------------------------------------------------------------------------------


def test_a_linear_layer_multiplies_once_forward_and_twice_backward() -> None:
    found = of(nn.Linear(IN, OUT), N, IN)
    forward, backward = found["addmm", False], found["mm", True]
    assert (forward.op_class, forward.flops, forward.kernel_launches) == ("matmul", 2 * N * IN * OUT, 1)
    assert forward.bytes_accessed == FLOAT * (N * IN + IN * OUT + OUT + N * OUT)
    assert (backward.flops, backward.kernel_launches) == (4 * N * IN * OUT, 2)
    assert of(nn.Linear(IN, OUT), N, IN, first=True)["mm", True].flops == 2 * N * IN * OUT, "of the weight alone"
    assert backward.bytes_accessed == 2 * FLOAT * (
        N * OUT + N * IN + IN * OUT
    )  # both read the gradient and one of x, W; both write one


def test_a_convolution_divides_its_work_by_its_groups() -> None:
    for groups in [1, 2, 4]:
        found = of(nn.Conv2d(4, 8, 3, padding=1, groups=groups), N, 4, 6, 6)
        forward = 2 * N * 6 * 6 * 8 * 9 * 4 / groups
        assert found["convolution", False].flops == forward
        assert found["convolution_backward", True].flops == 2 * forward
        assert {op.op_class for op in found.values()} == {"conv"}


def test_a_transposed_convolution_multiplies_every_input_by_the_kernel() -> None:
    found = of(nn.ConvTranspose2d(4, 8, 3, stride=2), N, 4, 6, 6)
    assert found["convolution", False].flops == 2 * N * 4 * 6 * 6 * 8 * 9
    assert found["convolution_backward", True].flops == 2 * found["convolution", False].flops


def test_a_convolution_moves_images_and_weights_and_nothing_else() -> None:
    found = of(nn.Conv2d(3, 8, 3, padding=1, bias=False), N, 3, 6, 6, first=True)
    x, w, y = FLOAT * N * 3 * 36, FLOAT * 8 * 27, FLOAT * N * 8 * 36
    assert found["convolution", False].bytes_accessed == x + w + y
    assert found["convolution_backward", True].bytes_accessed == y + x + w + w


def test_channels_are_computed_in_blocks_of_sixteen() -> None:
    for conv, forward, backward in [
        (nn.Conv2d(16, 32, 3), 1.0, 1.0),
        (nn.Conv2d(16, 8, 3), 2.0, 1.5),  # of the input's gradient all 16 channels are there, of the weight's 8 of 16
        (nn.Conv2d(8, 24, 3), 4 / 3, (2 + 4 / 3) / 2),
        (nn.ConvTranspose2d(8, 16, 3), 1.0, 1.5),
        (nn.Conv2d(8, 8, 3, groups=8), 1.0, 1.0),  # depthwise
    ]:
        x = torch.randn(2, conv.in_channels, 6, 6, requires_grad=True)
        found = {each.name: each for each in counted(partial(conv, x))}
        for name, times in (("convolution", forward), ("convolution_backward", backward)):
            assert found[name].padding_flops == pytest.approx((times - 1) * found[name].flops)


def test_an_lstm_meets_the_matrices_of_its_gates_in_every_step() -> None:
    time, hidden = 6, 8
    layer, x = nn.LSTM(IN, hidden), torch.randn(time, N, IN)
    found = ops(lambda: layer(x)[0])
    flops = {back: sum(op.flops for (_, b), op in found.items() if b == back) for back in (False, True)}
    assert flops[False] == 2 * time * N * 4 * hidden * (IN + hidden)
    assert flops[True] == 2 * flops[False]
    assert all(op.op_class == "matmul" for op in found.values() if op.flops)


def test_an_lstm_on_fake_tensors_computes_as_much() -> None:
    with FakeTensorMode():
        layer, x = nn.LSTM(IN, 8), torch.randn(6, N, IN)
        found = ops(lambda: layer(x)[0])
    assert sum(op.flops for op in found.values()) == 3 * 2 * 6 * N * 4 * 8 * (IN + 8)


def test_a_gru_is_counted_step_by_step() -> None:
    time, hidden = 4, 8
    layer, x = nn.GRU(IN, hidden), torch.randn(time, N, IN)
    found = ops(lambda: layer(x)[0], backward=False)
    assert sum(op.flops for op in found.values()) == 2 * time * N * 3 * hidden * (IN + hidden)


def attended(layer: nn.Module, x: Tensor, weights: bool) -> dict[tuple[str, bool], OpCost]:
    return ops(lambda: layer(x, x, x, need_weights=weights)[0])


def test_multihead_attention_counts_its_projections_and_its_inner_products() -> None:
    for weights in [False, True]:
        time, width, heads = 6, 8, 2
        layer = nn.MultiheadAttention(width, heads, batch_first=True)
        x = torch.randn(N, time, width, requires_grad=True)
        found = attended(layer, x, weights)
        projections, inner = 2 * N * time * width * 4 * width, 2 * 2 * N * time * time * width
        assert sum(op.flops for (_, back), op in found.items() if not back) == projections + inner
        recomputed = 0 if weights else inner / 2  # the fused kernel multiplies the scores anew
        assert sum(op.flops for (_, back), op in found.items() if back) == 2 * (projections + inner) + recomputed


def test_fused_attention_has_a_class_of_its_own() -> None:
    q = torch.randn(N, 2, 6, 4, requires_grad=True)
    found = ops(lambda: F.scaled_dot_product_attention(q, q, q))
    computing = [op for op in found.values() if op.flops]
    assert [op.op_class for op in computing] == ["attention", "attention"]
    assert sorted(op.flops for op in computing) == [2 * 2 * N * 2 * 36 * 4, 5 * 2 * N * 2 * 36 * 4]


def test_other_products_are_counted_too() -> None:
    for run, flops in [
        (lambda a, b, c: torch.baddbmm(c, a, b), 2 * 2 * 3 * 4 * 5),
        (lambda a, b, c: torch.addbmm(c[0], a, b), 2 * 2 * 3 * 4 * 5),
        (lambda a, b, c: a[0] @ b[0, :, 0], 2 * 3 * 4),
        (lambda a, b, c: torch.dot(a[0, 0], b[0, :, 0]), 2 * 4),
        (lambda a, b, c: torch.einsum("bij,bjk->bik", a, b), 2 * 2 * 3 * 4 * 5),
    ]:
        a, b, c = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 3, 5)
        assert sum(op.flops for op in ops(partial(run, a, b, c), backward=False).values()) == flops


# -- bytes -------------------------------------------------------------------------------------------------------------


def moved(run: Callable[[], Any]) -> float:
    return sum(op.bytes_accessed for op in ops(run, backward=False).values())


def test_views_and_empty_memory_are_free() -> None:
    x = torch.randn(4, 6)
    views = counted(lambda: x.t()[1:].reshape(5, 2, 2).unsqueeze(0).expand(3, 5, 2, 2).detach().flatten()[:2].view(2))
    assert [each.name for each in views] == ["clone"]  # a flattened expansion is no view
    assert counted(lambda: (torch.empty(9), torch.empty_like(x), x.new_empty(3), x.squeeze_())) == []


def test_a_tensor_counts_once_however_often_it_is_read() -> None:
    x = torch.randn(4, 6)
    assert moved(lambda: x * x) == 2 * x.nbytes
    assert moved(lambda: x[:2] + x[2:]) == 1.5 * x.nbytes
    assert moved(lambda: x + x[:1].expand(4, 6)) == 2 * x.nbytes


def test_what_works_in_place_reads_and_writes_and_what_only_writes_reads_nothing() -> None:
    x, y, row = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
    assert moved(lambda: x.add_(y)) == 3 * x.nbytes and moved(lambda: x.mul_(2.0)) == 2 * x.nbytes
    assert moved(lambda: x + row.expand(4, 6)) == 2 * x.nbytes + row.nbytes, "as small as what it repeats"
    for run in (x.zero_, lambda: x.fill_(1.0), x.bernoulli_, lambda: torch.zeros_like(x), lambda: x.new_ones(4, 6)):
        assert moved(run) == x.nbytes
    assert moved(lambda: x.copy_(y)) == 2 * x.nbytes


def test_an_embedding_reads_the_rows_it_looks_up_and_its_gradient_is_the_whole_table() -> None:
    table, rows = nn.Embedding(1000, 16), torch.tensor([1, 2, 3])
    found = ops(lambda: table(rows))
    looked_up = FLOAT * 3 * 16
    assert found["embedding", False].bytes_accessed == looked_up + LONG * 3 + looked_up
    assert found["embedding_dense_backward", True].bytes_accessed == 3 * looked_up + LONG * 3 + table.weight.nbytes


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("fake", [False, True])
def test_the_sparse_gradient_of_bags_has_a_row_for_each_look_up(mode: str, fake: bool) -> None:
    with FakeTensorMode() if fake else nullcontext():
        table, bags = nn.EmbeddingBag(1000, 16, mode=mode, sparse=True), torch.zeros(2, 5, dtype=torch.long)
        found = ops(lambda: table(bags))
    read = FLOAT * 2 * 16 + LONG * 10
    assert found["_embedding_bag_backward", True].bytes_accessed == read + 3 * FLOAT * 10 * 16
    assert not {"_indices", "_values"} & {name for name, _ in found}


def test_a_lookup_of_more_rows_than_there_are_reads_no_more_than_the_table() -> None:
    table, rows = torch.randn(4, 16), torch.zeros(100, dtype=torch.long)
    assert moved(lambda: table[rows]) == table.nbytes + rows.nbytes + FLOAT * 1600


def test_cross_entropy_reads_one_number_of_each_row_after_its_softmax() -> None:
    logits, target = torch.randn(N, 100, requires_grad=True), torch.zeros(N, dtype=torch.long)
    found = ops(lambda: F.cross_entropy(logits, target))
    assert found["_log_softmax", False].bytes_accessed == 2 * logits.nbytes
    assert found["nll_loss_forward", False].bytes_accessed == FLOAT * N + LONG * N + 2 * FLOAT
    assert found["_log_softmax_backward_data", True].bytes_accessed == 3 * logits.nbytes


def test_batch_norm_moves_its_images_forward_and_backward() -> None:
    x = torch.randn(N, 4, 6, 6)
    found = of(nn.BatchNorm2d(4), N, 4, 6, 6)
    forward, backward = found["native_batch_norm", False], found["native_batch_norm_backward", True]
    assert forward.op_class == backward.op_class == "batch_norm"
    assert forward.bytes_accessed == pytest.approx(2 * x.nbytes, abs=FLOAT * 4 * 10)
    assert backward.bytes_accessed == pytest.approx(3 * x.nbytes, abs=FLOAT * 4 * 10)
    assert found["add", False].bytes_accessed == 2 * LONG  # how many batches it has seen


def test_a_max_pool_writes_values_and_where_they_were() -> None:
    x, y = FLOAT * N * 4 * 36, FLOAT * N * 4 * 9
    found = of(nn.MaxPool2d(2), N, 4, 6, 6)
    assert found["max_pool2d_with_indices", False].bytes_accessed == x + y + 2 * y
    assert found["max_pool2d_with_indices_backward", True].bytes_accessed == y + 2 * y + x


def test_what_memory_alone_does_not_bound_has_a_class_of_its_own() -> None:
    for run, op_class in [
        (lambda x: F.relu(x), "memory"),
        (lambda x: F.layer_norm(x, x.shape[-1:]), "memory"),
        (lambda x: x.sum(0), "memory"),
        (lambda x: F.gelu(x), "math"),
        (lambda x: x.softmax(-1), "math"),
        (lambda x: torch.bernoulli(x.sigmoid()), "random"),
        (lambda x: F.max_pool2d(x, 2), "max_pool"),
        (lambda x: F.avg_pool2d(x, 2), "pool"),
        (lambda x: F.interpolate(x, scale_factor=2.0), "pool"),
        (lambda x: F.batch_norm(x, None, None, training=True), "batch_norm"),
    ]:
        seen = counted(partial(run, torch.rand(2, 4, 6, 6)))
        assert seen[-1].op_class == op_class
        assert not any(each.unknown for each in seen)


# -- ops that nobody knows ---------------------------------------------------------------------------------------------


@torch.library.custom_op("splitc_tests::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    return x @ x.t()


@mystery.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[0])


@torch.library.custom_op("splitc_tests::silent", mutates_args=("x",))
def silent(x: Tensor) -> None:
    x.mul_(2)


def test_an_op_that_nobody_knows_is_priced_by_its_bytes_and_told() -> None:
    x = torch.randn(6, 4)
    (seen,) = counted(lambda: mystery(x))
    assert (seen.name, seen.unknown) == ("splitc_tests::mystery", True)
    assert (seen.bytes_accessed, seen.flops, seen.kernel_launches) == (FLOAT * (24 + 36), 0, 1)


def test_an_op_that_only_writes_into_its_input_is_not_free() -> None:
    x = torch.randn(6, 4)
    (seen,) = counted(lambda: silent(x))
    assert seen.bytes_accessed == 2 * FLOAT * 24 and seen.unknown


def test_an_op_of_torch_that_computes_without_a_formula_is_told() -> None:
    assert [each.name for each in counted(lambda: torch.linalg.inv(torch.eye(4))) if each.unknown]


# -- fake tensors, sums ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fake_tensors_run_the_same_ops_as_real_ones() -> None:
    def count() -> list[OpCost]:
        layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3))
        encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        x = torch.randn(2, 3, 10, 10)
        return counted(lambda: encoder(layers(x).flatten(2).transpose(1, 2)).softmax(-1))

    with FakeTensorMode():
        fake = count()
    assert fake == count()


def test_equal_ops_are_one_that_is_launched_more_often() -> None:
    x = torch.randn(4, 6)
    relu, add = merged(each for each in counted(lambda: F.relu(F.relu(F.relu(x) + x))))
    assert (relu.name, relu.kernel_launches, relu.bytes_accessed) == ("relu", 3, 6 * x.nbytes)
    assert (add.name, add.kernel_launches) == ("add", 1)


def test_ops_side_by_side_are_merged_only_where_they_are_equal_at_both_sizes() -> None:
    a, b = (OpCost("mm", "matmul", False, flops, 10.0) for flops in (100.0, 200.0))
    assert merged_pairs([a, a], [b, b]) == [(two(a), two(b))]
    assert merged_pairs([a, a], [a, b]) == [(a, a), (a, b)]


def test_ops_that_differ_at_the_two_sizes_are_taken_by_name() -> None:
    a, b = OpCost("mm", "matmul", False, 100.0, 10.0), OpCost("bmm", "matmul", False, 50.0, 5.0)
    none = OpCost("bmm", "matmul", False, 0.0, 0.0, 0.0)
    assert merged_pairs([a, a], [a, b]) == [(two(a), a), (none, b)]


def two(op: OpCost) -> OpCost:
    return OpCost(op.name, op.op_class, op.backward, 2 * op.flops, 2 * op.bytes_accessed, 2 * op.kernel_launches)
