"""Rank 3 of 5 of ResNet: role "fc", examples 0 to 7 of 11.  Written by splitc 0.1.0; yours to edit.

in       target  (8,)                   int64    <- ranks 0 1
in       cut0    (8, 32)                float32  <- ranks 0 1
sends    2.36 kB a step, 9 operations on the wire
run      torchrun --nproc-per-node 5 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from fc import Stage, evaluate, predict, step

from splitc.runtime import RankSpec, RoleSpec, Route

__all__ = ["Stage", "evaluate", "predict", "rank", "step"]

PLAN = "8646523e69cc"

rank = RankSpec(
    index=3,
    world=5,
    roles=(
        RoleSpec(
            role="fc",
            examples=(0, 8),                  # this rank's examples of the global batch: first, one past the last
            replicas=(3, 4),                  # ranks that hold the same parameters and sum their gradients
            # ranks of other roles, and the examples exchanged with each
            routes={
                "conv": (Route(peer=0, first=0, last=4), Route(peer=1, first=4, last=8)),
                "readers": (Route(peer=0, first=0, last=4), Route(peer=1, first=4, last=8)),
            },
        ),
    ),
    readers=(0, 1, 2),                # ranks that read the data
    batch_offsets=(0, 4, 8, 11),      # where each reader's examples begin, and the end
)
