"""What steps cost on a device beside torch's own: seconds and launches, in one process.

A rank's program runs as it would among others, but what it sends is dropped and what it receives is there at once
(`NullTransport`), so this is the cost of computing alone.  Both run on the same device in turns.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import splitc
from examples import alexnet, resnet, transformer
from splitc.compiled import CompiledProgram
from splitc.cost_models.memory.null_transport import NullTransport
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.weights import first_names
from splitc.runtime.worker import Worker

Step = Callable[[], object]
Batch = tuple[Any, ...]

WITHIN = 1.02  # how many times as long as the plain model a rank's step may take


@dataclass(frozen=True)
class Row:
    """A line of the table.  ok: None where nothing is demanded, or where it cannot be had on this machine."""

    part: str
    what: str
    got: str
    wanted: str = ""
    ok: bool | None = None


@dataclass(frozen=True)
class Scale:
    """How large the models are: `LARGE` for a GPU, where a step is a few milliseconds at least; `SMALL` to try it."""

    layers: int
    width: int
    batch: int
    image: int
    alexnet: float
    resnet: int
    rounds: int
    steps: int


LARGE = Scale(layers=12, width=1024, batch=64, image=224, alexnet=1.0, resnet=64, rounds=9, steps=10)
SMALL = Scale(layers=2, width=16, batch=4, image=64, alexnet=0.05, resnet=4, rounds=2, steps=1)


@dataclass(frozen=True)
class Cost:
    """Seconds of a step by the host's clock, the device idle before and after several; launches: of kernels.

    On a CPU a launch is an op that torch dispatches.
    """

    seconds: float
    launches: int

    def minus(self, other: Cost, parts: int) -> Cost:
        """What each of so many parts adds to another step."""
        return Cost((self.seconds - other.seconds) / parts, round((self.launches - other.launches) / parts))

    def __str__(self) -> str:
        return f"{1e3 * self.seconds:.3f} ms, {self.launches} launches"


def costs(steps: Sequence[Step], device: torch.device, scale: Scale) -> list[Cost]:
    """The cost of each step; they take turns, and the median of the rounds counts."""
    for step in steps:
        for _ in range(3):
            step()
    seconds: list[list[float]] = [[] for _ in steps]
    for k in range(scale.rounds):
        for step, found in list(zip(steps, seconds, strict=True))[:: 1 - 2 * (k % 2)]:
            settle(device)
            begin = time.perf_counter()
            for _ in range(scale.steps):
                step()
            settle(device)
            found.append((time.perf_counter() - begin) / scale.steps)
    return [Cost(statistics.median(s), launches(step, device)) for step, s in zip(steps, seconds, strict=True)]


def settle(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def launches(step: Step, device: torch.device) -> int:
    """Kernels, copies and fills that a step starts on a GPU; on a CPU ops that call no others."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as seen:
        step()
        settle(device)
    events = seen.events() or []
    if on_gpu:
        return sum(event.device_type.name == "CUDA" for event in events)
    return sum(event.name.startswith("aten::") and not event.cpu_children for event in events)


# -- steps -------------------------------------------------------------------------------------------------------------


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def plain(model: nn.Module, loss: Any, batch: Batch, device: torch.device, backend: str | None = None) -> Step:
    """A step of the plain model on the device; backend: of torch.compile."""
    model = copy.deepcopy(model).to(device).train()
    optimizer = sgd(model.parameters())
    *inputs, target = (tensor.to(device) for tensor in batch)
    run: Any = torch.compile(model, backend=backend) if backend else model

    def step() -> None:
        optimizer.zero_grad()
        loss(run(*inputs), target).backward()
        optimizer.step()

    return step


def of_rank(program: CompiledProgram, batch: Batch, device: torch.device, **options: Any) -> Step:
    """A step of rank 0 on the device, without communication."""
    transport = NullTransport(0, program.plan, lambda tensors: None)
    transport.device = device
    weights = program.weights()
    part = load_rank(program.files, 0, program.request.own)
    whole = {**weights["state"], **weights["extra"]}
    worker = Worker(part, transport, whole, first_names(weights["state"]), sgd, **options)
    given = [tensor.to(device) for tensor in batch]
    return lambda: worker.step(*given)


def compiled(model: nn.Module, loss: Any, batch: Batch, world: int = 1, strategy: str = "data_parallel") -> Any:
    """Compile for a cluster whose prices do not matter here."""
    *inputs, target = batch
    strategy = "single_device" if world == 1 else strategy
    return splitc.compile(model, world, tuple(inputs), target, loss, cluster="a100-100gbe", strategy=strategy)


