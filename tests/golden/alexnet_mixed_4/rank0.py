"""Rank 0 of 4 of AlexNet: roles "conv" and "fc" and "fc2" and "fc3", examples 0 to 3 and 0 to 15 of 16.  Written by splitc 0.1.0; yours to edit.

in       images  (4, 3, 64, 64)         float32
in       target  (4,)                   int64
out      target  (4,)                   int64    -> rank 0
in       cut0    (8, 2304)              float32  of its group, ranks 0 1
out      cut2    (4, 1024)              float32  -> rank 0
in       target  (16,)                  int64    <- ranks 0 to 3
in       cut2    (16, 1024)             float32  <- ranks 0 to 3
sends    5.93 MB a step, 18 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from conv_fc_fc2_fc3 import Stage, evaluate, step

from splitc.runtime import Rank, RoleComm

__all__ = ["Stage", "evaluate", "rank", "step"]

PLAN = "8c05ef49091d"

rank = Rank(
    index=0,
    world=4,
    comms=(
        RoleComm(
            role="conv",
            examples=(0, 4),                  # its part of the global batch
            replicas=(0, 1, 2, 3),            # ranks that hold the same parameters and sum their gradients
            routes={"fc3": ((0, 0, 4),)},     # peer, and the examples that both work on
        ),
        RoleComm(
            role="fc",
            examples=(0, 4),                  # its part of the global batch
            replicas=(0, 2),                  # ranks that hold the same parameters and sum their gradients
            group=(0, 1),                     # ranks that share their examples and its parameters
            scheme="BK",                      # which of their examples make a turn
            # its part of a parameter: dim, first, one past the last
            shares={
                "classifier.1.weight": (0, 0, 512),
                "classifier.1.bias": (0, 0, 512),
            },
        ),
        RoleComm(
            role="fc2",
            examples=(0, 4),                  # its part of the global batch
            replicas=(0, 1, 2, 3),            # ranks that hold the same parameters and sum their gradients
            routes={"fc3": ((0, 0, 4),)},     # peer, and the examples that both work on
        ),
        RoleComm(
            role="fc3",
            examples=(0, 16),                 # its part of the global batch
            replicas=(0,),                    # ranks that hold the same parameters and sum their gradients
            routes={"conv": ((0, 0, 4), (1, 4, 8), (2, 8, 12), (3, 12, 16)), "fc2": ((0, 0, 4), (1, 4, 8), (2, 8, 12), (3, 12, 16))},  # peer, and the examples that both work on
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
