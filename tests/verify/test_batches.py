"""Batches for `verify`: drawn from the example, the same for the same seed, divided among the readers."""

from __future__ import annotations

import torch

from splitc.verify.batches import draw_batch, split_batch

EXAMPLE = {"x": torch.randn(4, 3), "classes": torch.tensor([5, 6, 7, 8])}


def test_examples_are_distinct_where_they_are_floats_and_valid_where_they_are_integers() -> None:
    batch = draw_batch(EXAMPLE, 16, seed=0)
    assert batch["x"].shape == (16, 3) and len({tuple(row.tolist()) for row in batch["x"]}) == 16
    assert set(batch["classes"].tolist()) <= {5, 6, 7, 8}


def test_a_seed_decides_the_batch() -> None:
    first, again, other = (draw_batch(EXAMPLE, 8, seed) for seed in (0, 0, 1))
    assert torch.equal(first["x"], again["x"]) and not torch.equal(first["x"], other["x"])


def test_each_reader_gets_its_rows_of_every_tensor() -> None:
    batch = draw_batch(EXAMPLE, 5, seed=0)
    parts = split_batch(batch, (3, 2))
    assert [tuple(map(len, part)) for part in parts] == [(3, 3), (2, 2)]
    assert torch.equal(torch.cat([part[0] for part in parts]), batch["x"])
