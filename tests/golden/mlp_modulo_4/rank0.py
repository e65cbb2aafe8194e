"""Rank 0 of 4 of MLP: roles "trunk" and "head", examples 0 to 3 of 16.  Written by splitc 0.1.0; yours to edit.

in       images  (4, 20)                float32
in       target  (4,)                   int64
in       target  (4,)                   int64    of its group, ranks 0 1
in       cut0    (4, 16)                float32  of its group, ranks 0 1
sends    4.78 kB a step, 12 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from trunk_head import Stage, evaluate, predict, step

from splitc.runtime import Input, RankSpec, RoleSpec, Shard

__all__ = ["Stage", "evaluate", "predict", "rank", "step"]

PLAN = "476557b6e413"

rank = RankSpec(
    index=0,
    world=4,
    roles=(
        RoleSpec(
            role="trunk",
            examples=(0, 4),                  # this rank's examples of the global batch: first, one past the last
            replicas=(0, 1, 2, 3),            # ranks that hold the same parameters and sum their gradients
        ),
        RoleSpec(
            role="head",
            examples=(0, 4),                  # this rank's examples of the global batch: first, one past the last
            replicas=(0, 2),                  # ranks that hold the same parameters and sum their gradients
            group=(0, 1),                     # ranks that share the parameters and compute each other's examples
            scheme="B/K",                     # a microbatch is an equal part of every rank's examples
            # this rank's part of each parameter
            shards={
                "hidden.1.weight": Shard(dim=0, first=0, last=17),
                "hidden.1.bias": Shard(dim=0, first=0, last=17),
                "output.weight": Shard(dim=1, first=0, last=17),
            },
            ranks=(0, 1, 2, 3),               # all ranks of the role
        ),
    ),
    readers=(0, 1, 2, 3),             # ranks that read the data
    batch_offsets=(0, 4, 8, 12, 16),  # where each reader's examples begin, and the end
    # what a reader reads
    inputs={
        "images": Input(shape=(-1, 20), dtype="float32"),
        "target": Input(shape=(-1,), dtype="int64", high=10),
    },
    predicts=("images",),             # the inputs that worker.predict takes
)
