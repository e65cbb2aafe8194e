"""Rank 3 of 4 of AlexNet: role "fc", examples 0 to 23 of 24.  Written by splitc 0.1.0; yours to edit.

in       target  (24,)                  int64    <- ranks 0 to 2
in       cut0    (24, 192, 13, 13)      float32  <- ranks 0 to 2
sends    3.12 MB a step, 10 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from fc import Stage, evaluate, step

from splitc.runtime import Rank, RoleComm

__all__ = ["Stage", "evaluate", "rank", "step"]

PLAN = "3b0026f40c36"

rank = Rank(
    index=3,
    world=4,
    comms=(
        RoleComm(
            role="fc",
            examples=(0, 24),                 # its part of the global batch
            replicas=(3,),                    # ranks that hold the same parameters and sum their gradients
            routes={"conv": ((0, 0, 8), (1, 8, 16), (2, 16, 24))},  # peer, and the examples that both work on
        ),
    ),
    readers=(0, 1, 2),                        # ranks that read the data
    bounds=(0, 8, 16, 24),                    # where each reader's examples begin
    inputs={},                                # what a reader reads: shape, dtype, and how high whole numbers go
)
