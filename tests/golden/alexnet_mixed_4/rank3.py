"""Rank 3 of 4 of AlexNet: roles "stage0" and "stage1" and "stage2", examples 12 to 15 of 16.  Written by splitc
0.1.0; yours to edit.

in       images  (4, 3, 64, 64)         float32
in       target  (4,)                   int64
out      target  (4,)                   int64    -> rank 0
in       cut0    (8, 2304)              float32  of its group, ranks 2 3
out      cut2    (4, 1024)              float32  -> rank 0
sends    5.88 MB a step, 14 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from stage0_stage1_stage2 import Stage, evaluate, predict, step

from splitc.runtime import Input, RankSpec, RoleSpec, Route, Shard

__all__ = ["Stage", "evaluate", "predict", "rank", "step"]

PLAN = "7bf8a28fdc87"

rank = RankSpec(
    index=3,
    world=4,
    roles=(
        RoleSpec(
            role="stage0",
            examples=(12, 16),                # this rank's examples of the global batch: first, one past the last
            replicas=(0, 1, 2, 3),            # ranks that hold the same parameters and sum their gradients
            # ranks of other roles, and the examples exchanged with each
            routes={
                "stage3": (Route(peer=0, first=12, last=16),),
            },
        ),
        RoleSpec(
            role="stage1",
            examples=(12, 16),                # this rank's examples of the global batch: first, one past the last
            replicas=(1, 3),                  # ranks that hold the same parameters and sum their gradients
            group=(2, 3),                     # ranks that share the parameters and compute each other's examples
            # this rank's part of each parameter
            shards={
                "classifier.1.weight": Shard(dim=0, first=512, last=1024),
                "classifier.1.bias": Shard(dim=0, first=512, last=1024),
            },
        ),
        RoleSpec(
            role="stage2",
            examples=(12, 16),                # this rank's examples of the global batch: first, one past the last
            replicas=(0, 1, 2, 3),            # ranks that hold the same parameters and sum their gradients
            # ranks of other roles, and the examples exchanged with each
            routes={
                "stage3": (Route(peer=0, first=12, last=16),),
            },
        ),
    ),
    readers=(0, 1, 2, 3),             # ranks that read the data
    batch_offsets=(0, 4, 8, 12, 16),  # where each reader's examples begin, and the end
    # what a reader reads
    inputs={
        "images": Input(shape=(-1, 3, 64, 64), dtype="float32"),
        "target": Input(shape=(-1,), dtype="int64", high=10),
    },
    predicts=("images",),             # the inputs that worker.predict takes
    # as one of the readers, to which the model's output comes
    reader=RoleSpec(
        role="readers",
        examples=(12, 16),                # this rank's examples of the global batch: first, one past the last
        replicas=(3,),                    # ranks that hold the same parameters and sum their gradients
        # ranks of other roles, and the examples exchanged with each
        routes={
            "stage3": (Route(peer=0, first=12, last=16),),
        },
    ),
)
