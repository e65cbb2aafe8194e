"""Rank 3 of 4 of AlexNet: role "fc", examples 0 to 23 of 24.  Written by splitc 0.1.0; yours to edit.

in       target  (24,)                  int64    <- ranks 0 to 2
in       cut0    (24, 192, 13, 13)      float32  <- ranks 0 to 2
sends    3.12 MB a step, 10 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from fc import Stage, evaluate, predict, step

from splitc.runtime import RankSpec, RoleSpec, Route

__all__ = ["Stage", "evaluate", "predict", "rank", "step"]

PLAN = "6656c422ce12"

rank = RankSpec(
    index=3,
    world=4,
    roles=(
        RoleSpec(
            role="fc",
            examples=(0, 24),                 # this rank's examples of the global batch: first, one past the last
            replicas=(3,),                    # ranks that hold the same parameters and sum their gradients
            # ranks of other roles, and the examples exchanged with each
            routes={
                "conv": (
                    Route(peer=0, first=0, last=8), Route(peer=1, first=8, last=16),
                    Route(peer=2, first=16, last=24)
                ),
                "readers": (
                    Route(peer=0, first=0, last=8), Route(peer=1, first=8, last=16),
                    Route(peer=2, first=16, last=24)
                ),
            },
        ),
    ),
    readers=(0, 1, 2),                # ranks that read the data
    batch_offsets=(0, 8, 16, 24),     # where each reader's examples begin, and the end
)
