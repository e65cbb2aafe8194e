"""Rank 0 of 5 of ResNet: role "conv", examples 0 to 3 of 11.  Written by splitc 0.1.0; yours to edit.

in       images  (4, 3, 32, 32)         float32
in       target  (4,)                   int64
out      target  (4,)                   int64    -> rank 3
out      cut0    (4, 32)                float32  -> rank 3
sends    237 kB a step, 6 operations on the wire
run      torchrun --nproc-per-node 5 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from conv import Stage, evaluate, predict, step

from splitc.runtime import Input, RankSpec, RoleSpec, Route

__all__ = ["Stage", "evaluate", "predict", "rank", "step"]

PLAN = "8646523e69cc"

rank = RankSpec(
    index=0,
    world=5,
    roles=(
        RoleSpec(
            role="conv",
            examples=(0, 4),                  # this rank's examples of the global batch: first, one past the last
            replicas=(0, 1, 2),               # ranks that hold the same parameters and sum their gradients
            # ranks of other roles, and the examples exchanged with each
            routes={
                "fc": (Route(peer=3, first=0, last=4),),
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
        examples=(0, 4),                  # this rank's examples of the global batch: first, one past the last
        replicas=(0,),                    # ranks that hold the same parameters and sum their gradients
        # ranks of other roles, and the examples exchanged with each
        routes={
            "fc": (Route(peer=3, first=0, last=4),),
        },
    ),
)
