"""Rank 3 of 4 of MLP: role "server".  Written by splitc 0.1.0; yours to edit.

sends    5.00 kB a step, 5 operations on the wire
run      torchrun --nproc-per-node 4 launch.py
remake   splitc compile <model file> --plan plan.json
"""

from served import SERVED
from server import Stage, evaluate, predict, step

from splitc.runtime import RankSpec, RoleSpec, Shard

__all__ = ["Stage", "evaluate", "predict", "rank", "step"]

PLAN = "db4f632aa5bc"

rank = RankSpec(
    index=3,
    world=4,
    roles=(
        RoleSpec(
            role="server",
            replicas=(3,),                    # ranks that hold the same parameters and sum their gradients
            # this rank's part of each parameter
            shards={
                "hidden.0.weight": Shard(dim=0, first=0, last=16),
                "hidden.0.bias": Shard(dim=0, first=0, last=16),
                "hidden.1.weight": Shard(dim=0, first=15, last=33),
                "hidden.1.bias": Shard(dim=0, first=0, last=0),
                "output.weight": Shard(dim=0, first=0, last=0),
                "output.bias": Shard(dim=0, first=0, last=0),
            },
            # the ranks that it serves, by role
            workers={
                "worker": (0, 1),
            },
        ),
    ),
    readers=(0, 1),                   # ranks that read the data
    batch_offsets=(0, 4, 8),          # where each reader's examples begin, and the end
    served=SERVED,                    # the parameters that servers hold
)
