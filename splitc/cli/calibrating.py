"""`splitc calibrate`: measure a cluster, print the residuals of the fit, and write a cluster file.

It starts its ranks itself unless torchrun has started it.  Only rank 0 prints, and writes at the very end, so that an
interrupt changes no file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate

from splitc import units
from splitc.cli.files import check_writable, write_file
from splitc.cost_models.calibration.calibrate import Calibration, cores
from splitc.cost_models.calibration.calibrate import calibrate as measure
from splitc.cost_models.calibration.devices import Residual
from splitc.errors import CostError, LaunchError
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import parse_cluster, to_data, to_toml
from splitc.ir.device import Device, Link
from splitc.runtime.launch.failures import guarded
from splitc.runtime.launch.torchrun import torchrun
from splitc.runtime.progress import Step
from splitc.runtime.transport.distributed import init
from splitc.runtime.transport.started import is_rank

MOST = 16  # ranks started on a machine without GPUs
_BUSY = 0.3  # load per core above which the user is warned
_MISSES = 0.3  # the error from which a row is pointed at
_SHOWN = 6  # of these
_PATIENCE = 120.0  # seconds that a rank waits for the others, in addition to twice the budget


def calibrate(args: argparse.Namespace) -> int:
    """Measure and write; returns 1 when a rank fails.  Raises LaunchError for mistakes, before anything starts."""
    output = Path(args.output)
    started = is_rank()
    if not started or os.environ["RANK"] == "0":
        check_output(output)
    if started:
        guarded(partial(_as_rank, args, output))
        return 0
    world = ranks_to_start(args.ranks, args.backend)
    if not args.quiet:
        _say(f"measuring {units.numbered(world, 'rank')} for about {args.budget:g} s")
        _warn_when_busy()
    options = ["--output", args.output, "--budget", str(args.budget)]
    options += ["--backend", args.backend] if args.backend else []
    options += [f"--{flag}" for flag in ("separate", "json", "quiet", "all") if getattr(args, flag)]
    return torchrun(["-m", "splitc.cli", "calibrate", *options], world).returncode and 1


def check_output(path: Path) -> None:
    """Raises LaunchError when a cluster cannot be written there, or would overwrite a file that is no cluster."""
    if path.suffix != ".toml":
        raise LaunchError(f"{path} is no name for a cluster file; it must end in .toml: -o cluster.toml")
    check_writable("-o", path)
    if path.exists():
        try:
            parse_cluster(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError, CostError) as error:
            raise LaunchError(
                f"{path} is there and is no cluster file, so it is not overwritten; give another one with -o ({error})"
            ) from error


def ranks_to_start(asked: int | None, backend: str | None) -> int:
    """Number of ranks that measure this machine: one per GPU, else one per core, at least 2.

    Raises LaunchError when that many cannot be started, or cannot measure a link.
    """
    if not dist.is_available():
        raise LaunchError(
            "this torch has no torch.distributed, which ranks talk through; install another build of torch"
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and gpus < (asked or 1):
        raise LaunchError(
            f"--backend nccl needs a GPU for each rank; torch sees {gpus} here; leave it out, or say gloo"
        )
    if asked == 1 and not gpus:
        raise LaunchError("--ranks 1: a link has two ends; start 2 ranks or more")
    return asked or gpus or min(max(2, cores()), MOST)


def _as_rank(args: argparse.Namespace, output: Path) -> None:
    if args.ranks is not None:
        raise LaunchError(f"--ranks {args.ranks}: torchrun has started {os.environ['WORLD_SIZE']} ranks; leave it out")
    transport = init(backend=args.backend, timeout=_PATIENCE + 2 * args.budget)
    about = f"measuring for about {args.budget:g} s"
    with Step(about, args.quiet or transport.rank != 0) as step:
        found = measure(
            transport, args.budget, lambda what: step.now(f"{about}: {what}"), separate=args.separate, name=output.stem
        )
    if transport.rank == 0:
        write_file("-o", output, to_toml(found.cluster))
        print(as_json(found, output) if args.json else report(found, output, args.all), flush=True)
    transport.close()


def _warn_when_busy() -> None:
    busy, here = os.getloadavg()[0], cores()
    if busy > _BUSY * here:
        _say(f"this machine was busy in the last minute, load {busy:.1f} on {here} cores: the numbers may be too low")


def _say(text: str) -> None:
    print(f"splitc: {text}", file=sys.stderr, flush=True)


# -- what is printed ---------------------------------------------------------------------------------------------------


def report(found: Calibration, output: Path, everything: bool = False) -> str:
    """The numbers of the cluster, and the command that uses them; everything: the residuals too."""
    rows = [
        (each.what, units.seconds(each.measured), units.seconds(each.fitted), f"{100 * _error(each):+.0f} %")
        for each in found.residuals
    ]
    header = ("what", "measured", "fitted", "error")
    table = tabulate(rows, header, disable_numparse=True, colalign=("left", "right", "right", "right"))
    errors = sorted(abs(_error(each)) for each in found.residuals)
    lines = [table, ""] if everything else []
    if errors:
        lines += [f"errors: half within {errors[len(errors) // 2]:.0%}, all within {errors[-1]:.0%}", ""]
        lines += list(_warnings(found.residuals))
    lines += [*_numbers(found.cluster), "", f"wrote {output}"]
    return "\n".join([*lines, f"use   splitc inspect MODEL --world N --cluster {output}"])


def _warnings(residuals: Sequence[Residual]) -> Iterator[str]:
    """What the fitted numbers do not tell right, the worst first."""
    wrong = sorted((each for each in residuals if abs(_error(each)) >= _MISSES), key=lambda each: -abs(_error(each)))
    if wrong:
        rows = "; ".join(f"{each.what} ({100 * _error(each):+.0f} %)" for each in wrong[:_SHOWN])
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        yield _wrapped("warning", f"prices of what is like these miss by {_MISSES:.0%} and more: {rows}{more}") + "\n"


def _error(each: Residual) -> float:
    return each.fitted / each.measured - 1


def _numbers(cluster: Cluster) -> Iterator[str]:
    yield cluster.name
    shared = f", of which all ranks share {cluster.cores}" if cluster.ranks_share_device else ""
    yield from _device("device", cluster.device, shared)
    if cluster.local_link is not None:
        yield from _link("in a host", cluster.local_link)
    yield from _link("link", cluster.link)
    for each in cluster.unlike:
        ranks = ", ".join(map(str, each.ranks))
        yield from _device(f"rank {ranks}", each.device, "")
        yield from _link(f"rank {ranks}", each.link)
    yield _wrapped("source", cluster.source)


def _device(title: str, device: Device, shared: str) -> Iterator[str]:
    rates = ", ".join(f"{units.flops(rate)}/s {dtype}" for dtype, rate in device.flop_rate.items())
    reached = ", ".join(f"{op} {part:.0%}" for op, part in device.efficiency.items())
    yield _wrapped(
        title,
        f"{device.name}{shared}: {units.nbytes(device.memory)} at {units.nbytes(device.memory_bandwidth)}/s, {rates}; "
        f"reached: {reached}; {units.seconds(device.launch)} to start an op",
    )


def _link(title: str, link: Link) -> Iterator[str]:
    ways = "both ways at once" if link.duplex else "one way at a time"
    shared = ", one for all ranks of a host" if link.shared else ""
    taken = f", {link.processor * 1e9:.2g} ns of computing for each byte" if link.processor else ""
    yield _wrapped(
        title, f"{units.bandwidth(link.bandwidth)}, {ways}{shared}, {units.seconds(link.latency)} a message{taken}"
    )
    for name, rate in link.collectives.items():
        text = f"{name.replace('_', '-')} {units.bandwidth(rate.bandwidth)}, {units.seconds(rate.latency)} a round"
        yield _wrapped("", text)


def _wrapped(title: str, text: str) -> str:
    return textwrap.fill(text, 100, initial_indent=f"  {title:9} ", subsequent_indent=" " * 12)


def as_json(found: Calibration, output: Path) -> str:
    residuals = [{**asdict(each), "error": _error(each)} for each in found.residuals]
    return json.dumps({"written": str(output), "cluster": to_data(found.cluster), "residuals": residuals}, indent=1)
