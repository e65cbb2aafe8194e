"""Train a build for a few given steps and keep what `verify` compares: losses, gradients, the state."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .distributed import init
from .launch import guarded, load_weights
from .loader import load_rank
from .transport import LaunchError, Transport
from .worker import Worker

Feeds = Sequence[Sequence[tuple[Tensor, ...]]]
"""For each step, for each reader, its batch."""


@dataclass
class Trial:
    """One rank's losses and gradients by step, and on rank 0 the whole state after the last one."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]


def run_trial(source: Path | Mapping[str, str], transport: Transport, weights: Mapping[str, Any], feeds: Feeds,
              sizes: Sequence[int], learning_rate: float, momentum: float) -> Trial:
    """Train this rank on `feeds` with SGD, dropout off.  weights: what weights.pt holds."""
    part = load_rank(source, transport.rank)

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=learning_rate, momentum=momentum)

    worker = Worker(part, transport, {**weights["state"], **weights["extra"]}, list(weights["state"]), optimizer)
    worker.use_sizes(sizes)
    worker.drops = False
    trial = Trial([], [], {})
    for feed in feeds:
        batch = feed[worker.data_rank] if worker.data_rank is not None else ()
        trial.losses.append(float(worker.step(*batch)))
        trial.gradients.append({n: p.grad.detach().cpu().clone() for n, p in worker.stage.named_parameters()
                                if p.grad is not None})
    trial.state = worker.state_dict() or {}
    return trial


def torchrun(arguments: Sequence[str], world: int, quiet: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `arguments` on `world` processes of this machine.  quiet: keep the output instead of showing it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *arguments]
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world)), **os.environ}
    return subprocess.run(command, text=True, capture_output=quiet, env=environment, check=False, **options)


def torchrun_trial(folder: Path, files: Mapping[str, str], weights: Mapping[str, Any], world: int, feeds: Feeds,
                   sizes: Sequence[int], learning_rate: float, momentum: float) -> list[Trial]:
    """`run_trial` in `world` real processes.  Raises LaunchError with their output when one fails."""
    for name, text in files.items():
        (folder / name).write_text(text)
    torch.save(dict(weights), folder / "weights.pt")
    torch.save({"feeds": feeds, "sizes": list(sizes), "rate": learning_rate, "momentum": momentum}, folder / "trial.pt")
    done = torchrun(["-m", "splitc.runtime.trial", str(folder)], world, quiet=True)
    if done.returncode:
        raise LaunchError(f"the ranks failed:\n{done.stderr[-4000:]}")
    saved = torch.load(folder / "result.pt", weights_only=True)
    return [Trial(**trial) for trial in saved]


def _main() -> None:
    parser = argparse.ArgumentParser(description="one rank of a trial; started by torchrun")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    given = torch.load(folder / "trial.pt", weights_only=True)
    transport = init()
    weights, keys = load_weights(folder)
    state = {"state": {k: weights[k] for k in keys}, "extra": {k: v for k, v in weights.items() if k not in keys}}
    trial = run_trial(folder, transport, state, given["feeds"], given["sizes"], given["rate"], given["momentum"])
    trials = transport.gather_objects(vars(trial))
    if trials is not None:
        torch.save(trials, folder / "result.pt")
    transport.close()


if __name__ == "__main__":
    guarded(_main)
