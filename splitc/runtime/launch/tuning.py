"""The ranks of `splitc tune`: they run the finalists that lie in a folder, and tell on stdout what came of each."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..transport.base import Transport
from ..transport.distributed import init
from ..transport.recorder import Operation, Step
from ..tuning import Finalist, rows_of, tune
from ..worker import Worker
from .failures import guarded
from .loader import load_rank
from .main import load_weights

FINALISTS, BATCH = "finalists.json", "batch.pt"
SCRIPT = f'''"""Run the finalists in this folder."""

from {__name__} import main

main(__file__)
'''


def main(script: str) -> None:
    """Run the finalists in the folder of `script`, and end this process when that fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--out", type=int, action="append", default=[])
    args = parser.parse_args()
    guarded(lambda: _tune(Path(script).resolve().parent, args.budget, args.out))


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def _tune(folder: Path, budget: float, out: list[int]) -> None:
    listed = json.loads((folder / FINALISTS).read_text(encoding="utf-8"))
    files = [each.pop("files") for each in listed]
    finalists = [Finalist(**each, why="out" if k in out else "") for k, each in enumerate(listed)]
    tensors = torch.load(folder / BATCH, weights_only=True)
    weights, keys = load_weights(folder)
    transport = init(tell=True)

    def make(k: int, trial: Transport) -> tuple[Worker, tuple[Tensor, ...]]:
        module = load_rank(files[k], trial.rank)
        return Worker(module, trial, weights, keys, _sgd, live=False), rows_of(module.rank, tensors)

    def note(k: int, each: Finalist | None) -> None:
        said = {"begins": k} if each is None else {"ended": k, **told(each)}
        print(json.dumps(said), flush=True)

    tune(transport, finalists, make, budget, note)
    transport.close()


def told(each: Finalist) -> dict[str, Any]:
    """What a finalist has learned, as plain values."""
    steps = [[asdict(step) for step in rank] for rank in each.steps]
    return {"seconds": each.seconds, "why": each.why, "steps": steps}


def take(each: Finalist, said: dict[str, Any]) -> None:
    """The inverse of `told`."""
    each.seconds, each.why = said["seconds"], said["why"]
    each.steps = [[_step(step) for step in rank] for rank in said["steps"]]


def _step(said: dict[str, Any]) -> Step:
    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    operations = (Operation(**{key: tuples(value) for key, value in each.items()}) for each in said["operations"])
    return Step(said["begin"], said["end"], tuple(operations))
