"""This machine as a cluster: its rates measured in a few seconds, and cached.

What is measured, each in its share of the budget; computing by the best of its runs, since other
processes only ever slow one down, the link by the median:

    flop rates       square matrix products in every dtype; in float32 a 3x3 convolution too
    memory           a copy larger than the caches, bytes read and written
    launch           one small op under autograd
    link             gloo over the loopback device, two groups in two threads; between GPUs a copy

On a CPU all ranks share its cores; with CUDA each rank has a GPU of its own, and a world of more
ranks than GPUs is priced as if all were on one such host.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from splitc.cluster import Cluster, Device, Link
from splitc.cluster_file import parse_cluster, to_toml
from splitc.errors import CostError

THIS_MACHINE = "this-machine"
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_FORMAT = 1  # of the cache; a higher one measures again
_LEAST = 3  # runs of everything, however long they take
_LARGE = 1 << 20  # numbers in a large message


def measure_this_machine(budget: float = 5.0, cache_dir: Path | None = None) -> Cluster:
    """The cluster "this-machine", from the cache when this machine was measured before.

    budget: seconds that measuring may take, about.  cache_dir: default `$XDG_CACHE_HOME/splitc` or
    `~/.cache/splitc`. The cache is keyed by processor, cores and torch version; one that cannot be
    read is measured anew.
    """
    here = measured_before(cache_dir)
    if here is None:
        key = _key()
        here = _measure(budget, key)
        _write(_cache(cache_dir, key), to_toml(here))
    return here


def measured_before(cache_dir: Path | None = None) -> Cluster | None:
    """This machine from the cache; None when it was not measured yet, or the cache cannot be read."""
    path = _cache(cache_dir, _key())
    with contextlib.suppress(OSError, UnicodeDecodeError, CostError):
        return parse_cluster(path.read_text(encoding="utf-8"), str(path))
    return None


def device_name() -> str:
    """What a rank of this machine computes on, as its cluster calls it."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else _cpu_model()


def cache_folder() -> Path:
    """Where measurements are kept: `$XDG_CACHE_HOME/splitc` or `~/.cache/splitc`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitc"


def _cache(cache_dir: Path | None, key: str) -> Path:
    return (cache_dir or cache_folder()) / f"{THIS_MACHINE}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.toml"


def _key() -> str:
    device = _cuda_names() or f"{_cpu_model()}, {_cores()} cores"
    return f"{device}, torch {torch.__version__}, measured by splitc (format {_FORMAT})"


def _write(path: Path, text: str) -> None:
    """Write at once or not at all: other ranks may read meanwhile.

    A cache that cannot be written is done without.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)


def _measure(budget: float, key: str) -> Cluster:
    cuda = torch.cuda.is_available()
    where = torch.device("cuda", 0) if cuda else torch.device("cpu")
    with _threads_kept():
        matmul = {dtype: _matmul_rate(where, dtype, budget / 10) for dtype in _DTYPES}
        conv = _conv_rate(where, budget / 5)
        copy = _copy_bandwidth(where, budget / 10)
        launch = _launch(where, budget / 10)
    several_gpus = cuda and torch.cuda.device_count() > 1
    peak = max(matmul[torch.float32], conv)
    rates = {str(dtype).removeprefix("torch."): rate for dtype, rate in matmul.items()}
    rates["float32"] = peak
    return Cluster(
        name=THIS_MACHINE,
        device=Device(
            name=device_name(),
            flop_rate=rates,
            memory_bandwidth=copy,
            memory=float(torch.cuda.get_device_properties(0).total_memory if cuda else _ram()),
            # Models mix products and convolutions: the geometric mean of the two rates.
            efficiency={"matmul": (matmul[torch.float32] * conv) ** 0.5 / peak, "memory": 1.0},
            launch=launch,
        ),
        link=_gpu_link(budget / 10) if several_gpus else _loopback_link(budget / 10),
        ranks_share_device=not cuda,
        source=key,
    )


