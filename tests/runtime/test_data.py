"""A dataset shared out over readers: together they read what one process does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from splitc.errors import LaunchError
from splitc.runtime.data import as_tuple, order, plan_epoch, shard

BOUNDS = [(0, 4), (0, 3, 6), (0, 5, 7, 12), (0, 1, 2, 3, 4)]


def plain(*names: str) -> dict[str, tuple[str, ...]]:
    """The paths of inputs that are not nested."""
    return {name: (name,) for name in names}


def all_fit(bounds: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(bounds))


def read(
    number: int, bounds: Sequence[int], reader: int | None, *, dataset: Dataset[Any] | None = None, **options: Any
) -> list[tuple[tuple[Tensor, ...], tuple[int, ...]]]:
    """What one reader gets of a dataset whose k-th example is k and its label 10 k."""
    settings = {"shuffle": False, "seed": 0, "epoch": 0, "drop_last": True, **options}
    dataset = dataset or TensorDataset(torch.arange(number), 10 * torch.arange(number))
    return list(shard(dataset, bounds, reader, {}, all_fit, **settings))


def one_process(number: int, batch: int, indices: list[int], drop_last: bool) -> list[Tensor]:
    loader = DataLoader(TensorDataset(torch.arange(number)), batch, sampler=indices, drop_last=drop_last)
    return [images for (images,) in loader]


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("number", [0, 3, 12, 25, 60])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_readers_parts_are_the_batches_of_one_process(
    bounds: tuple[int, ...], number: int, shuffle: bool, drop_last: bool
) -> None:
    indices = order(number, shuffle, 0, 0).tolist()
    expected = one_process(number, bounds[-1], indices, drop_last)
    if (
        expected
        and len(expected[-1]) < bounds[-1]
        and not all_fit([b * len(expected[-1]) // bounds[-1] for b in bounds])
    ):
        expected.pop()  # the tail cannot give everybody an example
    if not expected:
        with pytest.raises(LaunchError, match=rf"the dataset has {number} examples and a global batch {bounds[-1]},"):
            read(number, bounds, 0, shuffle=shuffle, drop_last=drop_last)
        return
    parts = [read(number, bounds, k, shuffle=shuffle, drop_last=drop_last) for k in range(len(bounds) - 1)]
    assert len(parts[0]) == len(expected)
    for step, batch in enumerate(expected):
        images = torch.cat([part[step][0][0] for part in parts])
        labels = torch.cat([part[step][0][1] for part in parts])
        assert torch.equal(images, batch)
        assert torch.equal(labels, 10 * batch)
        sizes = tuple(len(part[step][0][0]) for part in parts)
        assert all(part[step][1] == sizes for part in parts)  # and every rank knows them


def test_a_rank_that_reads_no_data_gets_empty_batches_with_everybodys_sizes() -> None:
    assert read(10, (0, 2, 4), None, drop_last=False) == [((), (2, 2)), ((), (2, 2)), ((), (1, 1))]


def test_a_tail_is_shared_in_proportion_and_all_of_it() -> None:
    assert [now for _, now in plan_epoch(19, (0, 2, 4, 12), False, all_fit)] == [(0, 2, 4, 12), (0, 1, 2, 7)]


@pytest.mark.parametrize(("number", "steps"), [(8, 2), (9, 2), (10, 3)])
def test_a_tail_that_cannot_give_everybody_an_example_is_left_out_on_every_rank(number: int, steps: int) -> None:
    for reader in (0, 1, None):
        assert len(read(number, (0, 2, 4), reader, drop_last=False)) == steps


def test_each_epoch_and_each_seed_has_its_own_order_which_is_repeated_exactly() -> None:
    orders = {(seed, epoch): tuple(order(50, True, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert all(sorted(indices) == list(range(50)) for indices in orders.values())
    assert tuple(order(50, True, 1, 1).tolist()) == orders[1, 1]
    assert order(50, False, 1, 1).tolist() == list(range(50))


def test_the_order_does_not_depend_on_the_number_of_readers() -> None:
    def epoch(bounds: tuple[int, ...]) -> Tensor:
        parts = [read(24, bounds, k, shuffle=True, seed=3, epoch=2) for k in range(len(bounds) - 1)]
        return torch.cat([part[step][0][0] for step in range(len(parts[0])) for part in parts])

    assert torch.equal(epoch((0, 12)), epoch((0, 5, 7, 12)))


def test_shuffling_leaves_the_global_random_generator_alone() -> None:
    before = torch.get_rng_state()
    order(50, True, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_options_of_the_data_loader_reach_it() -> None:
    def collate(examples: list[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.stack([image + label for image, label in examples])

    batches = read(4, (0, 2), 0, collate_fn=collate)
    assert [batch.tolist() for (batch,), _ in batches] == [[0, 11], [22, 33]]
    with pytest.raises(TypeError, match="no_such_option"):
        read(4, (0, 2), 0, no_such_option=1)


class Stream(IterableDataset[Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        yield torch.zeros(())


def test_a_dataset_without_a_length_is_refused_with_a_way_out() -> None:
    with pytest.raises(LaunchError, match=r"Stream has no length.*worker\.step"):
        read(0, (0, 2), 0, dataset=Stream())


def test_a_batch_is_flattened_to_inputs_and_then_targets() -> None:
    x, y, z = (torch.tensor(n) for n in range(3))
    assert as_tuple(x) == (x,)
    assert as_tuple([x, y]) == (x, y)
    assert as_tuple(((x, y), z)) == (x, y, z)
    assert as_tuple(()) == ()


def test_a_dict_goes_by_the_programs_names_and_not_by_its_own_order() -> None:
    x, y, z = (torch.tensor(n) for n in range(3))
    assert as_tuple({"mask": y, "ids": x}, plain("ids", "mask")) == (x, y)
    assert as_tuple([{"mask": y, "ids": x}, z], plain("ids", "mask", "target")) == (x, y, z)


def test_a_dict_with_a_name_that_the_program_does_not_know_is_refused() -> None:
    with pytest.raises(LaunchError, match="the batch has labels; the program's inputs are ids, target"):
        as_tuple({"ids": torch.zeros(1), "labels": torch.zeros(1)}, plain("ids", "target"))


@pytest.mark.parametrize("batch", ["text", [torch.zeros(1), 3], {"ids": "text"}])
def test_what_is_no_tensor_is_refused(batch: Any) -> None:
    with pytest.raises(LaunchError, match=r"the batch holds (str|int)"):
        as_tuple(batch, plain("ids"))
