"""This machine as a cluster: measured in a few seconds by one process, and cached.

`calibration.calibrate` says how.  On a CPU the device is one core, since torchrun gives each rank one thread, and ranks
share as many as there are; with CUDA each rank has a GPU of its own, and a world of more ranks than GPUs is priced as
if all were on one such host.  `splitc calibrate` takes longer, starts real ranks, and is nearer to the truth.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import torch

from splitc.cost_models.calibration.calibrate import calibrate_one_process, cores
from splitc.cost_models.calibration.devices import cpu_model
from splitc.cost_models.calibration.rank_timer import no_progress
from splitc.cost_models.clusters.files import THIS_MACHINE
from splitc.errors import CostError
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import parse_cluster, to_toml
from splitc.ir.disk_cache import cache_folder, write_cache

_FORMAT = 3  # of the cache; a higher one measures again


def measure_this_machine(budget: float = 5.0, cache_dir: Path | None = None) -> Cluster:
    """The cluster "this-machine", from the cache when this machine was measured before.

    budget: seconds that measuring may take, about.  cache_dir: default `cache_folder()`.  The cache is keyed by
    processor, cores and torch version; one that cannot be read is measured anew.
    """
    here = measured_before(cache_dir)
    if here is None:
        here = _measure(budget, _key())
        write_cache(_cache(cache_dir), to_toml(here))
    return here


def measured_before(cache_dir: Path | None = None) -> Cluster | None:
    """This machine from the cache; None when it was not measured yet, or the cache cannot be read."""
    path = _cache(cache_dir)
    with contextlib.suppress(OSError, UnicodeDecodeError, CostError):
        return parse_cluster(path.read_text(encoding="utf-8"), str(path))
    return None


def _cache(cache_dir: Path | None) -> Path:
    return (cache_dir or cache_folder()) / f"{THIS_MACHINE}-{hashlib.sha256(_key().encode()).hexdigest()[:12]}.toml"


def _key() -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else f"{cpu_model()}, {cores()} cores"
    return f"{device}, torch {torch.__version__}, measured by splitc (format {_FORMAT})"


def _measure(budget: float, key: str) -> Cluster:
    return calibrate_one_process(None, budget, no_progress, THIS_MACHINE, source=key).cluster
