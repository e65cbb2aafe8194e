"""Rank 1 of 4 of MLP: roles "conv" and "fc", examples 4 to 7 of 16.  Written by splitc 0.1.0; yours to edit.

in       images  (4, 20)                float32
in       target  (4,)                   int64
in       target  (4,)                   int64    of its group, ranks 0 1
in       cut0    (4, 16)                float32  of its group, ranks 0 1
sends    4.67 kB a step, 12 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from conv_fc import Stage, evaluate, step

from splitc.runtime import Rank, RoleComm

__all__ = ["Stage", "evaluate", "rank", "step"]

PLAN = "23e04254aab5"

rank = Rank(
    index=1,
    world=4,
    comms=(
        RoleComm(
            role="conv",
            examples=(4, 8),                  # its part of the global batch
            replicas=(0, 1, 2, 3),            # ranks that hold the same parameters and sum their gradients
        ),
        RoleComm(
            role="fc",
            examples=(4, 8),                  # its part of the global batch
            replicas=(1, 3),                  # ranks that hold the same parameters and sum their gradients
            group=(0, 1),                     # ranks that share their examples and its parameters
            scheme="B/K",                     # which of their examples make a turn
            # its part of a parameter: dim, first, one past the last
            shares={
                "hidden.1.weight": (0, 17, 33),
                "hidden.1.bias": (0, 17, 33),
                "output.weight": (1, 17, 33),
            },
        ),
    ),
    readers=(0, 1, 2, 3),                     # ranks that read the data
    bounds=(0, 4, 8, 12, 16),                 # where each reader's examples begin
    # what a reader reads: shape, dtype, and how high whole numbers go
    inputs={
        "images": ((-1, 20), "float32", None),
        "target": ((-1,), "int64", 10),
    },
)
