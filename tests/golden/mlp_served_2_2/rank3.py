"""Rank 3 of 4 of MLP: role "server".  Written by splitc 0.1.0; yours to edit.

sends    5.00 kB a step, 5 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from server import SERVED, Stage, evaluate, step

from splitc.runtime import Rank, RoleComm

__all__ = ["SERVED", "Stage", "evaluate", "rank", "step"]

PLAN = "db4f632aa5bc"

rank = Rank(
    index=3,
    world=4,
    comms=(
        RoleComm(
            role="server",
            replicas=(3,),
            # its rows of each parameter: dim, first, one past the last
            shares={
                "hidden.0.weight": (0, 0, 16),
                "hidden.0.bias": (0, 0, 16),
                "hidden.1.weight": (0, 15, 33),
                "hidden.1.bias": (0, 0, 0),
                "output.weight": (0, 0, 0),
                "output.bias": (0, 0, 0),
            },
            # role, and the ranks that it serves
            workers={
                "worker": (0, 1),
            },
        ),
    ),
    readers=(0, 1),                           # ranks that read the data
    bounds=(0, 4, 8),                         # where each reader's examples begin
    inputs={},                                # what a reader reads: shape, dtype, and how high whole numbers go
)