def models(scale: Scale) -> Iterator[tuple[str, nn.Module, Any, Batch]]:
    """A transformer, a ResNet with BatchNorm, and AlexNet with dropout."""
    torch.manual_seed(0)
    size, heads, words = (scale.batch // 4, min(scale.width, 256)), max(scale.width // 64, 2), 8 * scale.width
    language = transformer.transformer(words, scale.width, scale.layers // 2, heads, size[1])
    text = *transformer.example(*size, words), transformer.target(*size, words)
    yield "transformer", language, transformer.loss, text
    small = *resnet.example(2 * scale.batch), resnet.target(2 * scale.batch)
    yield "resnet", resnet.resnet18(scale.resnet), resnet.loss, small
    images = *alexnet.example(scale.batch, scale.image), alexnet.target(scale.batch, 10)
    yield "alexnet", alexnet.alexnet(scale.alexnet, 10), alexnet.loss, images


# -- rows --------------------------------------------------------------------------------------------------------------


def steps(device: torch.device, scale: Scale) -> Iterator[Row]:
    """A rank's step beside the plain model's."""
    for name, model, loss, batch in models(scale):
        usual, ours = costs(
            [plain(model, loss, batch, device), of_rank(compiled(model, loss, batch), batch, device)], device, scale
        )
        yield compared("steps", name, usual, ours, device)


def compiled_stages(device: torch.device, scale: Scale, backend: str = "inductor") -> Iterator[Row]:
    """The same, where torch.compile compiles the stages and the plain model."""
    if "compile_stages" not in signature(Worker).parameters:
        yield Row("compiled", "all", "this version has no compile_stages")
        return
    for name, model, loss, batch in models(scale):
        torch._dynamo.reset()
        worker = of_rank(compiled(model, loss, batch), batch, device, compile_stages=backend)
        usual, ours = costs([plain(model, loss, batch, device, backend), worker], device, scale)
        yield compared("compiled", name, usual, ours, device)


def compared(part: str, name: str, usual: Cost, ours: Cost, device: torch.device) -> Row:
    """How many times as long as the plain model's the step takes; on a GPU that is to be within `WITHIN`."""
    ratio = ours.seconds / usual.seconds
    wanted, ok = (f"at most {WITHIN}", ratio <= WITHIN) if device.type == "cuda" else ("", None)
    return Row(part, name, f"{ratio:.3f}: {ours}; plain {usual}", wanted, ok)


def dropout(device: torch.device, scale: Scale) -> Iterator[Row]:
    """What each dropout adds to linear layers, forward and backward."""
    width, count = scale.width, scale.layers
    batch = torch.randn(scale.batch * 16, width), torch.randn(scale.batch * 16, width)
    found = []
    for p in (0.1, None):
        drop = [] if p is None else [nn.Dropout(p)]
        model = nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(width, width), *drop)))
        found += [plain(model, F.mse_loss, batch, device), of_rank(compiled(model, F.mse_loss, batch), batch, device)]
    usual, ours, usual_without, without = costs(found, device, scale)
    each, own = ours.minus(without, count), usual.minus(usual_without, count)
    yield Row("dropout", f"each, of {batch[0].numel():,} numbers", f"{each}; torch's {own}")


def norms(device: torch.device, scale: Scale) -> Iterator[Row]:
    """What it adds to each BatchNorm that its statistics are of two ranks, without their messages."""
    channels, count = max(scale.width // 16, 4), scale.layers
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(count):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    batch = torch.randn(scale.batch, 3, 56, 56), torch.randint(0, 10, (scale.batch,))
    found = [plain(model, F.cross_entropy, batch, device)]
    for options in ("", "(sync_batchnorm=True)"):
        found.append(of_rank(compiled(model, F.cross_entropy, batch, 2, f"data_parallel{options}"), batch, device))
    usual, own, synchronised = costs(found, device, scale)
    yield Row("norms", f"{count} of {channels} channels", f"{own}; plain {usual}")
    yield Row("norms", "each, synchronised, beyond the rank's own", str(synchronised.minus(own, count)))


Rows = Callable[[torch.device, Scale], Iterator[Row]]
PARTS: dict[str, Rows] = {"steps": steps, "dropout": dropout, "norms": norms, "compiled": compiled_stages}
