"""`splitc job`: what a scheduler takes to train a build, an sbatch script or a JobSet of Kubernetes, to be edited."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from splitc.cli.files import check_writable, filled, write_file
from splitc.cli.launching import check_build, parse_launch
from splitc.cli.parser import Parser
from splitc.errors import LaunchError
from splitc.ir.plan import Plan
from splitc.runtime.launch.options import add_options, check_options, use_checkpoints
from splitc.units import numbered

_PROCESS = 1024  # MiB that Python, torch and what a rank reads take beside the plan's memory
PORT = 29500


@dataclass(frozen=True)
class HostGroup:
    """Consecutive hosts whose ranks have the same roles.

    first: number of its first host.  ranks: of each host.  memory: what a host takes at most (MiB), 0: unknown.
    """

    name: str
    first: int
    hosts: int
    ranks: int
    memory: int


Groups = Sequence[HostGroup]


def host_groups(plan: Plan, ranks_per_host: int = 0) -> list[HostGroup]:
    """The hosts of a plan, rank after rank; ranks_per_host: in place of those of its cluster.

    Names are unique, and what every scheduler takes as one: small letters and digits.
    """
    per_host = min(ranks_per_host or plan.prediction.ranks_per_host or 1, plan.world)
    hosts = [range(plan.world)[first : first + per_host] for first in range(0, plan.world, per_host)]
    memory = plan.prediction.memory if len(plan.prediction.memory) == plan.world else (0,) * plan.world
    found: list[HostGroup] = []
    for duties, same in groupby(hosts, lambda host: tuple(map(plan.duties, host))):
        own, first = list(same), sum(group.hosts for group in found)
        roles = dict.fromkeys(role for each in duties for role in each)
        plain = re.sub(r"[^a-z0-9]", "", "".join(roles).lower())[:30] or "idle"
        same_name = sum(re.fullmatch(rf"{plain}(x\d+)?", group.name) is not None for group in found)
        most = max(sum(-(-memory[rank] >> 20) + _PROCESS for rank in host) for host in own) if any(memory) else 0
        found.append(HostGroup(f"{plain}x{same_name}" if same_name else plain, first, len(own), len(duties), most))
    return found


def torchrun_on(group: HostGroup, hosts: int, index: str, master: str, arguments: Sequence[str]) -> str:
    """What a shell on a host runs.  index: of the host in its group, master: rank 0's, as the shell has them."""
    return (
        f"exec torchrun --nnodes {hosts} --node-rank $(({group.first} + {index})) --nproc-per-node {group.ranks} "
        f"--master-addr {master} --master-port {PORT} {shlex.join(arguments)}"
    )


def launch_arguments(build: str, arguments: Sequence[str], restarts: int) -> list[str]:
    """launch.py of a build with its options.  Raises LaunchError for those that every rank would refuse."""
    parser = Parser(prog="splitc job BUILD", add_help=False)
    add_options(parser)
    args = parse_launch(parser, arguments)
    again = ["--resume"] * (not args.resume) + ["--checkpoints", "checkpoints"] * (args.checkpoints is None)
    use_checkpoints(args, restarts)
    check_options(args)
    return [f"{build.rstrip('/')}/launch.py", *arguments, *(again if restarts else ())]


def job(args: argparse.Namespace) -> int:
    """Write the files that are asked for."""
    asked = {"--sbatch": args.sbatch, "--jobset": args.jobset}
    if not any(asked.values()) or (args.jobset and not args.image):
        raise LaunchError("give the file to write: --sbatch job.sbatch, or --jobset jobset.yaml with --image NAME")
    for option, path in asked.items():
        check_writable(option, path)
    plan, script = check_build(Path(args.build)), launch_arguments(args.build, args.arguments, args.restarts)
    groups, build = host_groups(plan, args.ranks_per_host), Path(args.build).resolve().name
    roles = ", ".join(f"{numbered(g.hosts, 'host')} with {numbered(g.ranks, 'rank')} ({g.name})" for g in groups)
    common = {
        "what": f"{build} on {plan.world} ranks, {roles}: {plan.strategy}, plan {plan.hash}",
        "name": re.sub(r"[^a-z0-9]+", "-", build.lower())[:30].strip("-") or "splitc",
        "restarts": args.restarts,
        "cpus": args.cpus,
        "port": PORT,
    }
    for (option, path), text in zip(asked.items(), (_sbatch, _jobset), strict=True):
        if path is not None:
            write_file(option, path, text(groups, args, script, {**common, "file": path}))
            print(f"wrote {path}: {roles}")
    return 0


def _sbatch(groups: Groups, args: argparse.Namespace, script: Sequence[str], common: Mapping[str, object]) -> str:
    lines = []
    for group in groups:
        takes = f" --gpus-per-task={args.gpus}" if args.gpus else f" --mem={group.memory}M" if group.memory else ""
        lines.append(f"--nodes={group.hosts} --ntasks-per-node={group.ranks} --cpus-per-task={args.cpus}{takes}")
    het = f" --het-group={','.join(map(str, range(len(groups))))}" if len(groups) > 1 else ""
    components = "\n#SBATCH hetjob\n".join(f"#SBATCH {line}" for line in lines)
    return filled("job.sbatch", **common, components=components, groups=het, command=shlex.join(script))


def _jobset(groups: Groups, args: argparse.Namespace, script: Sequence[str], common: Mapping[str, object]) -> str:
    master, jobs = f"{common['name']}-{groups[0].name}-0-0.{common['name']}", ""
    for group in groups:
        command = torchrun_on(group, sum(each.hosts for each in groups), "JOB_COMPLETION_INDEX", master, script)
        takes = {"nvidia.com/gpu": args.gpus * group.ranks} if args.gpus else {"memory": f"{group.memory}Mi"}
        limits = {"cpu": args.cpus * group.ranks, **(takes if args.gpus or group.memory else {})}
        texts = {"image": json.dumps(args.image), "command": json.dumps(command), "limits": json.dumps(limits)}
        jobs += filled("replicated-job.yaml", **common, **texts, group=group)
    return filled("jobset.yaml", **common) + jobs
