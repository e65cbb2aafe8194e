"""What ranks issue ends on the strictest transport, in all that a worker does: what is checked of a step is not all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from splitc.compiled import CompiledProgram
from splitc.runtime.transport.base import Transport
from tests.end_to_end.test_every_strategy import NORMED
from tests.runtime.checkpoints.test_resume import steps
from tests.support.compiled import compiled
from tests.support.every_strategy import Asked, every_strategy, images, planned
from tests.support.ranks import adam, on_ranks, part_of, worker_of
from tests.support.sampling import sampled
from tests.support.strict import Strict, queued_transports, strict_transports
from tests.support.subnet_networks import CLASSES, INPUTS, chain

Batches = Sequence[tuple[torch.Tensor, ...]]


def live(program: CompiledProgram, batches: Batches, folder: Path, **options: Any) -> None:
    """Train, with a tail, evaluate, predict, save in all ways, resume and train on: on every rank of a program."""
    dataset = TensorDataset(*(torch.cat(parts)[: len(parts[0]) * 3 // 2] for parts in zip(*batches, strict=True)))

    def run(transport: Transport) -> None:
        assert isinstance(transport, Strict)
        worker = worker_of(program, transport, adam, **options)
        steps(worker, batches)
        for batch in worker.loader(dataset, drop_last=False):
            worker.step(*batch)
        worker.evaluate(worker.loader(dataset, shuffle=False, drop_last=False))
        steps(worker, batches[:1])
        worker.save(folder, asynchronous=True)
        steps(worker, batches[:1])
        worker.grad_norm()
        worker.save(folder)
        worker.resume(folder)
        worker.load_state_dict(worker.state_dict())
        worker.export(folder / "model.pt")
        own = part_of(worker, batches[0], [last - first for first, last in pairwise(worker.rank.spec.batch_offsets)])
        worker.evaluate(*own)
        worker.predict(*own[:-1])
        worker.close()

    with strict_transports():
        on_ranks(program.plan.world, run)
    assert (folder / "model.pt").exists()


def batches_of(program: CompiledProgram, number: int = 2) -> Batches:
    return [images(program.plan.global_batch) for _ in range(number)]


# -- whole lives -------------------------------------------------------------------------------------------------------

EVERYDAY = ["parameter_server(servers=2)", "layer_separation(ranks=1+1+1)"]


LIVES = [(world, asked) for world, step in ((3, 2), (4, 4)) for asked in every_strategy(world)[world % 2 :: step]]
"""Every second or fourth of all."""


@sampled(("world", "asked"), LIVES, [(w, asked) for w, asked in LIVES if w == 3 and str(asked) in EVERYDAY], ids=str)
def test_every_strategy_lives_on_the_strictest_transport(world: int, asked: Asked, tmp_path: Path) -> None:
    program = planned(world, asked, norm=True, global_batch=3 * world + 1)
    live(program, batches_of(program), tmp_path, clip_norm=0.5)


OTHERS = [
    (4, "modulo_shard(mp=2, period=2, sync_batchnorm=True)", {"accumulate": 2}),
    (3, "local_sgd(period=4, fragments=2, delay=1, mixing=0.5, outer_lr=0.7, outer_momentum=0.9)", {}),
    (2, "local_sgd(period=2)", {"clip_norm": 0.5}),
    (3, "local_sgd(period=3, through=server, fragments=2, delay=1)", {}),
    (4, "local_sgd(period=2, through=server)", {"accumulate": 2}),
    (4, "modulo_shard(mp=2, period=2, through=server)", {}),
    *((world, strategy, {"pins": pins}) for world, strategy, pins in NORMED),
]
"""In rounds, and with synchronised BatchNorm: ranks, strategy, options."""


@pytest.mark.slow
@sampled(("world", "strategy", "options"), OTHERS, OTHERS[:1], ids=str)
def test_rounds_and_synchronised_norms_live_on_it(
    world: int, strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    program = planned(world, strategy, norm=True, pins=options.get("pins", {}))
    live(program, batches_of(program, 5), tmp_path, **{k: v for k, v in options.items() if k != "pins"})


@pytest.mark.slow
@sampled(("world", "width"), [(3, 2), (2, 7), (4, 3), (4, 9), (2, 1)], [(3, 2)])
def test_subnets_of_few_neurons_live_on_it(world: int, width: int, tmp_path: Path) -> None:
    """With fewer neurons than ranks some have nothing to exchange."""
    batches = [(torch.randn(4 * world, INPUTS), torch.randint(CLASSES, (4 * world,))) for _ in range(5)]
    x, y = (tensor[:4] for tensor in batches[0])
    model = chain(width, width + 1).model
    live(compiled(model, (x,), y, F.cross_entropy, world, "independent_subnets(local_steps=2)"), batches, tmp_path)


@sampled(
    "strategy",
    ["layer_separation(n_c=2,n_f=1)", "hybrid_single", "parameter_server", "late_multiply"],
    ["late_multiply"],
)
def test_queues_of_nccl_give_the_numbers_of_one_process(strategy: str) -> None:
    with queued_transports():
        assert planned(3, strategy, torch.float64).verify(steps=2).holds
