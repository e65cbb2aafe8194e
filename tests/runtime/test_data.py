"""A dataset shared out over readers: together they read what one process does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

from splitc.errors import LaunchError
from splitc.runtime.data import as_tuple, drawn, limits, order, tail_offsets
from splitc.runtime.loader import Loader, taken_over
from splitc.runtime.spec import Input
from splitc.runtime.transport.base import CompletedWork
from tests.support.sampling import along, in_one, in_pairs

BOUNDS = [(0, 4), (0, 3, 6), (0, 5, 7, 12), (0, 1, 2, 3, 4)]


def plain(*names: str) -> dict[str, tuple[str, ...]]:
    """The paths of inputs that are not nested."""
    return {name: (name,) for name in names}


def test_synthetic_numbers_are_where_those_of_an_example_are() -> None:
    cases: dict[str, tuple[Tensor, tuple[int, float | None]]] = {
        "pixels": (torch.linspace(0.01, 0.98, 50), (0, 1)),
        "counts": (torch.tensor([0.0, 2.5, 7.0]), (0, 7)),
        "a tanh": (torch.tensor([-0.9, 0.3]), (-1, 1)),
        "normal": (torch.tensor([-0.9, 0.3, 1.1]), (0, None)),
        "all alike": (torch.zeros(3), (0, None)),
        "masked": (torch.tensor([0.0, -torch.inf]), (0, None)),
        "none": (torch.zeros(0), (0, None)),
        "lengths": (torch.tensor([1, 5, 3]), (1, 6)),
        "padded labels": (torch.tensor([-100, 4]), (0, 5)),
        "all negative": (torch.tensor([-3, -2]), (-3, -1)),
        "a mask": (torch.tensor([True, False]), (0, 2)),
    }
    for name, (seen, expected) in cases.items():
        found = limits(seen)
        assert found == expected, name
        numbers = drawn([200], seen.dtype, found[1], torch.Generator().manual_seed(0), found[0])
        assert numbers.dtype == seen.dtype and (found[1] is None or len(numbers.unique()) > 1), name
        assert found[1] is None or found[0] <= numbers.min() <= numbers.max() <= found[1], name


def all_fit(bounds: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(bounds))


def read(
    number: int, bounds: Sequence[int], reader: int | None, *, dataset: Dataset[Any] | None = None, **options: Any
) -> list[tuple[tuple[Tensor, ...], tuple[int, ...]]]:
    """What one reader gets of a dataset whose k-th example is k and its label 10 k."""
    return list(loader_of(number, bounds, reader, dataset=dataset, **options)._counted())


def loader_of(
    number: int,
    bounds: Sequence[int],
    reader: int | None,
    *,
    dataset: Dataset[Any] | None = None,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = True,
    gather: Any = lambda number: [number],
    device: str = "cpu",
    **options: Any,
) -> Loader:
    dataset = dataset or TensorDataset(torch.arange(number), 10 * torch.arange(number))
    inputs = {name: Input((-1,), "int64") for name in ("number", "label")}

    def all_gather(outputs: list[Tensor], tensor: Tensor, _: Any) -> CompletedWork:
        for output, number in zip(outputs, gather(int(tensor)), strict=True):
            output.fill_(number)
        return CompletedWork()

    rank: Any = SimpleNamespace(
        spec=SimpleNamespace(data_rank=reader, paths={}, inputs=inputs, readers=range(len(gather(0)))),
        transport=SimpleNamespace(device=torch.device(device)),
        everyone=range(len(gather(0))),
        by_hosts=lambda: SimpleNamespace(all_gather=all_gather),
        without_examples=lambda offsets: [] if all_fit(offsets) else [0],
    )
    options |= {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    loader = Loader(dataset, rank, tuple(bounds), lambda steps: (batch for batch, _ in steps), **options)
    loader.set_epoch(epoch)
    return loader


def one_process(number: int, batch: int, indices: list[int], drop_last: bool) -> list[Tensor]:
    loader = DataLoader(TensorDataset(torch.arange(number)), batch, sampler=indices, drop_last=drop_last)
    return [images for (images,) in loader]


@in_one
@in_pairs(bounds=BOUNDS, number=[0, 3, 12, 25], shuffle=[False, True], drop_last=[False, True])
def test_the_readers_parts_are_the_batches_of_one_process(
    bounds: tuple[int, ...], number: int, shuffle: bool, drop_last: bool
) -> None:
    indices = order(number, shuffle, 0, 0).tolist()
    expected = one_process(number, bounds[-1], indices, drop_last)
    if expected and not all_fit(tail_offsets(bounds, len(expected[-1]))):
        tail = expected.pop()  # cannot give everybody an example
        both = [torch.cat([batch, tail]) for batch in expected[-1:]]
        expected[-1:] = [part for batch in both for part in batch.split(len(batch) - len(batch) // 2)]
        if expected and not all_fit(tail_offsets(bounds, len(expected[-1]))):
            expected[-2:] = both
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


@pytest.mark.parametrize(
    ("number", "bounds", "sizes"),
    [(8, (0, 2, 4), [4, 4]), (9, (0, 2, 4), [4, 3, 2]), (10, (0, 2, 4), [4, 4, 2]), (7, (0, 1, 2, 3), [3, 4])],
)
def test_a_tail_that_cannot_give_everybody_an_example_is_divided_with_the_batch_before_it(
    number: int, bounds: tuple[int, ...], sizes: list[int]
) -> None:
    for reader in (0, 1, None):
        steps = read(number, bounds, reader, drop_last=False)
        assert [sum(each) for _, each in steps] == sizes
        if reader is not None:
            streamed = read(0, bounds, reader, dataset=Numbers(number), drop_last=False)
            assert [(x.tolist(), each) for (x,), each in streamed] == [(x.tolist(), each) for (x, _), each in steps]


def test_each_epoch_and_each_seed_has_its_own_order_which_is_repeated_exactly() -> None:
    before = torch.get_rng_state()
    orders = {(seed, epoch): tuple(order(50, True, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert all(sorted(indices) == list(range(50)) for indices in orders.values())
    assert tuple(order(50, True, 1, 1).tolist()) == orders[1, 1]
    assert order(50, False, 1, 1).tolist() == list(range(50))
    seen(loader_of(8, (0, 2), 0, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)  # torch's own generator is left alone


def test_the_order_does_not_depend_on_the_number_of_readers() -> None:
    def epoch(bounds: tuple[int, ...]) -> Tensor:
        parts = [read(24, bounds, k, shuffle=True, seed=3, epoch=2) for k in range(len(bounds) - 1)]
        return torch.cat([part[step][0][0] for step in range(len(parts[0])) for part in parts])

    assert torch.equal(epoch((0, 12)), epoch((0, 5, 7, 12)))


class Numbers(IterableDataset[int]):
    """The whole numbers below a bound."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.bound))


