"""Train a build for a few steps on given batches, and keep what `verify` compares: losses, gradients, the state."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import RanksFailed
from ..spec import Shard
from ..transport.base import Transport
from ..transport.distributed import init
from ..weights import first_names
from ..worker import Worker
from .failures import guarded
from .loader import load_rank
from .torchrun import torchrun

__all__ = ["Feeds", "Trial", "ieee_float32", "run_trial", "torchrun", "torchrun_trial"]

Feeds = Sequence[Sequence[tuple[Tensor, ...]]]
"""For each step, for each reader, its batch."""


@dataclass
class Trial:
    """One rank's losses and gradients of every step, and on rank 0 the whole state after each that ends a round.

    shards: parameter -> the part of it that the rank holds, and has the gradient of; the whole of all others.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    shards: dict[str, Shard] = field(default_factory=dict)


@contextmanager
def ieee_float32() -> Iterator[None]:
    """Compute float32 on GPUs with all its bits, as a reference on the CPU does; TF32 has 10 of 23."""
    cudnn: Any = torch.backends.cudnn
    with ExitStack() as restored:
        for kind in (cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul):
            restored.callback(setattr, kind, "fp32_precision", kind.fp32_precision)
            kind.fp32_precision = "ieee"
        yield


def run_trial(
    source: Path | Mapping[str, str],
    transport: Transport,
    weights: Mapping[str, Mapping[str, Tensor]],
    feeds: Feeds,
    sizes: Sequence[int],
    learning_rate: float,
    momentum: float,
    period: int = 1,
    compile_stages: bool | str = False,
    own: Mapping[str, Any] | None = None,
) -> Trial:
    """Train this rank on `feeds` with SGD.

    weights: what weights.pt holds.  period: steps to each state, which ends a round.  own: see `load_rank`.
    """

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=learning_rate, momentum=momentum)

    tensors, keys = {**weights["state"], **weights["extra"]}, first_names(weights["state"])
    program = load_rank(source, transport.rank, own)
    scale = 1024.0 if program.rank.scales_loss else None  # none is skipped for an overflow
    worker = Worker(
        program, transport, tensors, keys, optimizer, accumulate=1, loss_scale=scale, compile_stages=compile_stages
    )
    worker.use_sizes(sizes)
    trial = Trial(shards=dict(worker.shards))
    for step, feed in enumerate(feeds, 1):
        batch = feed[worker.data_rank] if worker.data_rank is not None else ()
        trial.losses.append(float(worker.step(*batch)))
        gradients = worker.gradients()
        trial.gradients.append({n: gradient.to_dense().to("cpu", copy=True) for n, gradient in gradients.items()})
        state = worker.state_dict() if step % period == 0 or step == len(feeds) else {}
        if state is not None and transport.rank == 0:
            trial.states.append(state)
    return trial


def torchrun_trial(
    folder: Path, files: Mapping[str, str], weights: Mapping[str, Any], world: int, *given: Any
) -> list[Trial]:
    """`run_trial` in `world` real processes, given its arguments from `feeds` on.

    Raises RanksFailed with the first error of a rank when one fails.
    """
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    torch.save(dict(weights), folder / "weights.pt")
    torch.save(given, folder / "trial.pt")
    done = torchrun(["-m", "splitc.runtime.launch.trial", str(folder)], world, quiet=True)
    if done.returncode:
        raise RanksFailed(f"the ranks failed:\n{done.stderr}")
    saved = torch.load(folder / "result.pt", weights_only=True)
    return [Trial(**{**trial, "shards": {k: Shard(*v) for k, v in trial["shards"].items()}}) for trial in saved]


@ieee_float32()
def _main() -> None:
    parser = argparse.ArgumentParser(description="one rank of a trial; started by torchrun")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    given = torch.load(folder / "trial.pt", weights_only=True)
    weights = torch.load(folder / "weights.pt", weights_only=True, mmap=True)
    transport = init()
    trial = run_trial(folder, transport, weights, *given)
    plain = {**vars(trial), "shards": {name: tuple(shard) for name, shard in trial.shards.items()}}
    trials = transport.gather_objects(plain)
    if trials is not None:
        torch.save(trials, folder / "result.pt")
    transport.close()


if __name__ == "__main__":
    guarded(_main)
