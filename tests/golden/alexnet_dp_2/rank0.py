"""Rank 0 of 2 of AlexNet: role "all", examples 0 to 7 of 16.  Written by splitc 0.1.0; yours to edit.

in       images  (8, 3, 224, 224)       float32
in       target  (8,)                   int64
sends    244 MB a step, 6 operations on the wire
run      torchrun --nproc-per-node 2 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from all import Stage, evaluate, step

from splitc.runtime import Rank, RoleComm

__all__ = ["Stage", "evaluate", "rank", "step"]

PLAN = "14d5145c6908"

rank = Rank(
    index=0,
    world=2,
    comms=(
        RoleComm(
            role="all",
            examples=(0, 8),                  # its part of the global batch
            replicas=(0, 1),                  # ranks that hold the same parameters and sum their gradients
        ),
    ),
    readers=(0, 1),                           # ranks that read the data
    bounds=(0, 8, 16),                        # where each reader's examples begin
    # what a reader reads: shape, dtype, and how high whole numbers go
    inputs={
        "images": ((-1, 3, 224, 224), "float32", None),
        "target": ((-1,), "int64", 1000),
    },
)
