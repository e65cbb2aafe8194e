"""Clusters drawn at random, with everything that a cluster can have."""

from __future__ import annotations

import random

from splitc.ir.cluster import Cluster, Unlike
from splitc.ir.device import COLLECTIVES, DTYPES, EFFICIENCIES, Device, Link, Rate


def random_device(drawn: random.Random) -> Device:
    dtypes = drawn.sample(DTYPES, drawn.randint(1, len(DTYPES)))
    ops = {"matmul", "memory", *drawn.sample(EFFICIENCIES, drawn.randint(0, len(EFFICIENCIES)))}
    return Device(
        drawn.choice(("some GPU", 'a "quoted" \\ name', "ü\x7f\n")),
        {dtype: 10 ** drawn.uniform(9, 15) for dtype in dtypes},
        10 ** drawn.uniform(9, 13),
        10 ** drawn.uniform(8, 12),
        {op: drawn.uniform(0.01, 1.0) for op in sorted(ops)},
        drawn.choice((0.0, drawn.uniform(1e-7, 1e-4))),
        conv_launch=drawn.choice((0.0, drawn.uniform(1e-7, 1e-4))),
        overlap=drawn.choice((0.0, 1.0, drawn.uniform(0, 1))),
    )


def random_link(drawn: random.Random, shared: bool = True) -> Link:
    measured = drawn.sample(COLLECTIVES, drawn.randint(0, len(COLLECTIVES)))
    return Link(
        10 ** drawn.uniform(6, 12),
        drawn.choice((0.0, drawn.uniform(1e-7, 1e-3))),
        duplex=drawn.random() < 0.7,
        shared=shared and drawn.random() < 0.5,
        processor=drawn.choice((0.0, 1e-10)),
        collectives={name: Rate(10 ** drawn.uniform(6, 12), drawn.uniform(0, 1e-3)) for name in measured},
    )


def random_cluster(seed: int, world: int = 16) -> Cluster:
    """A cluster of at least `world` devices; its ranks below that may differ."""
    drawn = random.Random(seed)
    hosts = drawn.random() < 0.6
    odd = drawn.sample(range(world), drawn.randint(0, world // 2))
    cut = drawn.randint(0, len(odd))
    kinds = [tuple(sorted(ranks)) for ranks in (odd[:cut], odd[cut:]) if ranks]
    return Cluster(
        f"cluster {seed}",
        random_device(drawn),
        random_link(drawn),
        world=drawn.choice((None, world, 10 * world)),
        ranks_share_device=drawn.random() < 0.3,
        source=drawn.choice(("", "measured", "data sheets")),
        cores=drawn.choice((1, 4)),
        local_link=random_link(drawn, shared=False) if hosts else None,
        ranks_per_host=drawn.randint(1, 8) if hosts else None,
        unlike=tuple(Unlike(ranks, random_device(drawn), random_link(drawn)) for ranks in kinds),
    )
