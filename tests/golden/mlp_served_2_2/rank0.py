"""Rank 0 of 4 of MLP: role "worker", examples 0 to 3 of 8.  Written by splitc 0.1.0; yours to edit.

in       images  (4, 20)                float32
in       target  (4,)                   int64
sends    4.97 kB a step, 6 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from worker import SERVED, Stage, evaluate, step

from splitc.runtime import Rank, RoleComm

__all__ = ["SERVED", "Stage", "evaluate", "rank", "step"]

PLAN = "db4f632aa5bc"

rank = Rank(
    index=0,
    world=4,
    comms=(
        RoleComm(
            role="worker",
            examples=(0, 4),                  # its part of the global batch
            replicas=(0, 1),                  # ranks that hold the same parameters and sum their gradients
        ),
    ),
    readers=(0, 1),                           # ranks that read the data
    bounds=(0, 4, 8),                         # where each reader's examples begin
    # what a reader reads: shape, dtype, and how high whole numbers go
    inputs={
        "images": ((-1, 20), "float32", None),
        "target": ((-1,), "int64", 10),
    },
)
