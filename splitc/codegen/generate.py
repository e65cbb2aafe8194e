"""Write a program as files that a person can read, diff and edit: same program, same bytes.

conv.py fc.py        one for each role, or for roles that ranks have together (conv_fc.py): its Stage, and one training
                     step, line by line
rank0.py rank1.py    what is a rank's own: its peers and its part of the batch
launch.py            starts and trains the ranks
plan.json            the plan; `splitc.ir.plan.Plan.from_json` reads it
"""

from __future__ import annotations

from splitc.codegen.rank_file import idle_rank_file, rank_file, served_file
from splitc.codegen.role_file import part_file
from splitc.codegen.step import zero_text
from splitc.ir.plan import ranks_text
from splitc.ir.program import LoweredProgram, PlacedProgram
from splitc.version import __version__

IDLE = "idle"  # the role file of ranks that a plan leaves without work


def generate(program: LoweredProgram) -> dict[str, str]:
    """File name -> text of everything but the weights."""
    plan = program.plan
    files = {f"{part.name}.py": part_file(program, part) for part in program.rank_programs}
    if plan.servers:
        files["served.py"] = served_file(program)
    working = {rank for part in program.rank_programs for rank in part.ranks}
    for rank in range(plan.world):
        files[f"rank{rank}.py"] = rank_file(program, rank) if rank in working else idle_rank_file(program, rank)
    if len(working) < plan.world:
        files[f"{IDLE}.py"] = _idle_file(program)
    files["launch.py"] = _launch_file(program)
    files["plan.json"] = plan.to_json()
    return files


def _idle_file(program: PlacedProgram) -> str:
    return (
        f'"""Ranks of {program.name} that the plan gives no work: they only learn the loss.  '
        f'Written by splitc {__version__}; yours to edit."""\n\nimport torch\nfrom torch import nn\n\n'
        f'PLAN = "{program.plan.hash}"\n\n\nclass Stage(nn.Module):\n    """Nothing."""\n\n\n'
        f'def step(comm, stage):\n    """Learn the loss of one batch."""\n'
        f"    return comm.sum_loss({zero_text(program)}).wait()\n\n\nevaluate = step\n"
    )


def _launch_file(program: PlacedProgram) -> str:
    plan = program.plan
    roles = ", ".join(f"{role} {ranks_text(ranks)}" for role, ranks in plan.roles.items())
    return LAUNCH.format(
        name=program.name, version=__version__, world=plan.world, roles=roles, strategy=plan.strategy, hash=plan.hash
    )


LAUNCH = '''"""Train {name} on {world} ranks: {strategy}, {roles}.  Written by splitc {version}; yours to edit.

run      torchrun --nproc-per-node {world} launch.py --steps 10
         --data module:function   in place of synthetic batches: function(worker) gives an iterable of batches,
                                  (inputs..., target), of the part that worker.data_rank reads
plan     {hash}
"""

import torch

from splitc.runtime.launch import main as launch

WORLD = {world}
PLAN = "{hash}"


def optimizer(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


if __name__ == "__main__":
    launch.main(__file__, WORLD, optimizer)
'''
