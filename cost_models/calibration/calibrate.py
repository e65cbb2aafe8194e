"""Calibrate a cluster: measure the devices of all ranks at the same time, then the links between them.

Devices are measured at once because in training they compute at once, and share caches and memory.  Where there are
more ranks than cores, as many ranks as cores are measured.
"""

from __future__ import annotations

import datetime
import os
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from splitc import units
from splitc.cost_models.calibration.assemble import RankLayout, assemble, rounded
from splitc.cost_models.calibration.devices import DeviceFit, Residual, averaged, measure_device
from splitc.cost_models.calibration.link_fit import LinkFit, fit_links
from splitc.cost_models.calibration.links import measure_links
from splitc.cost_models.calibration.loopback import gpu_link, loopback_link
from splitc.cost_models.calibration.overlap import measure_jitter
from splitc.cost_models.calibration.rank_timer import LEAST, Progress, RankTimer, no_progress
from splitc.cost_models.compute.clocks import defaults, threads
from splitc.errors import LaunchError
from splitc.ir.cluster import Cluster
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.devices import host

BUDGET = 90.0  # seconds
_DEVICES, _JITTER = 0.3, 0.1  # of the budget; the rest is for the links
_OF_HOSTS = 8.0  # seconds, about, for ranks that are running
_GIVE = "give cluster=, a known cluster or a file that `splitc calibrate` wrote on these hosts"
_WHOLE = 0.95  # share of the time from which a core counts as available all the time


@dataclass(frozen=True)
class Calibration:
    """A measured cluster, and the residuals of its fit."""

    cluster: Cluster
    residuals: tuple[Residual, ...]


@defaults()
def calibrate(
    transport: Transport | None = None,
    budget: float = BUDGET,
    progress: Progress = no_progress,
    *,
    separate: bool = False,
    name: str = "calibrated",
) -> Calibration:
    """Measure the ranks of `transport`, collectively; without one, measure this machine from this process.

    budget: seconds, about.  separate: treat every rank as a machine with its own cores and network, although torchrun
    started all on one host.

    Raises LaunchError when hosts have unequal numbers of ranks.
    """
    if transport is None or transport.world == 1:
        return calibrate_one_process(transport.device if transport else None, budget, progress, name)
    ranks = _ranks(RankTimer(transport, progress), separate)
    transport.barrier()
    own = None
    if ranks.measures(transport.rank):
        own = measure_device(transport.device, budget * _DEVICES, lambda text: progress(f"device, {text}"))
        if separate and not ranks.gpus:
            own = replace(own, device=own.device.slowed(1 / _share(budget / 20)))
    fits = transport.all_gather_objects(own)
    timer = RankTimer(transport, progress)
    jitter = measure_jitter(timer, budget * _JITTER / (1 + LEAST)) * ranks.part
    fits = [fit and replace(fit, device=replace(fit.device, jitter=jitter)) for fit in fits]
    samples = measure_links(transport, budget * (1 - _DEVICES - _JITTER), progress, ranks.ranks_per_host)
    links = fit_links(samples, alike=ranks.one_machine)
    kind = "separate ranks" if separate else "ranks"
    count = 0 if ranks.gpus else torch.get_num_threads()
    source = _source(f"{ranks.world} {kind} on {_backend(transport)}", count, links, fits[0])
    cluster = assemble(name, source, fits, links, ranks)
    return Calibration(rounded(cluster), (*averaged(r for fit in fits if fit for r in fit.residuals), *links.residuals))


