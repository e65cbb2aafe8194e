"""Rank 0 of 2 of AlexNet: role "all", examples 0 to 7 of 16.  Written by splitc 0.1.0; yours to edit.

in       images  (8, 3, 224, 224)       float32
in       target  (8,)                   int64
sends    244 MB a step, 7 operations on the wire
run      torchrun --nproc-per-node 2 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from all import Stage, evaluate, predict, step

from splitc.runtime import Input, RankSpec, RoleSpec

__all__ = ["Stage", "evaluate", "predict", "rank", "step"]

PLAN = "6049038bc16c"

rank = RankSpec(
    index=0,
    world=2,
    roles=(
        RoleSpec(
            role="all",
            examples=(0, 8),                  # this rank's examples of the global batch: first, one past the last
            replicas=(0, 1),                  # ranks that hold the same parameters and sum their gradients
        ),
    ),
    readers=(0, 1),                   # ranks that read the data
    batch_offsets=(0, 8, 16),         # where each reader's examples begin, and the end
    # what a reader reads
    inputs={
        "images": Input(shape=(-1, 3, 224, 224), dtype="float32"),
        "target": Input(shape=(-1,), dtype="int64", high=1000),
    },
    predicts=("images",),             # the inputs that worker.predict takes
)