class Endless(Dataset[int]):
    def __getitem__(self, k: int) -> int:
        return k


def test_a_dataset_that_is_neither_map_nor_stream_is_refused_with_a_way_out() -> None:
    with pytest.raises(LaunchError, match=r"Endless has neither a length nor is it an IterableDataset.*worker\.step"):
        loader_of(0, (0, 2), 0, dataset=Endless())


@pytest.mark.parametrize("workers", [0, 1])
def test_readers_of_a_stream_keep_their_examples_and_know_at_its_end_what_was_left_out(workers: int) -> None:
    loader = loader_of(0, (0, 1, 4), 1, dataset=Numbers(10), num_workers=workers)
    assert [batch.tolist() for (batch,) in loader] == [[1, 2, 3], [5, 6, 7]]
    assert (loader.epoch, loader.dropped) == (1, 2)
    assert loader.state_dict() == {"epoch": 1, "examples": 0, "seed": 0}


def test_streams_that_differ_among_readers_are_refused() -> None:
    loader = loader_of(0, (0, 1, 2), 0, dataset=Numbers(3), gather=lambda number: [number, min(number, 1)])
    with pytest.raises(
        LaunchError, match=r"streams do not have the same examples: one global batch has 2, 1; let Numb"
    ):
        list(loader)


