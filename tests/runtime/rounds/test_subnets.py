"""Compiled subnets train as the paper's algorithms 1 and 2 do in one process, which are written apart."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from splitc.runtime.subnets.deal import deal
from tests.support.compiled import compiled
from tests.support.ranks import adam, decaying, on_workers, part_of, sgd
from tests.support.sampling import along
from tests.support.subnet_networks import CLASSES, INPUTS, chain, joined, normed, residual, skipped
from tests.support.subnets import Masks, Network, Trained, train_subnets

F64 = torch.float64
NETWORKS = {
    "chain": lambda: chain(7, 9),
    "no_bias": lambda: chain(6, 6, 7, bias=False),
    "residual": lambda: residual(7),
    "joined": lambda: joined(7, 5, 8),
    "skipped": lambda: skipped(7),
    "normed": lambda: normed(7),
}


def batches_of(updates: int, sizes: list[int], accumulate: int) -> list[tuple[Tensor, Tensor]]:
    total = sum(sizes)
    return [
        (torch.randn(total, INPUTS, dtype=F64), torch.randint(0, CLASSES, (total,)))
        for _ in range(updates * accumulate)
    ]


def layers(network: Network, made: CompiledProgram) -> dict[str, str]:
    """Hidden layer of the network -> the layer in whose name its neurons are dealt."""
    dealt = {name: dims for stage in made.program.stages for name, dims in stage.dealt.items()}
    found: dict[str, str] = {}
    for name, axes in network.axes.items():
        for dim, axis in enumerate(axes):
            assert len(axis) == len(dealt.get(name, {}).get(dim, ())), name
            for layer, run in zip(axis, dealt.get(name, {}).get(dim, ()), strict=True):
                if isinstance(layer, str):
                    assert found.setdefault(layer, run.layer) == run.layer
    assert len(set(found.values())) == len(network.widths)
    return found


def masks(network: Network, names: dict[str, str], number: int, site: int, sites: int) -> Masks:
    found = {}
    for layer, width in network.widths.items():
        found[layer] = torch.zeros(width, dtype=F64)
        found[layer][list(deal(0, number, names[layer], width, sites)[site])] = 1
    return found


def agrees(
    network: Network,
    world: int,
    local_steps: int,
    optimizer: Any = sgd,
    sizes: list[int] | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
) -> Trained:
    """Train three rounds both ways, and compare each loss and the parameters after each round."""
    network.model.double()
    sizes = sizes or [6] * world
    batches = batches_of(3 * local_steps, sizes, accumulate)
    x, y = (tensor[: sizes[0]] for tensor in batches[0])
    made = compiled(network.model, (x,), y, F.cross_entropy, world, f"independent_subnets({local_steps=})")
    names = layers(network, made)
    split = [[x.split(sizes), y.split(sizes)] for x, y in batches]
    updates = [
        [[(x[site], y[site]) for x, y in split[first : first + accumulate]] for site in range(world)]
        for first in range(0, len(split), accumulate)
    ]
    expected = train_subnets(
        network,
        updates,
        [local_steps] * 3,
        lambda number, site: masks(network, names, number, site, world),
        optimizer,
        clip_norm=clip_norm,
    )
    number = local_steps * accumulate

    def run(worker: Any) -> tuple[list[float], list[dict[str, Tensor] | None]]:
        worker.use_sizes(sizes)
        losses, states = [], []
        for step, batch in enumerate(batches, 1):
            losses.append(float(worker.step(*part_of(worker, batch, sizes))))
            if step % number == 0:
                states.append(worker.state_dict())
        return losses, states

    results = on_workers(made, run, optimizer=optimizer, accumulate=accumulate, clip_norm=clip_norm)
    shares = [size / sum(sizes) for size in sizes]
    for step in range(len(batches)):
        own = [losses[step] for losses in expected.losses]
        mean = sum(share * loss for share, loss in zip(shares, own, strict=True))
        wanted = own if (step + 1) % number else [mean] * world
        assert [losses[step] for losses, _ in results] == pytest.approx(wanted, rel=1e-9)
    for got, weights in zip(results[0][1], expected.weights, strict=True):
        assert got is not None
        for key, value in weights.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-9, msg=partial("{}: {}".format, key))
    return expected


@pytest.mark.slow
@along(1, name=list(NETWORKS)[::-1], world=[3, 2, 4, 1])
def test_subnets_train_as_the_paper_says(name: str, world: int) -> None:
    torch.manual_seed(world)
    index = list(NETWORKS).index(name)
    agrees(NETWORKS[name](), world, 1 + (world + index) % 3, (sgd, adam, decaying)[(world + index // 2) % 3])


def smooth_adam(params: Iterable[Any]) -> torch.optim.Optimizer:
    """One that does not magnify the rounding of gradients near zero."""
    return torch.optim.Adam(params, lr=0.01, eps=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_ends_a_round_early_leaves_training_as_the_paper_says(seed: int) -> None:
    torch.manual_seed(seed)
    chosen = random.Random(seed)
    network, world, local_steps, sizes = joined(7, 5, 8), 2 + seed % 2, 3, [3, 4, 2][: 2 + seed % 2]
    network.model.double()
    batches = batches_of(11, sizes, 1)
    ends = [chosen.choice(["", "", "evaluate", "state", "end", "load"]) for _ in batches]
    rounds = [0]
    for end in ends:
        rounds[-1] += 1
        if end or rounds[-1] == local_steps:
            rounds.append(0)
    x, y = (tensor[: sizes[0]] for tensor in batches[0])
    made = compiled(network.model, (x,), y, F.cross_entropy, world, f"independent_subnets({local_steps=})")
    names = layers(network, made)
    updates = [[[part] for part in zip(x.split(sizes), y.split(sizes), strict=True)] for x, y in batches]
    own = partial(masks, network, names, sites=world)
    expected = train_subnets(network, updates, [length for length in rounds if length], own, smooth_adam)

    def run(worker: Any) -> dict[str, Tensor] | None:
        worker.use_sizes(sizes)
        for batch, end in zip(batches, ends, strict=True):
            own = part_of(worker, batch, sizes)
            worker.step(*own)
            if end == "evaluate":
                worker.evaluate(*own)
            elif end == "end":
                worker.end_round()
            elif end:
                state = worker.state_dict()
                if end == "load":
                    worker.load_state_dict(state)
        last: dict[str, Tensor] | None = worker.state_dict()
        return last

    state = on_workers(made, run, optimizer=smooth_adam)[0]
    assert state is not None
    for key, value in expected.weights[-1].items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-9, msg=partial("{}: {}".format, key))


@along(0, optimizer=[adam, sgd, decaying], local_steps=[2, 3, 1])
def test_state_of_an_optimizer_travels_with_its_neurons(local_steps: int, optimizer: Any) -> None:
    agrees(chain(7, 5), 3, local_steps, optimizer)


@pytest.mark.slow
def test_norms_of_gradients_are_those_of_a_subnet() -> None:
    free, clipped = (agrees(chain(7, 5), 2, 2, clip_norm=limit) for limit in (None, 0.05))
    assert free.losses != clipped.losses


@pytest.mark.slow
def test_sizes_of_batches_weigh_what_is_averaged_and_they_are_accumulated_to_updates() -> None:
    agrees(skipped(7), 3, 2, adam, sizes=[4, 9, 2], accumulate=2)


@pytest.mark.slow
def test_an_optimizer_whose_state_does_not_begin_with_zero_is_refused() -> None:
    network = chain(7, 5)
    x, y = torch.randn(6, INPUTS), torch.randint(0, CLASSES, (6,))
    made = compiled(network.model, (x,), y, F.cross_entropy, 2, "independent_subnets(local_steps=1)")
    with pytest.raises(LaunchError, match=r"Rprop begins with step_size = 0.01, and subnets begin with 0"):
        on_workers(made, lambda worker: None, optimizer=torch.optim.Rprop)


@pytest.mark.slow
def test_a_round_does_not_end_while_batches_wait_for_their_update() -> None:
    network = chain(7, 5)
    x, y = torch.randn(6, INPUTS), torch.randint(0, CLASSES, (6,))
    made = compiled(network.model, (x,), y, F.cross_entropy, 2, "independent_subnets(local_steps=2)")

    def run(worker: Any) -> bool:
        worker.step(x, y)
        for how in ("end_round", "state_dict", "evaluate"):
            with pytest.raises(LaunchError, match=r"1 accumulated batches wait for their update"):
                getattr(worker, how)(*((x, y) if how == "evaluate" else ()))
        worker.step(x, y)  # nothing was lost
        return worker.state_dict() is not None

    assert on_workers(made, run, optimizer=sgd, accumulate=2) == [True, False]
