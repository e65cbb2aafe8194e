"""Who started this process as one of several ranks: torchrun, or Slurm's srun, Open MPI or MPICH, as variables say.

A batch script of Slurm has SLURM_PROCID and SLURM_NTASKS too, and an interactive shell is a step of one task: neither
is a rank.  In a heterogeneous job srun sorts the hosts of a step, of which rank 0's need not be the first.
"""

from __future__ import annotations

import os
import re

from ..errors import LaunchError
from .sealed import TOKEN

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OTHERS = (  # what stands for these; mpirun, which may start its ranks by srun, first
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_GTIDS"),
)
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def is_rank() -> bool:
    """Whether this process is one of several ranks; torchrun's variables then say which, set here for the others.

    Raises LaunchError where ranks on several hosts are not told MASTER_ADDR.
    """
    for names in () if "RANK" in os.environ else _OTHERS:
        told = dict(zip(_TORCHRUN, (os.environ.get(name, "") for name in names), strict=True))
        if all(told.values()) and told["WORLD_SIZE"] != "1":
            port = 29500
            if names[-1] == "SLURM_GTIDS":
                told["LOCAL_WORLD_SIZE"] = str(told["LOCAL_WORLD_SIZE"].count(",") + 1)
                job, step = number("SLURM_JOB_ID"), number("SLURM_STEP_ID")
                os.environ.setdefault(TOKEN, f"{job}.{step}")
                port += (job + step) % 1000  # steps of other jobs may share the host
            if "MASTER_ADDR" not in os.environ:
                is_here = told["LOCAL_WORLD_SIZE"] == told["WORLD_SIZE"]
                told["MASTER_ADDR"] = "127.0.0.1" if is_here else _first_host(names[0])
            os.environ.setdefault("MASTER_PORT", str(port))
            os.environ.update(told)
            break
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def was_restarted() -> bool:
    """Whether torchrun, or Slurm by a requeue, has started these ranks before."""
    return any(os.environ.get(name, "0") != "0" for name in _RESTARTS)


def _first_host(rank: str) -> str:
    """The host of rank 0; rank: the variable that has a rank's number."""
    groups = [number(f"SLURM_JOB_NUM_NODES_HET_GROUP_{k}") for k in range(number("SLURM_HET_SIZE"))]
    in_step = "SLURM_STEP_NODELIST" if rank == "SLURM_PROCID" else "SLURM_JOB_NODELIST"
    is_whole = groups and sum(groups) == number("SLURM_STEP_NUM_NODES")
    hosts = os.environ.get("SLURM_JOB_NODELIST_HET_GROUP_0" if is_whole else in_step, "")
    if first := re.match(r"(?:[^,[]|\[[^]]*\])+", hosts):  # of gpu[07-09,12],login
        return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0])
    raise LaunchError(
        f"{rank} is set, but not MASTER_ADDR, where ranks on several hosts meet: export it to all of them as an "
        f"address of rank 0's host (mpirun -x MASTER_ADDR of Open MPI, -genv MASTER_ADDR node1 of MPICH)"
    )


def number(name: str) -> int:
    """The whole number in a variable of a launcher; 0 where it is not set.  Raises LaunchError for other texts."""
    if not re.fullmatch("[0-9]{1,18}", given := os.environ.get(name, "0")):
        raise LaunchError(f"{name} is {given!r}, which is no whole number; let what starts the ranks set it")
    return int(given)
