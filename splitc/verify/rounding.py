"""What short numbers on the wire do to every parameter's gradient, beside the sampling noise of a batch.

Simulated ranks compute the gradients of B batches, of rows of the example that are drawn anew, with the same weights
twice: as computed (g), and in the plan's formats (s).  Of a parameter

    error = sqrt(sum |s - g|^2 / sum |g|^2)        noise = sqrt(sum |g - mean g|^2 / (B - 1)) / |mean g|

Noise and rounding add in squares.  A step goes before: sums with error feedback round what the last one lost too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from splitc.capture.example.example import LOSS, Example
from splitc.capture.validate.generic_data import Draw, GenericData
from splitc.codegen.generate import generate
from splitc.cost_models.compute.clocks import threads
from splitc.ir.program import LoweredProgram
from splitc.runtime.launch.trial import ieee_float32, run_trial
from splitc.runtime.transport.formats import AS_COMPUTED
from splitc.runtime.transport.simulated import run_ranks
from splitc.verify.batches import split_batch, within_example
from splitc.verify.borrowed import borrowed

_AT_ONCE = 4  # batches whose gradients are kept
_ZERO = (
    1e-6  # of the largest gradient, by number: smaller ones are zero but for rounding, as of biases before BatchNorm
)


class Rounding(NamedTuple):
    """The largest error and its parameter; parameter -> error, cosine and noise, the worst first; what noise gains."""

    error: float
    worst: str
    effects: Mapping[str, tuple[float, float, float]]
    added: str


@ieee_float32()
def rounding(
    program: LoweredProgram,
    model: nn.Module,
    example: Example,
    weights: Mapping[str, Any],
    local_batches: Sequence[int],
    batches: int,
) -> Rounding:
    """Measure a program.  weights: what weights.pt holds.  local_batches: examples of each reader in a step."""
    sizes, data = within_example(program, tuple(local_batches)), GenericData.of(program, example.tensors)
    plan, options = program.plan, {"learning_rate": 0.0, "momentum": 0.0, "period": _AT_ONCE + 1}
    given: dict[str, Any] = {"weights": weights, "sizes": sizes, "own": {"model": model, LOSS: example.loss}, **options}
    builds = [generate(replace(program, plan=replace(plan, wire=each))) for each in (AS_COMPUTED, plan.wire)]
    sums, means = defaultdict[str, Any](int), defaultdict[str, dict[int, Any]](lambda: defaultdict(int))
    with borrowed(model, example.loss), threads(max(1, torch.get_num_threads() // plan.world)):
        for first in range(0, batches, _AT_ONCE):
            seeds = range(first, min(first + _AT_ONCE, batches) + 1)
            feeds = [split_batch(program, data.draw(sum(sizes), seed, Draw.ROWS), sizes) for seed in seeds]
            exact, short = (run_ranks(plan.world, partial(run_trial, b, feeds=feeds, **given)) for b in builds)
            for rank, step in product(range(plan.world), range(1, len(feeds))):
                for name, gradient in exact[rank].gradients[step].items():
                    g, s = (each.double().flatten() for each in (gradient, short[rank].gradients[step][name]))
                    sums[name] += torch.stack([g @ g, s @ s, g @ s, (s - g).square().sum().nan_to_num(torch.inf)])
                    means[name][rank] += g / batches
    numel = {name: max(sum(mean.numel() for mean in parts.values()), 1) for name, parts in means.items()}
    largest = max((float(found[0]) / numel[name] for name, found in sums.items()), default=0.0)
    effects, wrong, noisy = dict[str, tuple[float, float, float]](), 0.0, 0.0
    for name, (exact_, short_, dot, lost) in ((name, found.tolist()) for name, found in sums.items()):
        if exact_ > _ZERO**2 * largest * numel[name]:
            mean = sum(float(part @ part) for part in means[name].values())
            varied = max(exact_ - batches * mean, 0.0)
            wrong, noisy = wrong + lost, noisy + varied
            noise = math.sqrt(varied / (batches - 1) / mean) if mean else math.inf
            effects[name] = math.sqrt(lost / exact_), dot / math.sqrt(exact_ * short_ or math.inf), noise
    worst_first = dict(sorted(effects.items(), key=lambda each: -each[1][0]))
    worst = next(iter(worst_first), "")
    added = f"adds {100 * (math.sqrt(1 + wrong / (noisy or math.inf)) - 1):.2g} % to the sampling noise of a batch"
    return Rounding(worst_first[worst][0] if worst else 0.0, worst, worst_first, added)