def _matmul_rate(where: torch.device, dtype: torch.dtype, budget: float) -> float:
    """FLOP/s of square products, as large as fit the budget: a CPU may emulate half precision."""
    rate = 0.0
    for size in (256, 512, 1024, 2048, 4096, 8192):
        flops = 2.0 * size**3
        if rate and 2 * _LEAST * flops / rate > budget / 2:
            break
        a = torch.ones(size, size, dtype=dtype, device=where)
        product = partial(torch.matmul, a, a)
        rate = max(rate, flops / _best(product, where, budget / 6))
    return rate


def _conv_rate(where: torch.device, budget: float) -> float:
    """FLOP/s of a 3x3 convolution in float32, forward."""
    batch, channels, side = (64, 256, 28) if where.type == "cuda" else (4, 64, 28)
    images = torch.ones(batch, channels, side, side, device=where)
    weight = torch.ones(channels, channels, 3, 3, device=where)
    seconds = _best(lambda: torch.conv2d(images, weight, padding=1), where, budget)
    return 2.0 * batch * channels * channels * 9 * side * side / seconds


def _copy_bandwidth(where: torch.device, budget: float) -> float:
    """Bytes/s read and written by a copy of 64 MiB."""
    source = torch.ones(1 << 24, device=where)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), where, budget)


def _launch(where: torch.device, budget: float) -> float:
    """Seconds of one op on a tensor so small that only starting it takes time."""
    small, ops = torch.ones(8, device=where, requires_grad=True), 50

    def chain() -> None:
        value = small
        for _ in range(ops):
            value = value + 1.0

    return _best(chain, where, budget) / ops


def _best(run: Callable[[], object], where: torch.device, budget: float) -> float:
    """Seconds of the fastest run that fits the budget, on all cores or on one.

    On all cores the threads wait for each other: while another process has one of them, a run on
    all may take a hundred times as long as on one.
    """

    def timed() -> float:
        begin = time.perf_counter()
        run()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return time.perf_counter() - begin

    best = math.inf
    for threads in {1, _cores()}:
        torch.set_num_threads(threads)
        timed()
        end = time.perf_counter() + budget / 2
        for runs in itertools.count(1):
            best = min(best, timed())
            if runs >= _LEAST and time.perf_counter() > end:
                break
    return best


def _loopback_link(budget: float) -> Link:
    """gloo between two ranks of this host."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as threads:
        answers = threads.submit(_answer, store)
        latency, seconds = threads.submit(_ask, store, budget).result()
        answers.result()
    return _link(_LARGE * torch.float32.itemsize, latency, seconds)


def _ask(store: Any, budget: float) -> tuple[float, float]:
    """Seconds of a small and of a large message, half of the median round trip; a 0 ends each."""
    group = _group(store, 0)

    def one_way(numbers: int) -> float:
        message, trips, end = torch.ones(numbers), list[float](), time.perf_counter() + budget / 2
        while message[0]:
            if len(trips) >= _LEAST and time.perf_counter() > end:
                message.zero_()
            begin = time.perf_counter()
            group.send([message], 1, 0).wait()
            group.recv([message], 1, 0).wait()
            trips.append(time.perf_counter() - begin)
        return statistics.median(trips) / 2

    return one_way(1), one_way(_LARGE)


def _answer(store: Any) -> None:
    group = _group(store, 1)
    for numbers in (1, _LARGE):
        message = torch.ones(numbers)
        while message[0]:
            group.recv([message], 0, 0).wait()
            group.send([message], 0, 0).wait()


def _group(store: Any, rank: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))


def _link(nbytes: int, latency: float, seconds: float) -> Link:
    """The line through a message of no bytes and one of `nbytes`."""
    return Link(bandwidth=nbytes / max(seconds - latency, seconds / 10), latency=latency)


def _gpu_link(budget: float) -> Link:
    """Copies from the first GPU to the second."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    small, large = torch.ones(1, device=first), torch.ones(1 << 24, device=first)
    small_there, large_there = small.to(second), large.to(second)
    latency = _best(lambda: small_there.copy_(small), second, budget / 2)
    seconds = _best(lambda: large_there.copy_(large), second, budget / 2)
    return _link(large.nbytes, latency, seconds)


@contextlib.contextmanager
def _threads_kept() -> Iterator[None]:
    """Give torch its number of threads back; torchrun gives each of its processes only one."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cuda_names() -> str:
    if not torch.cuda.is_available():
        return ""
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    return f"{len(names)} x {names[0]}"