# -- position ----------------------------------------------------------------------------------------------------------


def seen(loader: Loader, steps: int | None = None) -> list[int]:
    """The examples of a reader of everything, in the steps that are left of an epoch, or in some of them."""
    return [int(k) for (batch, *_) in islice(loader, steps) for k in batch]


@pytest.mark.slow
@along(2, steps=[1, 4, 3, 0], stream=[True, False], workers=[0, 1, 1, 0])
def test_a_position_goes_on_where_another_loader_stood_with_batches_of_another_size(
    steps: int, stream: bool, workers: int
) -> None:
    def made(batch: int) -> Loader:
        dataset = Numbers(24) if stream else None
        return loader_of(24, (0, batch), 0, dataset=dataset, shuffle=True, seed=5, num_workers=workers)

    whole, first, then = made(6), made(6), made(3)
    before = seen(first, steps)
    then.load_state_dict(first.state_dict())
    assert first.state_dict()["seed"] == 5
    after = seen(then) if steps < 4 else []
    assert before + after == seen(whole)
    assert then.state_dict() == {"epoch": 1, "examples": 0, "seed": 5} or (stream and steps == 4)
    assert seen(then) == seen(whole)


def test_a_loop_that_is_left_early_is_continued_and_set_epoch_begins_again() -> None:
    loader = loader_of(8, (0, 2), 0)
    assert [seen(loader, 1), seen(loader, 2), seen(loader), seen(loader, 1)] == [[0, 1], [2, 3, 4, 5], [6, 7], [0, 1]]
    loader.set_epoch(1)
    assert seen(loader, 1) == [0, 1]


