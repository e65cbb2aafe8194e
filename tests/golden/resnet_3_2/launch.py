"""Train ResNet on 5 ranks: layer_separation, conv ranks 0 to 2, fc ranks 3 4.  Written by splitc 0.1.0; yours to edit.

run      torchrun --nproc-per-node 5 launch.py --steps 10
         --data module:function   in place of synthetic batches: function(worker) gives an iterable of batches,
                                  (inputs..., target), of the part that worker.data_rank reads
plan     8646523e69cc
"""

import torch

from splitc.runtime.launch import main as launch

WORLD = 5
PLAN = "8646523e69cc"


def optimizer(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


if __name__ == "__main__":
    launch.main(__file__, WORLD, optimizer)
