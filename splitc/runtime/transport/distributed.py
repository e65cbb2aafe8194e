"""Ranks as processes under torchrun, on torch.distributed.

backend   when it is chosen                     where tensors travel
gloo      no GPU, or device="cpu"               from the memory of the CPU
nccl      as many GPUs as ranks on this host    from GPU to GPU
gloo      several ranks share a GPU             staged: copied to the CPU and back
"""

import math
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import LaunchError
from ..heap import keep_memory
from .agreement import require_equal, versions
from .in_flight import cause
from .network import choose_interface
from .torch_transport import TorchTransport

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets

DEFAULT_TIMEOUT = 120.0  # seconds; the environment's SPLITC_TIMEOUT goes before it


def init(
    world: int | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: float | None = None,
) -> TorchTransport:
    """Join the ranks that torchrun started, and return this rank's transport.

    A process group that the calling program has initialised is used as it is, with its own
    backend and timeout, and left open by `close`; `timeout` then holds for the groups made here.

    world: the number of ranks the program was compiled for; None accepts any.
    backend, device: None chooses as the table above says, from LOCAL_RANK, LOCAL_WORLD_SIZE and
        the GPUs in sight.  Hosts that would choose differently need an explicit `backend`.
    timeout: seconds that a rank waits for another one before it gives the other up.

    Ranks on several hosts meet over the interface that reaches MASTER_ADDR, unless GLOO_SOCKET_IFNAME names one.

    Raises LaunchError when torchrun did not start this process, started another number of ranks
    than `world`, or when the ranks do not find each other in time; on every rank when their versions differ.
    """
    joined = dist.is_initialized()
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    command = f"torchrun --standalone --nproc-per-node {world or 2} {sys.argv[0] or 'script.py'}"
    if missing and not joined:
        raise LaunchError(f"not started by torchrun ({', '.join(missing)} not set); run: {command}")
    started = dist.get_world_size() if joined else int(os.environ["WORLD_SIZE"])
    on_one_host = joined or int(os.environ.get("LOCAL_WORLD_SIZE", started)) == started
    remedy = f"run: {command}" if on_one_host else f"let --nproc-per-node of all hosts add up to {world}"
    another = f"the program is compiled for {world} ranks, but WORLD_SIZE is {started}; {remedy}"
    if world not in (None, started) and on_one_host:
        raise LaunchError(another)
    seconds = seconds_to_wait(timeout)
    if joined:
        backend = str(dist.get_backend())
    backend, where = _choose(backend, device, started)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        keep_memory()
    if not joined:
        choose_interface()
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
        except RuntimeError as error:
            raise LaunchError(
                f"rank {os.environ['RANK']} of {started} did not find the others at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {seconds:g} s "
                f"over the interface {os.environ.get('GLOO_SOCKET_IFNAME', 'of the host name')} (GLOO_SOCKET_IFNAME): "
                f"{cause(error)}"
            ) from error
    transport = TorchTransport(where, seconds, owns_process_group=not joined)
    require_equal(transport, {"the number of ranks of the build": world or started}, "copy one build to every host")
    require_equal(transport, versions(), "install the same on every host")
    if world not in (None, started):
        raise LaunchError(another)
    return transport


def started_world() -> int | None:
    """How many processes torchrun started together with this one; None outside torchrun."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _ENVIRONMENT) else None


def rank_among(world: int, alone: int = 0) -> int:
    """The rank of this process if it is one of `world` that were started together; `alone` else."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() if dist.get_world_size() == world else alone
    started = all(name in os.environ for name in _ENVIRONMENT) and os.environ["WORLD_SIZE"] == str(world)
    return int(os.environ["RANK"]) if started else alone


def seconds_to_wait(timeout: float | None = None) -> float:
    """What a rank waits for another one before it gives it up."""
    given = os.environ.get("SPLITC_TIMEOUT", DEFAULT_TIMEOUT) if timeout is None else timeout
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LaunchError(f"the timeout (SPLITC_TIMEOUT) is {given!r}; it must be a number of seconds above 0")
    return seconds


def _choose(backend: str | None, device: str | torch.device | None, world: int) -> tuple[str, torch.device]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    where = torch.device(device if device is not None else "cuda" if gpus else "cpu")
    if where.type == "cuda" and gpus == 0:
        raise LaunchError("device='cuda', but torch sees no GPU")
    if where.type == "cuda" and where.index is None:
        number = os.environ.get("LOCAL_RANK", os.environ.get("RANK", torch.cuda.current_device()))
        where = torch.device("cuda", int(number) % gpus)
    if backend is None:
        backend = "nccl" if where.type == "cuda" and gpus >= local_world else "gloo"
    if backend == "nccl" and where.type != "cuda":
        raise LaunchError(f"backend='nccl' needs a GPU for each rank, but the device is {where}")
    return backend, where
