"""Rank 1 of 5 of ResNet: role "conv", examples 4 to 7 of 11.  Written by splitc 0.1.0; yours to edit.

in       images  (4, 3, 32, 32)         float32
in       target  (4,)                   int64
out      target  (4,)                   int64    -> rank 3
out      cut0    (4, 32)                float32  -> rank 3
sends    237 kB a step, 5 operations on the wire
run      torchrun --nproc-per-node 5 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from conv import Stage, evaluate, step

from splitc.runtime import Rank, RoleComm

__all__ = ["Stage", "evaluate", "rank", "step"]

PLAN = "8646523e69cc"

rank = Rank(
    index=1,
    world=5,
    comms=(
        RoleComm(
            role="conv",
            examples=(4, 8),                  # its part of the global batch
            replicas=(0, 1, 2),               # ranks that hold the same parameters and sum their gradients
            routes={"fc": ((3, 4, 8),)},      # peer, and the examples that both work on
        ),
    ),
    readers=(0, 1, 2),                        # ranks that read the data
    bounds=(0, 4, 8, 11),                     # where each reader's examples begin
    # what a reader reads: shape, dtype, and how high whole numbers go
    inputs={
        "images": ((-1, 3, 32, 32), "float32", None),
        "target": ((-1,), "int64", 10),
    },
)
