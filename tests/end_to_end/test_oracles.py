"""PyTorch's own parallel training as the oracle: DistributedDataParallel, and tensor parallelism on real processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.ir.placements import Placement
from splitc.runtime.launch.torchrun import torchrun
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.every_strategy import Small, images, planned
from tests.support.forked import as_executable
from tests.support.ranks import assert_same, on_workers, part_of

WORLD, STEPS = 2, 3

SCRIPT = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.every_strategy import Small

folder = Path(sys.argv[1])
given = torch.load(folder / "given.pt", weights_only=True)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def trained(model, parts, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    losses = []
    for images, labels in parts:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels, **options)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def fresh(state="state"):
    model = Small()
    model.fc8 = torch.nn.Linear(13, len(given[state]["fc8.bias"]))
    model.double().load_state_dict(given[state])
    return model


replica = fresh()
parts = [(x.chunk(world)[rank], y.chunk(world)[rank]) for x, y in given["batches"]]
losses = trained(DistributedDataParallel(replica), parts)
for loss in losses:
    dist.all_reduce(loss)
mesh = init_device_mesh("cpu", (world,))


def divided(plan, state="state"):
    model = fresh(state)
    parallelize_module(model, mesh, plan)
    return model


def parts_of(model):
    return {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in model.named_parameters()}


whole = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("fc6", "fc7", "fc8")}
pair = {"fc6": ColwiseParallel(), "fc7": RowwiseParallel()}
rows = {name: RowwiseParallel(input_layouts=Replicate()) for name in ("fc6", "fc7")}
classes = {**pair, "fc8": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
result = {"losses": [float(loss) / world for loss in losses], "ddp": replica.state_dict()}
for name, plan in (("columns", whole), ("pair", pair), ("rows", rows)):
    model = divided(plan)
    trained(model, given["batches"])
    result[name] = parts_of(model)
model = divided(classes, "wide")
with loss_parallel():
    result["classes losses"] = [float(loss) for loss in trained(model, given["batches"], ignore_index=2)]
result["classes"] = parts_of(model)
torch.save(result, folder / f"result{rank}.pt")
dist.destroy_process_group()
"""


def wide() -> Small:
    """One whose logits cost more to gather than a divided loss sums."""
    model = Small()
    model.fc8 = nn.Linear(13, 21)
    return model.double()


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    torch.manual_seed(8)
    return {
        "state": Small().double().state_dict(),
        "wide": wide().state_dict(),
        "batches": [images(4 * WORLD, torch.float64) for _ in range(STEPS)],
    }


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory, given: dict[str, Any], forking: Path) -> list[dict[str, Any]]:
    """What every rank has after PyTorch's own training."""
    folder: Path = tmp_path_factory.mktemp("oracle")
    (folder / "oracle.py").write_text(SCRIPT)
    torch.save(given, folder / "given.pt")
    with as_executable(forking):
        done = torchrun([str(folder / "oracle.py"), str(folder)], WORLD, quiet=True)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"result{rank}.pt", weights_only=True) for rank in range(WORLD)]


def ours(strategy: str, given: dict[str, Any], **options: Any) -> list[tuple[list[float], dict[str, Tensor], Any]]:
    """Every rank's losses, its own parameters, and on rank 0 the whole state."""
    return trained(planned(WORLD, strategy, torch.float64, **options), given)


def trained(program: CompiledProgram, given: dict[str, Any]) -> list[tuple[list[float], dict[str, Tensor], Any]]:
    """The same of a compiled program."""

    def run(worker: Worker) -> tuple[list[float], dict[str, Tensor], Any]:
        worker.load_state_dict(given["state"])
        losses = [float(worker.step(*part_of(worker, batch, program.plan.local_batches))) for batch in given["batches"]]
        own = {name: p.detach().clone() for name, p in worker.stage.named_parameters()}
        return losses, own, worker.state_dict()

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.05)

    return on_workers(program, run, optimizer=sgd)


@pytest.mark.processes
@pytest.mark.from_scratch
@pytest.mark.slow
def test_data_parallel_trains_as_distributed_data_parallel_does(given: dict[str, Any], oracle: list[Any]) -> None:
    for (losses, _, _), theirs in zip(ours("data_parallel", given), oracle, strict=True):
        assert losses == pytest.approx(theirs["losses"], rel=1e-12)
    assert_same(ours("data_parallel", given)[0][2], oracle[0]["ddp"], tolerance=1e-12)


@pytest.mark.processes
@pytest.mark.from_scratch
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


COLUMNS, ROWS = (Placement(holding="sharded", group=WORLD, split=split) for split in ("columns", "rows"))
WHOLE = Placement(holding="replicated", group=WORLD)


@pytest.mark.processes
@pytest.mark.from_scratch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("pair", {"fc6": COLUMNS, "fc7": ROWS, "fc8": WHOLE}),
        ("rows", {"fc6": ROWS, "fc7": ROWS, "fc8": WHOLE}),
        ("pair", {"fc6": COLUMNS, "fc7": replace(ROWS, state="batch"), "fc8": replace(WHOLE, state="batch")}),
        ("rows", {"fc6": replace(ROWS, state="features"), "fc7": ROWS, "fc8": WHOLE}),
    ],
)
def test_columns_and_rows_hold_the_parts_of_tensor_parallelism(
    given: dict[str, Any], oracle: list[Any], name: str, pins: dict[str, Placement]
) -> None:
    """Megatron's pair, whose sum goes to all ranks or to those with the examples; and rows alone."""
    for rank, ((_, own, _), theirs) in enumerate(zip(ours("mixed", given, pins=pins), oracle, strict=True)):
        assert_parts(own, theirs[name], rank)


def assert_parts(own: dict[str, Tensor], theirs: dict[str, Tensor], rank: int) -> None:
    """The same parts of parameters; of a bias that we divide and PyTorch does not, this rank's."""
    assert own.keys() == theirs.keys()
    parts = {name: t if t.shape == own[name].shape else t.chunk(WORLD)[rank] for name, t in theirs.items()}
    assert_same(dict(sorted(own.items())), dict(sorted(parts.items())), tolerance=1e-12)


def ignoring(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target, ignore_index=2)


@pytest.mark.processes
@pytest.mark.from_scratch
@pytest.mark.slow
def test_cross_entropy_on_divided_logits_is_that_of_the_parallel_loss(given: dict[str, Any], oracle: list[Any]) -> None:
    pins = {"fc6": COLUMNS, "fc7": ROWS, "fc8": replace(COLUMNS, state="features")}
    x, y = images(4, torch.float64)
    program = compiled(wide(), (x,), y, ignoring, WORLD, "mixed", pins=pins)
    assert "comm.cross_entropy(" in "".join(program.files.values())
    results = trained(program, {**given, "state": given["wide"]})
    for rank, ((losses, own, _), theirs) in enumerate(zip(results, oracle, strict=True)):
        assert losses == pytest.approx(theirs["classes losses"], rel=1e-12)
        assert_parts(own, theirs["classes"], rank)


@pytest.mark.processes
@pytest.mark.from_scratch
@pytest.mark.slow
def test_the_pair_on_processes_is_the_training_of_one_process() -> None:
    pins = {"fc6": COLUMNS, "fc7": replace(ROWS, state="batch"), "fc8": replace(COLUMNS, state="features")}
    result = planned(WORLD, "mixed", torch.float64, pins=pins).verify(steps=2, processes=True)
    assert result.holds and result.processes, str(result)
