"""Where each rank computes, and the backend that all of them choose alike, from what every rank has told the others.

backend   when it is chosen               where tensors travel
gloo      no GPU, or device="cpu"         from the memory of the CPU
nccl      every rank has a GPU to itself  from GPU to GPU
gloo      several ranks share a GPU       staged: copied to the CPU and back
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from ..errors import LaunchError
from .agreement import require_same


@dataclass(frozen=True)
class Seat:
    """Where a rank computes.

    device: as torch names it on that rank.  gpu: what tells it from all other GPUs, of any host; None: the CPU.
    in_sight: GPUs that torch sees there.  backend: what was asked for, as `wanted` gives it.
    """

    host: str
    device: str
    gpu: str | None
    in_sight: int
    backend: str | None

    @classmethod
    def of(cls, device: torch.device, backend: str | None) -> Seat:
        """This rank's."""
        gpu = _identity(device) if device.type == "cuda" else None
        return cls(socket.gethostname(), str(device), gpu, _gpus(), backend)


def host() -> str:
    """What tells this host from the others: its name and, under torchrun, its number, since names may be alike."""
    number = os.environ.get("GROUP_RANK")
    return socket.gethostname() + (f" (node {number})" if number else "")


def machine() -> str:
    """The kernel that runs here: its boot id, else the name of the host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def device_of(device: str | torch.device | None) -> torch.device:
    """The device of this rank; None and "cuda" take the GPUs in sight in turn, by LOCAL_RANK.

    Raises LaunchError when a GPU is asked for and torch sees none.
    """
    gpus = _gpus()
    where = torch.device(device if device is not None else "cuda" if gpus else "cpu")
    if where.type == "cuda" and gpus == 0:
        raise LaunchError("device='cuda', but torch sees no GPU")
    if where.type == "cuda" and where.index is None:
        number = os.environ.get("LOCAL_RANK") or os.environ.get("RANK") or torch.cuda.current_device()
        where = torch.device("cuda", int(number) % gpus)
    return where


def wanted(backend: str | None) -> str | None:
    """What a backend of torch's leaves to choose: None where it has NCCL for GPUs and another one for the CPU.

    backend: a name, or names by device as torch writes them: "cpu:gloo,cuda:nccl".
    """
    if backend is None or ":" not in backend:
        return backend
    by_device = dict(pair.split(":") for pair in backend.split(","))
    if by_device.get("cuda") == "nccl":
        return None if "cpu" in by_device else "nccl"
    return by_device.get("cpu", by_device.get("cuda"))


def choose(seats: Sequence[Seat], remedy: str) -> str:
    """The backend that tensors travel over: NCCL where each rank has a GPU to itself, unless another one is wanted.

    seats: of all ranks, in their order.  remedy: where NCCL is wanted, and cannot be.
    Raises LaunchError, alike on every rank, when the ranks want different backends, or some have no GPU to themselves.
    """
    require_same({f"rank {k}": {"the backend": seat.backend} for k, seat in enumerate(seats)}, remedy)
    wants, conflict = seats[0].backend, _conflict(seats)
    if wants == "nccl" and conflict:
        raise LaunchError(f"backend 'nccl' needs a GPU for each rank, but {conflict}; {remedy}")
    return wants or ("gloo" if conflict else "nccl")


def in_words(seats: Sequence[Seat], backend: str) -> str:
    """What a run takes, and why where that is the slower way; empty where no rank sees a GPU."""
    if not any(seat.in_sight for seat in seats):
        return ""
    ranks, through = f"{len(seats)} rank{'s' * (len(seats) > 1)}", f"tensors travel through the CPU ({backend})"
    if on_cpu := sum(seat.gpu is None for seat in seats):
        by_choice = f"{ranks} on the CPU, {backend}, though torch sees GPUs"
        return by_choice if on_cpu == len(seats) else f"{ranks}, {on_cpu} of them on the CPU: {through}"
    places = {seat.host: _devices([each for each in seats if each.host == seat.host]) for seat in seats}
    where, hosts = " and ".join(dict.fromkeys(places.values())), f" on {len(places)} hosts" * (len(places) > 1)
    where += " each" * (len(places) > len(set(places.values())) == 1)
    verb = "share" if _conflict(seats) else "with" if hosts else "on"
    by = ", NCCL" if backend == "nccl" else f": {through}" + ", as was asked" * (verb != "share")
    return f"{ranks}{hosts} {verb} {where}{by}"


def _conflict(seats: Sequence[Seat]) -> str:
    """Why NCCL cannot join these ranks: one is on the CPU, or several share a GPU; empty where it can."""
    for rank, seat in enumerate(seats):
        there = f"of {seat.host} (GPUs in its sight: {seat.in_sight})"
        if seat.gpu is None:
            return f"rank {rank} computes on the CPU {there}"
        sharing = [str(k) for k, each in enumerate(seats) if each.gpu == seat.gpu]
        if len(sharing) > 1:
            return f"ranks {', '.join(sharing)} share {seat.device} {there}"
    return ""


def _devices(seats: Sequence[Seat]) -> str:
    """`cuda:0..3`, of the ranks of a host."""
    numbers = sorted({int(seat.device.partition(":")[2]) for seat in seats})
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    text = "cuda:" + ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return text + " of each rank" * (len(numbers) < len({seat.gpu for seat in seats}))


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _identity(device: torch.device) -> str:
    """By machine and slot, as NCCL tells GPUs apart, which takes parts of one GPU (MIG) for one; else by its UUID."""
    about = torch.cuda.get_device_properties(device)
    slot = [getattr(about, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in slot:
        return str(getattr(about, "uuid", f"{socket.gethostname()} {device}"))
    return f"{machine()} {slot}"
