"""Rank 0 of 4 of AlexNet: role "conv", examples 0 to 7 of 24.  Written by splitc 0.1.0; yours to edit.

in       images  (8, 3, 224, 224)       float32
in       target  (8,)                   int64
out      target  (8,)                   int64    -> rank 3
out      cut0    (8, 192, 13, 13)       float32  -> rank 3
sends    2.80 MB a step, 5 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from conv import Stage, evaluate, step

from splitc.runtime import Rank, RoleComm

__all__ = ["Stage", "evaluate", "rank", "step"]

PLAN = "3b0026f40c36"

rank = Rank(
    index=0,
    world=4,
    comms=(
        RoleComm(
            role="conv",
            examples=(0, 8),                  # its part of the global batch
            replicas=(0, 1, 2),               # ranks that hold the same parameters and sum their gradients
            routes={"fc": ((3, 0, 8),)},      # peer, and the examples that both work on
        ),
    ),
    readers=(0, 1, 2),                        # ranks that read the data
    bounds=(0, 8, 16, 24),                    # where each reader's examples begin
    # what a reader reads: shape, dtype, and how high whole numbers go
    inputs={
        "images": ((-1, 3, 224, 224), "float32", None),
        "target": ((-1,), "int64", 1000),
    },
)
