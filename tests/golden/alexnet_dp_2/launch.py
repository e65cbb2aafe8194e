"""Train AlexNet on 2 ranks: data_parallel, all ranks 0 1.  Written by splitc 0.1.0; yours to edit.

run      torchrun --nproc-per-node 2 launch.py --steps 10
         --data module:function   in place of synthetic batches: function(worker) gives an iterable of batches,
                                  (inputs..., target), of the part that worker.data_rank reads
plan     14d5145c6908
"""

import torch

from splitc.runtime.launch import main as launch

WORLD = 2
PLAN = "14d5145c6908"


def optimizer(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


if __name__ == "__main__":
    launch.main(__file__, WORLD, optimizer)
