"""Write a program as files that a person can read, diff and edit: the same program gives the same bytes.

conv.py fc.py        one for each role, or for roles that the same ranks have (conv_fc.py): its Stage, and one training
                     step, line by line
rank0.py rank1.py    one for each rank: its peers and its examples of the batch
launch.py            the training loop
plan.json            the plan; `splitc.ir.plan.Plan.from_json` reads it
"""

from __future__ import annotations

from splitc.codegen.features import features
from splitc.codegen.layout import docstring
from splitc.codegen.rank_file import idle_rank_file, rank_file
from splitc.codegen.rank_spec import IDLE
from splitc.codegen.role_file import role_file
from splitc.codegen.step import zero_text
from splitc.ir.program import LoweredProgram
from splitc.ir.roles import ranks_text


def generate(program: LoweredProgram) -> dict[str, str]:
    """File name -> text of everything but the weights."""
    plan = program.plan
    files = {f"{rank_program.name}.py": role_file(program, rank_program) for rank_program in program.rank_programs}
    for feature in features():
        files |= feature.files(program)
    for rank in range(plan.world):
        files[f"rank{rank}.py"] = rank_file(program, rank) if plan.duties(rank) else idle_rank_file(program, rank)
    if not all(map(plan.duties, range(plan.world))):
        files[f"{IDLE}.py"] = _idle_file(program)
    files["launch.py"] = _launch_file(program)
    files["plan.json"] = plan.to_json()
    return files


def _idle_file(program: LoweredProgram) -> str:
    title = f"Ranks of {program.name} that the plan gives no work: they only receive the loss."
    return "\n".join([*docstring(title), IDLE_BODY.format(hash=program.plan.hash, zero=zero_text(program))])


IDLE_BODY = '''
import torch
from torch import nn

PLAN = "{hash}"


class Stage(nn.Module):
    """Holds nothing."""


def step(comm, stage):
    """The loss of one batch, which other ranks compute."""
    return comm.sum_loss({zero}).wait()


evaluate = step


def predict(comm, stage):
    """Nothing: this rank reads no data."""
'''


def _launch_file(program: LoweredProgram) -> str:
    plan = program.plan
    roles = ", ".join(f"{role} {ranks_text(ranks)}" for role, ranks in plan.roles.items())
    title = f"Train {program.name} on {plan.world} ranks: {plan.strategy}{', approximate' * (not plan.exact)}, {roles}."
    update = "scheduler.step()"
    if plan.accumulate > 1:
        update = f"if step % {plan.accumulate} == 0:  # batches to an update\n                {update}"
    half = "N" if plan.world % 2 else plan.world // 2
    rest = LAUNCH_OPTIONS.format(world=plan.world, half=half, hash=plan.hash).splitlines()
    return "\n".join([*docstring(title, rest), LAUNCH.format(world=plan.world, hash=plan.hash, update=update)])


LAUNCH_OPTIONS = """\
run      torchrun --nproc-per-node {world} launch.py --steps 10
         on several hosts, on each with its --node-rank (or splitc run . --hosts node1,node2):
         torchrun --nnodes 2 --node-rank 0 --nproc-per-node {half} --master-addr node1 launch.py --steps 10
         --data module:function   in place of synthetic batches: function(worker) gives a Dataset, or an iterable of
                                  batches, (inputs..., target), of the examples that worker.data_rank reads
         --help                   optimizer, evaluation, checkpoints, resuming, TensorBoard
plan     {hash}"""

LAUNCH = """
import torch

from splitc.runtime.launch import main as launch

WORLD = {world}
PLAN = "{hash}"


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
            {update}
            for made, value in losses(step, loss, now=is_last or evaluates):  # of a GPU one step late, without a wait
                shown(made, value)
                if board is not None:
                    board.add_scalar("loss", value, made)
            if evaluates:
                shown.say(f"step {{step}}  {{launch.evaluated(worker, evaluation, args)}}")
            if args.save_every and (is_last or step % args.save_every == 0):
                worker.save(args.checkpoints, asynchronous=True)    # --resume goes on from the last one
        if args.save is not None:
            worker.export(args.save)                                # the whole model's state_dict


if __name__ == "__main__":
    launch.main(train, WORLD)
"""
