"""What processes have in memory as they load a build and export its model; run under torchrun."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from splitc.compiled import CompiledProgram
from splitc.runtime.launch.main import load_worker
from splitc.runtime.launch.torchrun import torchrun
from splitc.runtime.transport.distributed import init
from tests.support.ranks import sgd


@dataclass(frozen=True)
class FileMemory:
    """Bytes of one process.

    held: of the stage's tensors.  loaded: what loading left beside mapped files.  exporting: the peak of exporting over
    what there was before, mapped files among it.
    """

    held: int
    loaded: int
    exporting: int


def in_processes(program: CompiledProgram, folder: Path) -> list[FileMemory]:
    """Every rank of a program in a process of its own; the model is exported to `model.pt` in `folder`."""
    build = program.save(folder / "build")
    world = program.plan.world
    done = torchrun(["-m", "tests.support.file_memory", str(build), str(folder)], world, quiet=True)
    assert not done.returncode, done.stderr
    return [FileMemory(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(world)]


def memory(name: str) -> int:
    """Bytes that the kernel counts under this name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main(build: Path, folder: Path) -> None:
    transport = init()
    transport.barrier()
    sgd([torch.zeros(1)]).step()  # which imports much
    before = memory("RssAnon")
    worker = load_worker(build, transport, sgd)
    loaded, held = memory("RssAnon") - before, sum(tensor.nbytes for tensor in worker.stage.state_dict().values())
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmHWM")
    worker.export(folder / "model.pt")
    found = FileMemory(held, loaded, memory("VmHWM") - before)
    (folder / f"{transport.rank}.json").write_text(json.dumps(asdict(found)))
    transport.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
