"""Rank 1 of 4 of AlexNet: role "conv", examples 8 to 15 of 24.  Written by splitc 0.1.0; yours to edit.

in       images  (8, 3, 224, 224)       float32
in       target  (8,)                   int64
out      target  (8,)                   int64    -> rank 3
out      cut0    (8, 192, 13, 13)       float32  -> rank 3
sends    2.80 MB a step, 6 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from conv import Stage, evaluate, predict, step

from splitc.runtime import Input, RankSpec, RoleSpec, Route

__all__ = ["Stage", "evaluate", "predict", "rank", "step"]

PLAN = "6656c422ce12"

rank = RankSpec(
    index=1,
    world=4,
    roles=(
        RoleSpec(
            role="conv",
            examples=(8, 16),                 # this rank's examples of the global batch: first, one past the last
            replicas=(0, 1, 2),               # ranks that hold the same parameters and sum their gradients
            # ranks of other roles, and the examples exchanged with each
            routes={
                "fc": (Route(peer=3, first=8, last=16),),
            },
        ),
    ),
    readers=(0, 1, 2),                # ranks that read the data
    batch_offsets=(0, 8, 16, 24),     # where each reader's examples begin, and the end
    # what a reader reads
    inputs={
        "images": Input(shape=(-1, 3, 224, 224), dtype="float32"),
        "target": Input(shape=(-1,), dtype="int64", high=1000),
    },
    predicts=("images",),             # the inputs that worker.predict takes
    # as one of the readers, to which the model's output comes
    reader=RoleSpec(
        role="readers",
        examples=(8, 16),                 # this rank's examples of the global batch: first, one past the last
        replicas=(1,),                    # ranks that hold the same parameters and sum their gradients
        # ranks of other roles, and the examples exchanged with each
        routes={
            "fc": (Route(peer=3, first=8, last=16),),
        },
    ),
)
