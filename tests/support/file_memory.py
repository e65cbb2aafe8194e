"""What processes have in memory as they load a build, train it and export its model; run under torchrun."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from splitc.compiled import CompiledProgram
from splitc.runtime.launch.feed import synthetic
from splitc.runtime.launch.main import load_worker
from splitc.runtime.launch.torchrun import torchrun
from splitc.runtime.transport.distributed import init
from tests.support.ranks import sgd


@dataclass(frozen=True)
class FileMemory:
    """Bytes of one process.

    held: of the stage's tensors.  loaded: what loading left beside mapped files.  trained: the peak of loading, some
    steps and an evaluation, over what there was before.  exporting: likewise of exporting.  loss: of the evaluation.
    """

    held: int
    loaded: int
    trained: int
    exporting: int
    loss: float


def in_processes(program: CompiledProgram, folder: Path, steps: int = 0) -> list[FileMemory]:
    """Every rank of a program in a process of its own; the model is exported to `model.pt` in `folder`."""
    build = program.save(folder / "build")
    world = program.plan.world
    done = torchrun(["-m", "tests.support.file_memory", str(build), str(folder), str(steps)], world, quiet=True)
    assert not done.returncode, done.stderr
    return [FileMemory(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(world)]


def memory(name: str) -> int:
    """Bytes that the kernel counts under this name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def peak(reset: bool = False) -> int:
    """The most bytes that the process has had, mapped files among them."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return memory("VmHWM")


def main(build: Path, folder: Path, steps: int) -> None:
    transport = init()
    transport.barrier()
    sgd([torch.zeros(1)]).step()  # which imports much
    anonymous, before = memory("RssAnon"), peak(reset=True)
    worker = load_worker(build, transport, sgd)
    loaded, held = memory("RssAnon") - anonymous, sum(tensor.nbytes for tensor in worker.stage.state_dict().values())
    batch = next(synthetic(worker.rank.spec))
    for _ in range(steps):
        worker.step(*batch)
    loss = float(worker.evaluate(*batch))
    trained, before = peak() - before, peak(reset=True)
    worker.export(folder / "model.pt")
    found = FileMemory(held, loaded, trained, peak() - before, loss)
    (folder / f"{transport.rank}.json").write_text(json.dumps(asdict(found)))
    transport.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
