"""The life of a run as a user's script has it: train, save meanwhile, evaluate, predict, export; and resume.

`lives` starts it under torchrun, once to train and once to resume.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import splitc
from splitc.runtime.launch.torchrun import torchrun
from splitc.runtime.transport.distributed import started_world
from splitc.runtime.worker import Worker
from tests.support.every_strategy import Small, images
from tests.support.ranks import sgd

STEPS, SAVED = 6, 3


@dataclass(frozen=True)
class Life:
    """What rank 0 saw: losses of its steps, the loss of an epoch in evaluation, and of a plain model with its export.

    device: where the ranks computed.  nccl: whether tensors went from GPU to GPU.
    """

    losses: list[float]
    evaluated: float
    plain: float
    device: str
    nccl: bool


def lives(strategy: str, world: int, folder: Path) -> tuple[Life, Life]:
    """A run of `STEPS` steps, and another process's that goes on after `SAVED` of them."""
    found = []
    for way in ("train", "resume"):
        done = torchrun(["-m", "tests.support.whole_life", str(folder), strategy, way], world, quiet=True)
        assert not done.returncode, done.stderr
        found.append(Life(**json.loads((folder / f"{way}.json").read_text())))
    return found[0], found[1]


def live(folder: Path, strategy: str, resume: bool) -> Life:
    """One rank's part."""
    cudnn: Any = torch.backends.cudnn
    cudnn.conv.fp32_precision, cudnn.deterministic = "ieee", True
    torch.manual_seed(5)
    given, labels = images(96)
    dataset, model = TensorDataset(given, labels), Small(norm=True, drop=0.5)
    options: dict[str, Any] = {"cluster": "v100-10gbe", "strategy": strategy}
    program = splitc.compile(model, started_world() or 1, given[:4], labels[:4], F.cross_entropy, **options)
    worker = program.worker(sgd)
    assert isinstance(worker, Worker)
    loader = worker.loader(dataset, 4, seed=1)
    if resume:
        worker.resume(folder / "run")
    losses: list[float] = []
    for batch in loader:
        losses.append(worker.step(*batch).item())
        if worker.steps == SAVED:
            worker.save(folder / "run", asynchronous=True)
        if worker.steps == STEPS:
            break
    worker.close()
    evaluated = float(worker.evaluate(worker.loader(dataset, 4, shuffle=False)))
    file = folder / ("resume.pt" if resume else "train.pt")
    worker.export(file)
    plain = check_export(model, file, worker, dataset)
    transport = worker.rank.transport
    return Life(losses, evaluated, plain, str(transport.device), transport.waits_hold_the_stream)


def check_export(model: Small, file: Path, worker: Worker, dataset: TensorDataset) -> float:
    """The loss of a plain model with what was exported; its outputs must be those that the ranks predict."""
    model.load_state_dict(torch.load(file))
    model.eval()
    predicted = worker.predict(*([dataset[:4][0]] if worker.data_rank is not None else []))
    with torch.no_grad():
        if predicted is not None:
            torch.testing.assert_close(predicted.cpu(), model(dataset[:4][0]), rtol=1e-4, atol=1e-5)
        given, labels = dataset.tensors
        return float(F.cross_entropy(model(given), labels))


if __name__ == "__main__":
    place, asked, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    life = live(place, asked, how == "resume")
    if torch.distributed.get_rank() == 0:
        (place / f"{how}.json").write_text(json.dumps(asdict(life)))
    torch.distributed.destroy_process_group()
