"""Rank 4 of 5 of ResNet: role "fc", examples 8 to 10 of 11.  Written by splitc 0.1.0; yours to edit.

in       target  (3,)                   int64    <- rank 2
in       cut0    (3, 32)                float32  <- rank 2
sends    1.72 kB a step, 6 operations on the wire
run      torchrun --nproc-per-node 5 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from fc import Stage, evaluate, predict, step

from splitc.runtime import RankSpec, RoleSpec, Route

__all__ = ["Stage", "evaluate", "predict", "rank", "step"]

PLAN = "8646523e69cc"

rank = RankSpec(
    index=4,
    world=5,
    roles=(
        RoleSpec(
            role="fc",
            examples=(8, 11),                 # this rank's examples of the global batch: first, one past the last
            replicas=(3, 4),                  # ranks that hold the same parameters and sum their gradients
            # ranks of other roles, and the examples exchanged with each
            routes={
                "conv": (Route(peer=2, first=8, last=11),),
                "readers": (Route(peer=2, first=8, last=11),),
            },
        ),
    ),
    readers=(0, 1, 2),                # ranks that read the data
    batch_offsets=(0, 4, 8, 11),      # where each reader's examples begin, and the end
)
