"""Train MLP on 4 ranks: modulo_shard, trunk ranks 0 to 3, head ranks 0 to 3.  Written by splitc 0.1.0; yours to
edit.

run      torchrun --nproc-per-node 4 launch.py --steps 10
         on several hosts, on each with its --node-rank (or splitc run . --hosts node1,node2):
         torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr node1 launch.py --steps 10
         --data module:function   in place of synthetic batches: function(worker) gives a Dataset, or an iterable of
                                  batches, (inputs..., target), of the examples that worker.data_rank reads
         --help                   optimizer, evaluation, checkpoints, resuming, TensorBoard
plan     476557b6e413
"""

import torch

from splitc.runtime.launch import main as launch

WORLD = 4
PLAN = "476557b6e413"


def optimizer(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)  # what lr is multiplied by


def train(args):
    with launch.open_worker(__file__, WORLD, optimizer, args) as worker:
        scheduler = worker.scheduler(schedule)
        batches, evaluation = launch.batches(worker, args), launch.evaluation(worker, args)
        board = launch.board(worker, args)                          # rank 0's, with --tensorboard
        if args.resume:
            launch.resume(worker, args)
        losses, shown = launch.losses(worker), launch.shown(worker, batches, args)
        for step, batch in enumerate(batches, start=worker.steps + 1):
            is_last = step == len(batches)
            evaluates = evaluation is not None and (is_last or step % (args.eval_every or len(batches)) == 0)
            loss = worker.step(*batch)
            scheduler.step()
            for made, value in losses(step, loss, now=is_last or evaluates):  # of a GPU one step late, without a wait
                shown(made, value)
                if board is not None:
                    board.add_scalar("loss", value, made)
            if evaluates:
                shown.say(f"step {step}  {launch.evaluated(worker, evaluation, args)}")
            if args.save_every and (is_last or step % args.save_every == 0):
                worker.save(args.checkpoints, asynchronous=True)    # --resume goes on from the last one
        if args.save is not None:
            worker.export(args.save)                                # the whole model's state_dict


if __name__ == "__main__":
    launch.main(train, WORLD)
