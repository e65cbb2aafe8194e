"""Generic batches: nothing constant, nothing out of range."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.validate.generic_data import Draw, GenericData
from tests.support.capturing import capture
from tests.support.models import CLASSES, made


def drawn(tensor: Tensor, bound: int | None = None, how: Draw = Draw.GENERIC, size: int = 64) -> Tensor:
    return GenericData({"x": tensor}, {} if bound is None else {"x": bound}).draw(size, seed=1, how=how)["x"]


def test_a_constant_float_becomes_generic() -> None:
    for constant, dtype in [(0.0, torch.float32), (-3.5, torch.float64), (255.0, torch.bfloat16)]:
        x = drawn(torch.full((4, 6), constant, dtype=dtype))
        assert x.dtype == dtype and x.shape == (64, 6)
        assert float(x.float().std(0).min()) > 0.1 and len(x.float().unique()) > 50


def test_a_constant_complex_number_becomes_generic() -> None:
    x = drawn(torch.zeros(4, 6, dtype=torch.complex64))
    assert x.dtype == torch.complex64 and float(x.real.std()) > 0.1 and float(x.imag.std()) > 0.1


def test_floats_keep_a_range_that_is_nonnegative_or_within_one() -> None:
    assert float(drawn(torch.rand(4, 6)).min()) >= 0 and float(drawn(torch.rand(4, 6)).max()) <= 1
    assert float(drawn(torch.rand(4, 6) * 9).min()) >= 0


def test_floats_of_8_bits_are_drawn_too() -> None:
    class Quantised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    x = torch.rand(4, 3).to(torch.float8_e4m3fn)
    assert capture(Quantised(3, 2), (x,), torch.randn(4, 2), F.mse_loss).inputs[0].high == 1
    assert drawn(x).dtype == x.dtype and float(drawn(x).float().min()) >= 0


def test_dims_lie_in_memory_as_those_of_the_example() -> None:
    images = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    for how in Draw:
        assert drawn(images, how=how).is_contiguous(memory_format=torch.channels_last)
        for words, strides in ((torch.ones(7, 4), (64, 1)), (torch.ones(4, 7).t(), (1, 7))):
            assert GenericData({"x": words}, {}, {"x": 1}).draw(64, 1, how)["x"].stride() == strides


def test_equal_rows_become_different_rows() -> None:
    assert len(drawn(torch.randn(1, 6).expand(4, 6)).unique(dim=0)) == 64


def test_whole_numbers_are_drawn_up_to_their_bound_or_within_the_range_seen() -> None:
    assert set(drawn(torch.zeros(4, dtype=torch.long), bound=7).tolist()) == set(range(7))
    assert set(drawn(torch.tensor([3, 9, 3, 9]), size=200).tolist()) == set(range(3, 10))


def test_an_ignored_target_stays_among_the_classes() -> None:
    assert set(drawn(torch.tensor([-100, 2, -100, 0]), bound=3, size=200).tolist()) == {-100, 0, 1, 2}


def test_floats_that_hold_ids_stay_ids_column_by_column() -> None:
    table = torch.stack([torch.tensor([1.0, 5.0, 3.0]), torch.tensor([0.25, 0.5, -1.0])], 1)
    x = drawn(table)
    assert set(x[:, 0].tolist()) <= set(range(1, 6)) and len(x[:, 1].unique()) == 64
    assert set(drawn(torch.zeros(4, 2), bound=3).flatten().tolist()) == {0, 1, 2}


def test_a_mask_is_drawn_anew_without_empty_rows() -> None:
    for dtype in [torch.bool, torch.int64, torch.float32]:
        mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).to(dtype)
        x = drawn(mask, size=200)
        assert x.dtype == dtype and set(x.float().unique().tolist()) == {0, 1}, dtype
        assert bool(x.bool().any(-1).all()) and len(x.float().unique(dim=0)) == 7, dtype


def test_a_constant_mask_is_flipped_too() -> None:
    for mask in [torch.ones(4, 5, dtype=torch.bool), torch.zeros(4, 5, dtype=torch.long)]:
        x = drawn(mask)
        assert 0.3 < float(x.float().mean()) < 0.7
        assert bool(x.bool().any(-1).all()) or not mask.any()


def test_rows_that_are_distributions_stay_distributions() -> None:
    x = drawn(torch.eye(5)[torch.tensor([0, 1, 3])])
    torch.testing.assert_close(x.sum(-1), torch.ones(64))
    assert float(x.min()) >= 0 and len(x.unique(dim=0)) == 64


def test_what_is_not_finite_stays() -> None:
    x = drawn(torch.tensor([[float("-inf"), 1.5], [0.5, float("nan")]]))
    assert bool(x[:, 0].isinf().any()) and bool(x[:, 1].isnan().any()) and bool(x.isfinite().any())


def test_a_seed_decides_and_other_draws_are_nearer_to_the_example() -> None:
    tensor, ids = torch.randn(4, 3), torch.tensor([2, 7, 9, 4])
    data = GenericData({"x": tensor, "ids": ids})
    assert torch.equal(data.draw(8, 1)["x"], data.draw(8, 1)["x"])
    assert not torch.equal(data.draw(8, 1)["x"], data.draw(8, 2)["x"])
    seen, rows, same = (data.draw(8, 1, how) for how in (Draw.SEEN, Draw.ROWS, Draw.EXAMPLE))
    assert set(seen["ids"].tolist()) <= {2, 7, 9, 4} and len(seen["x"].unique(dim=0)) == 8
    assert {tuple(row) for row in rows["x"].tolist()} <= {tuple(row) for row in tensor.tolist()}
    assert float(drawn(torch.ones(4, 6), how=Draw.SEEN).min()) > 0
    assert torch.equal(same["x"], tensor.repeat(2, 1)) and same["ids"].tolist() == ids.tolist() * 2


def test_bounds_and_batch_dims_come_from_the_program() -> None:
    model = made(lambda m, x: m.fc(m.embedding(x).mean(1)), embedding=nn.Embedding(11, 4), fc=nn.Linear(4, CLASSES))
    x, y = torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    program = capture(model, x, y, F.cross_entropy)
    data = GenericData.of(program, {"x": x, "target": y})
    assert data.bounds == {"x": 11, "target": CLASSES}
    assert set(data.draw(200, 0)["x"].flatten().tolist()) == set(range(11))


def test_examples_may_lie_along_another_dim() -> None:
    x = GenericData({"x": torch.randn(7, 4, 3)}, batch_dims={"x": 1}).draw(9, 0)["x"]
    assert x.shape == (7, 9, 3)