class Dealt(Numbers):
    """Its examples are dealt to torch's workers in blocks, so that their order depends on how many there are."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        index, number = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(self.bound * index // number, self.bound * (index + 1) // number))


def epoch_over_stops(made: Callable[..., list[Loader]], stops: Sequence[tuple[Any, int]]) -> list[int]:
    """What all readers together see in an epoch that goes on with other readers at each of these steps."""
    found, state = list[int](), {"epoch": 3, "examples": 0, "seed": 0}
    for asked, steps in [*stops, (stops[-1][0], 10**6)]:
        loaders = made(*asked)
        for loader in loaders:
            loader.load_state_dict(state)
            found += [int(k) for batch, *_ in islice(loader, steps) if loader.epoch == 3 for k in batch]
        state = loaders[-1].state_dict()
        if state["epoch"] > 3:
            break
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_an_epoch_over_any_stops_readers_and_batches_has_each_example_once(stream: bool) -> None:
    numbers = random.Random(7)
    for _ in range(60):
        count = numbers.randint(4, 23)

        def made(readers: int, batch: int, number: int = count) -> list[Loader]:
            bounds, data = range(0, readers * batch + 1, batch), Numbers(number) if stream else None
            return [loader_of(number, bounds, k, dataset=data, shuffle=True, drop_last=False) for k in range(readers)]

        stops = [((numbers.randint(1, 4), numbers.randint(1, 5)), numbers.randint(0, 3)) for _ in range(4)]
        assert sorted(epoch_over_stops(made, stops)) == list(range(count)), (count, stops)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_an_epoch_of_a_stream_goes_on_in_the_order_of_the_workers_that_began_it() -> None:
    def made(readers: int, batch: int, workers: int) -> list[Loader]:
        bounds = range(0, readers * batch + 1, batch)
        own: dict[str, Any] = {"num_workers": workers, **({"prefetch_factor": 2} if workers else {})}
        return [loader_of(11, bounds, k, dataset=Dealt(11), drop_last=False, **own) for k in range(readers)]

    for stops in ([((2, 1, 3), 2), ((1, 2, 0), 1), ((4, 4, 2), 1)], [((2, 2, 0), 1), ((4, 4, 3), 1)]):
        assert sorted(epoch_over_stops(made, stops)) == list(range(11)), stops


# -- a DataLoader ------------------------------------------------------------------------------------------------------


def test_a_plain_data_loader_says_how_it_reads() -> None:
    dataset = TensorDataset(torch.arange(8))
    given = DataLoader(dataset, 2, shuffle=True, num_workers=1, drop_last=True, collate_fn=list)
    taken, options = taken_over(given)
    assert taken is dataset
    assert options["collate_fn"] is list
    assert [options[name] for name in ("batch_size", "shuffle", "drop_last", "num_workers")] == [2, True, True, 1]
    assert not taken_over(DataLoader(dataset, 2))[1]["shuffle"]
    assert taken_over(DataLoader(Numbers(3), 2))[1]["batch_size"] == 2


def test_a_data_loader_with_a_sampler_of_its_own_is_refused_with_a_way_out() -> None:
    given: list[tuple[Any, str]] = [
        ({"sampler": DistributedSampler(range(8), 2, 0)}, "DistributedSampler"),  # type: ignore[arg-type]
        ({"sampler": RandomSampler(range(8), replacement=True)}, "RandomSampler"),
        ({"sampler": [1, 2]}, "list"),
        ({"batch_sampler": [[1, 2]]}, "list"),
        ({"batch_size": None}, "batch_size of None"),
    ]
    for options, named in given:
        with pytest.raises(LaunchError, match=rf"DataLoader has a {named}, but worker\.loader .* without sampler= and"):
            taken_over(DataLoader(TensorDataset(torch.arange(8)), **options))


def test_a_dict_goes_by_the_programs_names_and_not_by_its_own_order() -> None:
    x, y, z = (torch.tensor(n) for n in range(3))
    assert as_tuple({"mask": y, "ids": x}, plain("ids", "mask")) == (x, y)
    assert as_tuple([{"mask": y, "ids": x}, z], plain("ids", "mask", "target")) == (x, y, z)
    assert as_tuple([x, {"target": z, "mask": y}], plain("ids", "mask", "target")) == (x, y, z)
    assert as_tuple([z, {"mask": y, "ids": x}], plain("ids", "mask", "target")) == (x, y, z)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_for_a_gpu_are_pinned_unless_the_user_says_otherwise(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    pinned: Any = []

    class Recorded(DataLoader[Any]):
        def __init__(self, *arguments: Any, pin_memory: bool, **options: Any) -> None:
            given.append(pin_memory)
            super().__init__(*arguments, **options)

    monkeypatch.setattr("splitc.runtime.loader.DataLoader", Recorded)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: (pinned.append(tensor), tensor)[1])
    on_gpu, of_plain = device == "cuda", taken_over(DataLoader(TensorDataset(torch.arange(4)), 2))[1]
    assert "pin_memory" not in of_plain
    assert taken_over(DataLoader(TensorDataset(torch.arange(4)), 2, pin_memory=True))[1]["pin_memory"]
    read(4, (0, 2), 0, device=device)
    read(4, (0, 2), 0, device=device, pin_memory=False)
    assert given == [on_gpu, False] and not pinned
    read(0, (0, 2), 0, device=device, dataset=Numbers(4))  # the batch, not its examples
    assert given[2:] == [False] and len(pinned) == 2 * on_gpu


@pytest.mark.parametrize("batch", ["text", [torch.zeros(1), 3], {"ids": "text"}])
def test_what_is_no_tensor_is_refused(batch: Any) -> None:
    with pytest.raises(LaunchError, match=r"the batch holds (str|int)"):
        as_tuple(batch, plain("ids"))
