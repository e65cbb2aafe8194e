"""PyTorch's own parallel training as the oracle: DistributedDataParallel, and tensor parallelism by columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from splitc.ir.placements import Placement
from splitc.runtime.launch.torchrun import torchrun
from splitc.runtime.worker import Worker
from tests.support.every_strategy import Small, images, planned
from tests.support.ranks import assert_same, on_workers, part_of

WORLD, STEPS = 2, 3

SCRIPT = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.every_strategy import Small

folder = Path(sys.argv[1])
given = torch.load(folder / "given.pt", weights_only=True)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def trained(model, parts):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    losses = []
    for images, labels in parts:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def fresh():
    model = Small().double()
    model.load_state_dict(given["state"])
    return model


replica = fresh()
parts = [(x.chunk(world)[rank], y.chunk(world)[rank]) for x, y in given["batches"]]
losses = trained(DistributedDataParallel(replica), parts)
for loss in losses:
    dist.all_reduce(loss)
divided = fresh()
mesh = init_device_mesh("cpu", (world,))
parallelize_module(divided, mesh, {name: ColwiseParallel(output_layouts=Replicate()) for name in ("fc6", "fc7", "fc8")})
trained(divided, given["batches"])
result = {
    "losses": [float(loss) / world for loss in losses],
    "ddp": replica.state_dict(),
    "columns": {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in divided.named_parameters()},
}
torch.save(result, folder / f"result{rank}.pt")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    torch.manual_seed(8)
    return {
        "state": Small().double().state_dict(),
        "batches": [images(4 * WORLD, torch.float64) for _ in range(STEPS)],
    }


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory, given: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank has after PyTorch's own training."""
    folder: Path = tmp_path_factory.mktemp("oracle")
    (folder / "oracle.py").write_text(SCRIPT)
    torch.save(given, folder / "given.pt")
    done = torchrun([str(folder / "oracle.py"), str(folder)], WORLD, quiet=True)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"result{rank}.pt", weights_only=True) for rank in range(WORLD)]


def ours(strategy: str, given: dict[str, Any], **options: Any) -> list[tuple[list[float], dict[str, Tensor], Any]]:
    """Every rank's losses, its own parameters, and on rank 0 the whole state."""
    program = planned(WORLD, strategy, torch.float64, **options)

    def run(worker: Worker) -> tuple[list[float], dict[str, Tensor], Any]:
        worker.load_state_dict(given["state"])
        losses = [float(worker.step(*part_of(worker, batch, program.plan.local_batches))) for batch in given["batches"]]
        own = {name: p.detach().clone() for name, p in worker.stage.named_parameters()}
        return losses, own, worker.state_dict()

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.05)

    return on_workers(program, run, optimizer=sgd)


@pytest.mark.processes
@pytest.mark.slow
def test_data_parallel_trains_as_distributed_data_parallel_does(given: dict[str, Any], oracle: list[Any]) -> None:
    for (losses, _, _), theirs in zip(ours("data_parallel", given), oracle, strict=True):
        assert losses == pytest.approx(theirs["losses"], rel=1e-12)
    assert_same(ours("data_parallel", given)[0][2], oracle[0]["ddp"], tolerance=1e-12)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["BK", "B", "B/K"])
def test_layers_divided_by_columns_hold_the_parts_of_tensor_parallelism(
    given: dict[str, Any], oracle: list[Any], scheme: str
) -> None:
    pins = {"fc*": Placement(holding="sharded", group=WORLD, split="columns")}
    for (_, own, _), theirs in zip(
        ours(f"modulo_shard(mp={WORLD},scheme={scheme})", given, pins=pins), oracle, strict=True
    ):
        assert own.keys() == theirs["columns"].keys()
        assert_same(dict(sorted(own.items())), dict(sorted(theirs["columns"].items())), tolerance=1e-12)
