"""Rank 2 of 5 of ResNet: role "conv", examples 8 to 10 of 11.  Written by splitc 0.1.0; yours to edit.

in       images  (3, 3, 32, 32)         float32
in       target  (3,)                   int64
out      target  (3,)                   int64    -> rank 4
out      cut0    (3, 32)                float32  -> rank 4
sends    237 kB a step, 6 operations on the wire
run      torchrun --nproc-per-node 5 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from conv import Stage, evaluate, predict, step

from splitc.runtime import Input, RankSpec, RoleSpec, Route

__all__ = ["Stage", "evaluate", "predict", "rank", "step"]

PLAN = "8646523e69cc"

rank = RankSpec(
    index=2,
    world=5,
    roles=(
        RoleSpec(
            role="conv",
            examples=(8, 11),                 # this rank's examples of the global batch: first, one past the last
            replicas=(0, 1, 2),               # ranks that hold the same parameters and sum their gradients
            # ranks of other roles, and the examples exchanged with each
            routes={
                "fc": (Route(peer=4, first=8, last=11),),
            },
        ),
    ),
    readers=(0, 1, 2),                # ranks that read the data
    batch_offsets=(0, 4, 8, 11),      # where each reader's examples begin, and the end
    # what a reader reads
    inputs={
        "images": Input(shape=(-1, 3, 32, 32), dtype="float32"),
        "target": Input(shape=(-1,), dtype="int64", high=10),
    },
    predicts=("images",),             # the inputs that worker.predict takes
    # as one of the readers, to which the model's output comes
    reader=RoleSpec(
        role="readers",
        examples=(8, 11),                 # this rank's examples of the global batch: first, one past the last
        replicas=(2,),                    # ranks that hold the same parameters and sum their gradients
        # ranks of other roles, and the examples exchanged with each
        routes={
            "fc": (Route(peer=4, first=8, last=11),),
        },
    ),
)
