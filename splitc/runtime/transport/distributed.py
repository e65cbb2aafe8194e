"""Ranks as processes under torchrun, on torch.distributed; `devices` says which device and backend they take."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..errors import BackendError, LaunchError, RanksApart
from ..heap import keep_memory
from .agreement import require_equal, versions
from .devices import Seat, choose, device_of, in_words, wanted
from .in_flight import cause, fails_by_itself
from .network import choose_interface
from .sealed import opened, sealed
from .started import is_rank
from .torch_transport import TorchTransport

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets

_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

DEFAULT_TIMEOUT, NCCL_TIMEOUT = 120.0, 600.0  # seconds; the environment's SPLITC_TIMEOUT goes before them

_starts = count(1)  # a program may join, close, and join again, in one store


def init(
    world: int | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: float | None = None,
    tell: bool = False,
) -> TorchTransport:
    """Join the ranks that torchrun started, and return this rank's transport.

    A process group that the calling program has initialised is used as it is, with its own
    backend and timeout, and left open by `close`; `timeout` then holds for the groups made here.

    world: the number of ranks the program was compiled for; None accepts any.
    backend, device: None chooses as the table in `devices` says, alike on every rank; of a process group that is bound
        to a device that one is taken.
    timeout: seconds that a rank waits for another one before it gives the other up.
    tell: this is a training: where there are GPUs, rank 0 says on stderr which devices and backend the ranks take, and
        from now on hangs are explained.

    Ranks on several hosts meet over the interface that reaches MASTER_ADDR, unless GLOO_SOCKET_IFNAME names one.

    Raises LaunchError when torchrun did not start this process, unless `world` is 1, started another number of ranks
    than `world`, or when the ranks do not find each other in time; on every rank when their versions differ, or when
    NCCL is asked for and ranks share a GPU.
    """
    joined = dist.is_initialized()
    missing = [] if _is_started() else [name for name in _ENVIRONMENT if name not in os.environ]
    if world == 1 and missing == [*_ENVIRONMENT] and not joined:  # a process alone needs no torchrun
        os.environ.update(zip(_ENVIRONMENT, ("0", "1", "127.0.0.1", "0"), strict=True))
        missing = []
    command = f"torchrun --standalone --nproc-per-node {world or 2} {sys.argv[0] or 'script.py'}"
    if missing and not joined:
        raise LaunchError(f"not started by torchrun ({', '.join(missing)} not set); run: {command}")
    started = dist.get_world_size() if joined else int(os.environ["WORLD_SIZE"])
    on_one_host = joined or int(os.environ.get("LOCAL_WORLD_SIZE", started)) == started
    remedy = f"run: {command}" if on_one_host else f"let --nproc-per-node of all hosts add up to {world}"
    another = f"the program is compiled for {world} ranks, but WORLD_SIZE is {started}; {remedy}"
    if world not in (None, started) and on_one_host:
        raise LaunchError(another)
    where = device_of(device or getattr(dist.group.WORLD, "bound_device_id", None))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        keep_memory()
    transport = _join(where, backend, timeout, tell)
    if tell:
        transport.watch()
    require_equal(transport, {"the number of ranks of the build": world or started}, "copy one build to every host")
    require_equal(transport, versions(), "install the same on every host")
    if world not in (None, started):
        raise LaunchError(another)
    return transport


def _join(where: torch.device, backend: str | None, timeout: float | None, tell: bool) -> TorchTransport:
    """Tell the others where this rank computes, choose the backend with them, and make the process group."""
    joined, seconds = dist.is_initialized(), seconds_to_wait(timeout)
    with _finding_others(seconds):
        if joined:
            rank, world, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend_config()
            store = dist.distributed_c10d._get_default_store()
        else:
            choose_interface()
            store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
        store = dist.distributed_c10d.PrefixStore(f"splitc/start {next(_starts)}", store)
        seats = _told(store, rank, world, Seat.of(where, wanted(backend)))
    through = "make the process group with the backend 'cpu:gloo,cuda:nccl'" if joined else "leave the backend out"
    chosen = choose(seats, f"start one rank for each GPU, or {through}: tensors then travel through the CPU")
    seconds = seconds_to_wait(timeout, NCCL_TIMEOUT if chosen == "nccl" else DEFAULT_TIMEOUT)
    if tell and rank == 0 and (line := in_words(seats, chosen)):
        print(line, file=sys.stderr, flush=True)
    if joined and chosen == "nccl":
        choose_interface()  # for the groups of gloo that are made beside it
    if not joined:
        within = timedelta(seconds=seconds)
        bound = where if chosen == "nccl" else None  # its communicators are created at once, so errors show here
        with _finding_others(seconds, met=True):
            store.set_timeout(within)
            dist.init_process_group(
                backend or chosen, timeout=within, store=store, rank=rank, world_size=world, device_id=bound
            )
    return TorchTransport(where, seconds, not joined, staged=where.type == "cuda" and chosen != "nccl")


def _told(store: Any, rank: int, world: int, own: Seat) -> list[Seat]:
    """What every rank tells of itself, through the store: in two requests of each rank, and one more of rank 0."""
    store.set(str(rank), sealed(own))
    try:
        if rank == 0:
            store.set("all", sealed([opened(store.get(str(each))) for each in range(world)]))
        seats: list[Seat] = opened(store.get("all"))
    except RuntimeError as error:
        missing = ", ".join(str(each) for each in range(world) if not store.check([str(each)]))
        raise RuntimeError(f"no word from rank {missing}" if missing else str(error)) from error
    return seats


@contextmanager
def _finding_others(seconds: float, met: bool = False) -> Iterator[None]:
    """met: all have found the master, and look for each other."""
    try:
        yield
    except RuntimeError as error:
        rank, world, master, port = (os.environ.get(name, "?") for name in _ENVIRONMENT)
        if fails_by_itself(error):
            raise BackendError(f"rank {rank} of {world}: {cause(error)}") from error
        found = "met the others at {}, but reached no ports of theirs" if met else "did not find the others at {}"
        raise RanksApart(
            f"rank {rank} of {world} {found.format(f'{master}:{port}')} within {seconds:g} s "
            f"over the interface {os.environ.get('GLOO_SOCKET_IFNAME', 'of the host name')} (GLOO_SOCKET_IFNAME): "
            f"{cause(error)}{'; let all TCP ports pass among the hosts' * met}"
        ) from error


def started_world() -> int | None:
    """How many processes torchrun started together with this one; None outside torchrun."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if _is_started() else None


def _is_started() -> bool:
    """Whether torchrun, or what `is_rank` knows, started this process.  Raises LaunchError for wrong numbers."""
    is_rank()
    given = {name: os.environ[name] for name in _NUMBERS if name in os.environ}
    if wrong := [f"{name} is {value!r}" for name, value in given.items() if not re.fullmatch(r"[0-9]{1,9}", value)]:
        raise LaunchError(f"{', '.join(wrong)}, which is no whole number; let torchrun set it")
    return all(name in os.environ for name in _ENVIRONMENT)


def rank_among(world: int, alone: int = 0) -> int:
    """The rank of this process if it is one of `world` that were started together; `alone` else."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() if dist.get_world_size() == world else alone
    started = _is_started() and os.environ["WORLD_SIZE"] == str(world)
    return int(os.environ["RANK"]) if started else alone


def seconds_to_wait(timeout: float | None = None, default: float = DEFAULT_TIMEOUT) -> float:
    """What a rank waits for another one before it gives it up."""
    given = os.environ.get("SPLITC_TIMEOUT", default) if timeout is None else timeout
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LaunchError(f"the timeout (SPLITC_TIMEOUT) is {given!r}; it must be a number of seconds above 0")
    return seconds
