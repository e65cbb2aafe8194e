"""The reference of `verify` for independent subnets equals the paper's algorithms, which are written apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.capture.example.example import Example
from splitc.runtime.spec import DealtDims, Neurons
from splitc.runtime.subnets.deal import deal
from splitc.verify.reference import LEARNING_RATE, MOMENTUM, Training, reference
from tests.support.compiled import compiled
from tests.support.sampling import staggered
from tests.support.subnet_networks import CLASSES, INPUTS, chain, joined, normed, residual, skipped
from tests.support.subnets import Masks, Network, train_subnets

F64 = torch.float64
NETWORKS = {
    "chain": lambda: chain(7, 9),
    "no_bias": lambda: chain(6, 6, 7, bias=False),
    "one": lambda: chain(8),
    "residual": lambda: residual(7),
    "joined": lambda: joined(7, 5, 8),
    "skipped": lambda: skipped(7),
    "normed": lambda: normed(7),
}


def dealt(network: Network) -> dict[str, DealtDims]:
    """What the pass would find."""
    widths, found = network.widths, dict[str, DealtDims]()
    for name, axes in network.axes.items():
        runs = {
            dim: tuple(
                Neurons("", layer) if isinstance(layer, int) else Neurons(layer, widths[layer]) for layer in axis
            )
            for dim, axis in enumerate(axes)
            if axis
        }
        if runs:
            found[name] = runs
    return found


def indicators(network: Network, number: int, site: int, sites: int) -> Masks:
    masks = {}
    for layer, width in network.widths.items():
        masks[layer] = torch.zeros(width, dtype=F64)
        masks[layer][list(deal(0, number, layer, width, sites)[site])] = 1
    return masks


@staggered(3, sites=[1, 2, 3, 4], name=NETWORKS)
def test_masked_subnets_are_those_of_the_paper(name: str, sites: int) -> None:
    local_steps = 1 + (sites + list(NETWORKS).index(name)) % 3
    torch.manual_seed(sites)
    network = NETWORKS[name]()
    network.model.double()
    steps, size = 3 * local_steps, 6
    batches = [
        (torch.randn(sites * size, INPUTS, dtype=F64), torch.randint(0, CLASSES, (sites * size,))) for _ in range(steps)
    ]
    x, y = batches[0]
    made = compiled(network.model, (x[:size],), y[:size], F.cross_entropy, sites, f"local_sgd(period={local_steps})")
    (stage,) = made.program.stages
    program = replace(made.program, stages=(replace(stage, dealt=dealt(network)),))
    own = {axis.name: k for k, axis in enumerate(program.inputs)}

    def optimizer(named: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=LEARNING_RATE, momentum=MOMENTUM)  # type: ignore[arg-type]

    split = [[[part] for part in zip(x.split(size), y.split(size), strict=True)] for x, y in batches]
    expected = train_subnets(
        network, split, [local_steps] * 3, lambda number, site: indicators(network, number, site, sites), optimizer
    )
    named = [{name: batch[k] for name, k in own.items()} for batch in batches]
    example = Example.bind(network.model, (x,), y, F.cross_entropy)
    trials = reference(Training(program, network.model, example, named, [size] * sites, local_steps))
    for site, trial in enumerate(trials):
        within = [step for step in range(steps) if (step + 1) % local_steps]
        assert [trial.losses[step] for step in within] == pytest.approx(
            [expected.losses[site][step] for step in within]
        )
    for number, weights in enumerate(expected.weights):
        state: dict[str, Tensor] = trials[0].states[(number + 1) * local_steps - 1]
        for key, value in weights.items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=1e-12)
