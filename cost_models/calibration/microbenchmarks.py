"""The microbenchmarks that a device is timed on: ops of models, at sizes from small to large.

Each is one op or a few, forward and backward.  The code that counts a model's layers counts them, so that the fitted
rates are those that layers are priced with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Microbenchmark:
    """The forward `run(given)`, and its backward if `given` or `parameters` require gradients."""

    what: str
    run: Run
    given: Tensor
    parameters: tuple[Tensor, ...] = field(default=())


def microbenchmarks(where: torch.device) -> list[Microbenchmark]:
    """All microbenchmarks, in float32.  Batches are larger on a GPU, where small ones would only show its launches."""
    batch = _GPU_BATCH if where.type == "cuda" else 1
    with torch.device(where):
        return [
            *_products(batch),
            *_convolutions(batch),
            *_attention(batch),
            *_by_memory(batch),
            *_updates(),
            *_small(),
        ]


def products(where: torch.device, dtype: torch.dtype) -> list[Microbenchmark]:
    """Square matrix products in another dtype, forward only, the smallest first."""
    sizes = (1024, 2048, 4096) if where.type == "cuda" else (192, 384, 768)
    squares = [torch.ones(n, n, dtype=dtype, device=where) for n in sizes]
    return [
        Microbenchmark(f"product of {len(each)} x {len(each)}", partial(torch.matmul, each), each) for each in squares
    ]


_GPU_BATCH = 16


def _on_random(what: str, run: Run, *shape: int, first: bool = False) -> Microbenchmark:
    """A module or function on random numbers.  first: its input needs no gradient, like that of a first layer."""
    parameters = tuple(run.parameters()) if isinstance(run, nn.Module) else ()
    return Microbenchmark(what, run, torch.randn(*shape).requires_grad_(not first), parameters)


def _products(batch: int) -> Iterator[Microbenchmark]:
    sizes = (
        *((8, 4096, 1024), (16, 1024, 1024), (32, 2048, 1024), (48, 512, 2048), (64, 2048, 512), (96, 768, 768)),
        *((128, 1024, 1024), (256, 512, 1024), (256, 256, 256), (512, 256, 1024), (512, 256, 3000), (1024, 128, 128)),
        *((2048, 64, 64), (64, 512, 10)),
    )
    for rows, inputs, outputs in sizes:
        yield _on_random(f"linear {rows} x {inputs} -> {outputs}", nn.Linear(inputs, outputs), rows * batch, inputs)
    lstm = nn.LSTM(128, 128)
    sequences = torch.randn(24, 16 * batch, 128)
    yield Microbenchmark("lstm 16 x 24 x 128", lambda given: lstm(given)[0], sequences, tuple(lstm.parameters()))


def _convolutions(batch: int) -> Iterator[Microbenchmark]:
    for images, inputs, outputs, kernel, stride, side in (
        *((8, 3, 64, 7, 2, 96), (16, 3, 32, 3, 1, 48), (16, 3, 48, 11, 4, 96), (32, 1, 16, 5, 1, 28)),
        *((16, 16, 16, 3, 1, 48), (32, 8, 16, 3, 1, 24), (32, 16, 32, 3, 1, 24), (8, 32, 32, 3, 1, 48)),
        *((16, 32, 64, 3, 2, 32), (16, 64, 64, 3, 1, 24), (16, 128, 128, 3, 1, 12), (32, 256, 256, 3, 1, 4)),
        *((32, 96, 96, 3, 1, 6), (64, 64, 64, 3, 1, 3), (32, 24, 48, 5, 1, 12), (32, 40, 40, 3, 1, 12)),
        *((16, 64, 64, 1, 1, 24), (16, 256, 64, 1, 1, 12), (16, 64, 256, 1, 1, 12), (16, 128, 256, 1, 2, 12)),
    ):
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)
        what = f"conv {images} x {inputs} x {side} x {side} -> {outputs}, {kernel} x {kernel}"
        yield _on_random(what, conv, images * batch, inputs, side, side, first=inputs < 4)
    for images, channels, side in ((16, 64, 24), (32, 128, 12)):
        conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        what = f"depthwise conv {images} x {channels} x {side} x {side}"
        yield _on_random(what, conv, images * batch, channels, side, side)


def _attention(batch: int) -> Iterator[Microbenchmark]:
    for examples, heads, time, width in ((8, 4, 48, 32), (8, 4, 128, 64), (2, 8, 256, 32), (2, 4, 512, 64)):
        what = f"attention {examples} x {heads} x {time} x {width}"
        yield _on_random(what, _attend, 3, examples * batch, heads, time, width)
    yield _on_random("attention by products 8 x 4 x 96 x 32", _attend_by_products, 3, 8 * batch, 4, 96, 32)


def _by_memory(batch: int) -> Iterator[Microbenchmark]:
    for n in (1 << 16, 1 << 19, 1 << 21):
        for what, run in _ELEMENTWISE.items():
            if n < 1 << 21 or what in ("relu", "sum"):
                yield _on_random(f"{what} of {n}", run, n * batch)
    for n in (1 << 14, 1 << 18):
        yield _on_random(f"dropout of {n}", nn.Dropout(), n * batch)
    for shape in ((32, 16, 24, 24), (16, 64, 16, 16), (32, 128, 6, 6)):
        size = " x ".join(map(str, shape))
        images = (shape[0] * batch, *shape[1:])
        yield _on_random(f"batch norm of {size}", nn.BatchNorm2d(shape[1]), *images)
        yield _on_random(f"max pool 2 of {size}", nn.MaxPool2d(2), *images)
        yield _on_random(f"max pool 3 of {size}", nn.MaxPool2d(3, 2), *images)
        yield _on_random(f"average pool of {size}", nn.AvgPool2d(2), *images)
    yield _on_random("adaptive pool of 16 x 64 x 9 x 9", nn.AdaptiveAvgPool2d(5), 16 * batch, 64, 9, 9)
    for rows, width in ((384, 160), (1024, 384), (4096, 192)):
        yield _on_random(f"layer norm of {rows} x {width}", nn.LayerNorm(width), rows * batch, width)
    for rows, classes in ((96, 1000), (384, 5000)):
        loss = partial(F.cross_entropy, target=torch.randint(classes, (rows * batch,)))
        yield _on_random(f"cross entropy of {rows} x {classes}", loss, rows * batch, classes)
    for rows, width, looked_up in ((6000, 96, 1024), (20000, 64, 2048)):
        table = nn.Embedding(rows, width)
        given = torch.randint(rows, (looked_up * batch,))
        yield Microbenchmark(f"embedding {looked_up} of {rows} x {width}", table, given, (table.weight,))
    yield _on_random("permuted heads 12 x 96 x 3 x 4 x 40", _permuted_heads, 12 * batch, 96, 3, 4, 40)


def _updates() -> Iterator[Microbenchmark]:
    """Optimizer updates of parameters and gradients that are not in the caches."""
    for what, update, copies in (("SGD", _sgd, 1), ("SGD with momentum", _momentum, 2), ("Adam", _adam, 3)):
        for n in (1 << 13, 1 << 20):
            held = [torch.full((n,), 1e-3) for _ in range(1 + copies)]
            yield Microbenchmark(f"update of {n} by {what}", partial(_updated, update, held), torch.zeros(1))


def _small() -> Iterator[Microbenchmark]:
    """Several ops at a time, so small that launches dominate."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(24, 24), nn.ReLU())]
    yield _on_random("small perceptron", nn.Sequential(*layers), 6, 24)
    images = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
    network = nn.Sequential(*images, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    yield _on_random("small convolutions", network, 4, 16, 4, 4)
    yield _on_random("small norms", nn.Sequential(*(nn.LayerNorm(20) for _ in range(6)), nn.GELU()), 16, 20)
    yield _on_random("small residuals", _residuals, 256)


# -- functions ---------------------------------------------------------------------------------------------------------


def _attend(stacked: Tensor) -> Tensor:
    q, k, v = stacked.unbind(0)
    return F.scaled_dot_product_attention(q, k, v)


def _attend_by_products(stacked: Tensor) -> Tensor:
    q, k, v = stacked.unbind(0)
    return (q @ k.transpose(-2, -1) * 0.1).softmax(-1) @ v


def _updated(update: Callable[..., object], held: list[Tensor], value: Tensor) -> Tensor:
    update(*held)
    return value


def _sgd(parameter: Tensor, gradient: Tensor) -> None:
    parameter.add_(gradient, alpha=-1e-6)


def _momentum(parameter: Tensor, gradient: Tensor, momentum: Tensor) -> None:
    momentum.mul_(0.9).add_(gradient)
    parameter.add_(momentum, alpha=-1e-6)


def _adam(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
    mean.lerp_(gradient, 0.1)
    square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    parameter.addcdiv_(mean, square.sqrt().div_(0.03).add_(1e-8), value=-1e-6)


def _permuted_heads(value: Tensor) -> Tensor:
    return value.permute(2, 0, 3, 1, 4).contiguous()


def _residuals(value: Tensor) -> Tensor:
    for _ in range(8):
        value = value + F.relu(value * 0.5)
    return value


_ELEMENTWISE: dict[str, Run] = {
    "relu": lambda x: F.relu(x * 1.5),
    "residual": lambda x: x + F.relu(x),
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "sum": lambda x: x.view(64, -1).sum(0),
}