@defaults()
def calibrate_one_process(
    where: torch.device | None, budget: float, progress: Progress, name: str, source: str = ""
) -> Calibration:
    """Measure the first GPU, or one core, of this machine, and the link between two ranks on it."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    where = where or (torch.device("cuda", 0) if gpus else torch.device("cpu"))
    on_gpu = where.type == "cuda"
    begin = time.monotonic()
    with nullcontext() if on_gpu else threads(1):
        fit = measure_device(where, budget * _DEVICES, lambda text: progress(f"device, {text}"))
        progress("the link between two ranks here")
        left = max(budget / 4, budget - (time.monotonic() - begin))
        links = (
            gpu_link(left, *(torch.device("cuda", k) for k in (0, 1))) if on_gpu and gpus > 1 else loopback_link(left)
        )
    cluster = Cluster(
        name=name,
        device=fit.device,
        link=links.links[0],
        ranks_share_device=not on_gpu,
        cores=1 if on_gpu else cores(),
        source=source or _source("one process", 0 if on_gpu else 1, links, fit),
    )
    return Calibration(rounded(cluster), (*fit.residuals, *links.residuals))


def measured_among(transport: Transport, progress: Progress = no_progress) -> Cluster | None:
    """The cluster that these ranks run on, measured in some seconds; None where all are on one host.  Collective.

    It is for ranks on several hosts which nobody has described: loopback is no price of a network.

    Raises LaunchError where the hosts cannot be measured: it asks for the cluster.
    """
    names = transport.all_gather_objects(host())
    counts = Counter(names)
    if len(counts) == 1:
        return None
    alike, per_host = len(set(counts.values())) == 1, len(names) // len(counts)
    if not alike or [name for name in counts for _ in range(per_host)] != names:
        on = ", ".join(f"{number} on {name}" for name, number in counts.items())
        raise LaunchError(
            f"the prices of a plan need the network, which ranks on unequal hosts do not show ({on}); {_GIVE}"
        )
    what = f"measuring {len(counts)} hosts and the network between them for about {_OF_HOSTS:g} s"
    progress(f"{what}; to leave it out, {_GIVE}")
    return calibrate(transport, _OF_HOSTS, name="these-hosts").cluster


def require_described(what: str) -> None:
    """Raise LaunchError where torchrun started this process with others on several hosts: it cannot measure them."""
    here, world = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if here and world and int(here) < int(world):
        raise LaunchError(
            f"{what} prices plans on the network between the hosts, and one process cannot measure it; {_GIVE}"
        )


# -- the layout of the ranks -------------------------------------------------------------------------------------------


def _ranks(timer: RankTimer, separate: bool) -> RankLayout:
    gpu = timer.device.type == "cuda"
    names = timer.transport.all_gather_objects(host())
    here = int(os.environ.get("LOCAL_WORLD_SIZE", names.count(host())))
    slots = torch.cuda.device_count() if gpu else max(1, cores() // torch.get_num_threads())
    if timer.transport.waits_hold_the_stream:
        slots = here  # NCCL has checked that each has a GPU of its own
    hosts = timer.transport.all_gather_objects((here, slots))
    if len({each for each, _ in hosts}) > 1 and not separate:
        counts = ", ".join(str(each) for each, _ in hosts)
        raise LaunchError(
            f"the hosts have unequal numbers of ranks (of each rank, how many are on its host: {counts}); start as "
            f"many on each, or say --separate when every rank is a machine of its own"
        )
    return RankLayout(timer.world, min(here, timer.world), min(each for _, each in hosts), gpu, separate)


def _share(seconds: float) -> float:
    """The share of its cores' time that this process gets, which a quota limits.

    Microbenchmarks do not show it: they end before a quota stops them, and thread time excludes waiting.
    """
    a = torch.ones(192, 192)
    torch.mm(a, a)
    begin, used = time.perf_counter(), time.process_time()
    while time.perf_counter() < begin + seconds:
        torch.mm(a, a)
    share = (time.process_time() - used) / (time.perf_counter() - begin) / torch.get_num_threads()
    return share if share < _WHOLE else 1.0


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _backend(transport: Transport) -> str:
    if transport.waits_hold_the_stream:
        return "NCCL"
    return "gloo, through the CPU" if transport.device.type == "cuda" else "gloo"


def _source(what: str, threads: int, links: LinkFit, first: DeviceFit | None) -> str:
    """threads: of each rank on a CPU.  first: the device of rank 0."""
    each = f", {units.numbered(threads, 'thread')} each" if threads else ""
    tf32 = first is not None and "tf32" in first.device.flop_rate
    said = f"{what}{each}, at most {units.nbytes(links.largest)} at once" + ", float32 convolutions in TF32" * tf32
    day = datetime.date.today().isoformat()
    return f"measured by splitc calibrate on {day}: {said}, torch {torch.__version__}"
