"""Rank 1 of 4 of AlexNet: roles "conv" and "fc" and "fc2", examples 4 to 7 of 16.  Written by splitc 0.1.0; yours to edit.

in       images  (4, 3, 64, 64)         float32
in       target  (4,)                   int64
out      target  (4,)                   int64    -> rank 0
in       cut0    (8, 2304)              float32  of its group, ranks 0 1
out      cut2    (4, 1024)              float32  -> rank 0
sends    5.90 MB a step, 12 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from conv_fc_fc2 import Stage, evaluate, step

from splitc.runtime import Rank, RoleComm

__all__ = ["Stage", "evaluate", "rank", "step"]

PLAN = "8c05ef49091d"

rank = Rank(
    index=1,
    world=4,
    comms=(
        RoleComm(
            role="conv",
            examples=(4, 8),                  # its part of the global batch
            replicas=(0, 1, 2, 3),            # ranks that hold the same parameters and sum their gradients
            routes={"fc3": ((0, 4, 8),)},     # peer, and the examples that both work on
        ),
        RoleComm(
            role="fc",
            examples=(4, 8),                  # its part of the global batch
            replicas=(1, 3),                  # ranks that hold the same parameters and sum their gradients
            group=(0, 1),                     # ranks that share their examples and its parameters
            scheme="BK",                      # which of their examples make a turn
            # its part of a parameter: dim, first, one past the last
            shares={
                "classifier.1.weight": (0, 512, 1024),
                "classifier.1.bias": (0, 512, 1024),
            },
        ),
        RoleComm(
            role="fc2",
            examples=(4, 8),                  # its part of the global batch
            replicas=(0, 1, 2, 3),            # ranks that hold the same parameters and sum their gradients
            routes={"fc3": ((0, 4, 8),)},     # peer, and the examples that both work on
        ),
    ),
    readers=(0, 1, 2, 3),                     # ranks that read the data
    bounds=(0, 4, 8, 12, 16),                 # where each reader's examples begin
    # what a reader reads: shape, dtype, and how high whole numbers go
    inputs={
        "images": ((-1, 3, 64, 64), "float32", None),
        "target": ((-1,), "int64", 10),
    },
)
