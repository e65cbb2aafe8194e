"""Train MLP on 4 ranks: modulo_shard, conv ranks 0 to 3, fc ranks 0 to 3.  Written by splitc 0.1.0; yours to edit.

run      torchrun --nproc-per-node 4 launch.py --steps 10
         --data module:function   in place of synthetic batches: function(worker) gives an iterable of batches,
                                  (inputs..., target), of the part that worker.data_rank reads
plan     23e04254aab5
"""

import torch

from splitc.runtime.launch import main as launch

WORLD = 4
PLAN = "23e04254aab5"


def optimizer(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


if __name__ == "__main__":
    launch.main(__file__, WORLD, optimizer)
