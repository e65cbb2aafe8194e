"""Train AlexNet on 2 ranks: data_parallel, all ranks 0 1.  Written by splitc 0.1.0; yours to edit.

run      torchrun --nproc-per-node 2 launch.py --steps 10
         --data module:function   in place of synthetic batches: function(worker) gives an iterable of batches,
                                  (inputs..., target), of the examples that worker.data_rank reads
plan     6049038bc16c
"""

import time

import torch

from splitc.runtime.launch import main as launch

WORLD = 2
PLAN = "6049038bc16c"


def optimizer(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def train(args):
    with launch.open_worker(__file__, WORLD, optimizer, args) as worker:
        batches = launch.batches(worker, args)
        begin = time.perf_counter()
        for step, batch in enumerate(batches, start=1):
            loss = worker.step(*batch)
            if worker.rank.index == 0:
                print(f"step {step}  loss {loss.item():.6f}  {time.perf_counter() - begin:.3f} s", flush=True)
                begin = time.perf_counter()
        if args.save is not None:
            worker.export(args.save)


if __name__ == "__main__":
    launch.main(train, WORLD)
