"""The component of TorchX: `torchx run -s slurm splitc.train --build build -- --steps 1000`.

TorchX finds it by the entry point in pyproject.toml, or by its path, `component.py:train`.  It reads annotations as
types, and the last section of the docstring as help.
"""

from pathlib import Path

import torchx
from torchx import specs

from splitc.cli.jobs import PORT, host_groups, launch_arguments, torchrun_on
from splitc.cli.launching import check_build


def train(
    *args: str,
    build: str = "build",
    image: str = torchx.IMAGE,
    ranks_per_host: int = 0,
    cpu: int = 1,
    gpu: int = 0,
    max_retries: int = 0,
    mounts: str = "",
) -> specs.AppDef:
    """Train a build on the hosts of its plan, those with the same roles as one role of TorchX.

    Args:
        args: of launch.py, such as --steps 1000
        build: folder that splitc compile wrote, by the path that the ranks have too
        image: with torch, splitc and the build, where the scheduler starts containers
        ranks_per_host: in place of those of the plan's cluster
        cpu: cores of a rank
        gpu: GPUs of a rank; without, ranks compute on the CPU
        max_retries: how often the scheduler starts all again after a failure
        mounts: as those of dist.ddp, type=volume,src=claim,dst=/data
    """
    groups = host_groups(check_build(Path(build)), ranks_per_host)
    hosts, index = sum(group.hosts for group in groups), specs.macros.replica_id
    # TorchX replaces its macros, and leaves one of two $ to the shell
    script = [each.replace("$", "$$") for each in launch_arguments(build, args, max_retries)]
    master = f"$${{{specs.macros.rank0_env}:=localhost}}"
    return specs.AppDef(
        name=Path(build).resolve().name,
        roles=[
            specs.Role(
                name=group.name,
                image=image,
                num_replicas=group.hosts,
                entrypoint="bash",
                args=["-c", torchrun_on(group, hosts, index, master, script)],
                resource=specs.Resource(cpu * group.ranks, gpu * group.ranks, 0 if gpu else group.memory),
                port_map={"c10d": PORT},
                max_retries=max_retries,
                mounts=specs.parse_mounts(mounts.split(",")) if mounts else [],
            )
            for group in groups
        ],
    )
