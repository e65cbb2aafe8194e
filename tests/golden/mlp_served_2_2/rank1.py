"""Rank 1 of 4 of MLP: role "worker", examples 4 to 7 of 8.  Written by splitc 0.1.0; yours to edit.

in       images  (4, 20)                float32
in       target  (4,)                   int64
sends    4.97 kB a step, 6 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from served import SERVED
from worker import Stage, evaluate, predict, step

from splitc.runtime import Input, RankSpec, RoleSpec

__all__ = ["Stage", "evaluate", "predict", "rank", "step"]

PLAN = "db4f632aa5bc"

rank = RankSpec(
    index=1,
    world=4,
    roles=(
        RoleSpec(
            role="worker",
            examples=(4, 8),                  # this rank's examples of the global batch: first, one past the last
            replicas=(0, 1),                  # ranks that hold the same parameters and sum their gradients
        ),
    ),
    readers=(0, 1),                   # ranks that read the data
    batch_offsets=(0, 4, 8),          # where each reader's examples begin, and the end
    # what a reader reads
    inputs={
        "images": Input(shape=(-1, 20), dtype="float32"),
        "target": Input(shape=(-1,), dtype="int64", high=10),
    },
    served=SERVED,                    # the parameters that servers hold
    predicts=("images",),             # the inputs that worker.predict takes
)
