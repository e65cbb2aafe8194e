"""How wrong are the prices of computing?  A device is measured, and models that it was not measured on train beside it.

One process, one thread, no network.  The models take turns with the microbenchmarks of `splitc calibrate`, so that
whatever else the machine does is the same for both.  Forward and backward are predicted op by op (`roofline`); the
optimizer is left out.

    python -m benchmarks.compute_accuracy
    python -m benchmarks.compute_accuracy examples/resnet.py@16 --seconds 60
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import Tensor

from splitc.cli.model_file import ModelFile, load_model
from splitc.cli.options import positive
from splitc.cost_models.calibration.device_fit import fit_rates
from splitc.cost_models.calibration.devices import time_microbenchmarks
from splitc.cost_models.calibration.microbenchmarks import Microbenchmark, microbenchmarks
from splitc.cost_models.compute.roofline import layer_seconds
from splitc.errors import SplitcError
from splitc.ir.device import Device
from splitc.ir.program import Program
from splitc.passes.analysis import analyse
from splitc.runtime.heap import keep_memory

MODELS = (
    *(f"benchmarks/models/alexnet_quarter.py@{batch}" for batch in (32, 128)),
    *(f"benchmarks/models/vgg_small.py@{batch}" for batch in (32, 128)),
    "benchmarks/models/vgg_small.py:with_batch_norm@64",
    *(f"benchmarks/models/mlp_fat.py@{batch}" for batch in (64, 384)),
    *(f"benchmarks/models/transformer_small.py@{batch}" for batch in (4, 16)),
    "examples/mlp.py@64",
    "examples/resnet.py@8",
)


@dataclass(frozen=True)
class Row:
    """Seconds of a model's forward and backward, predicted and measured."""

    model: str
    predicted: tuple[float, float]
    measured: tuple[float, float]

    @property
    def errors(self) -> tuple[float, float, float]:
        """Of forward, of backward and of both."""
        (a, b), (c, d) = self.predicted, self.measured
        return a / c - 1, b / d - 1, (a + b) / (c + d) - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table.  Returns 0 when no step is off by more than a tenth, else 1."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_memory()
    cpu = torch.device("cpu")
    try:
        files = {argument: _load(argument) for argument in args.models}
        programs = {name: analyse(f.model, f.example) for name, f in files.items()}
    except SplitcError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    models = [_as_microbenchmark(name, file) for name, file in files.items()]
    samples = time_microbenchmarks([*microbenchmarks(cpu), *models], cpu, args.seconds, lambda text: None)
    seconds = {each.what: each.seconds for each in samples if each.what.partition(",")[0] in files}
    rates = fit_rates([each for each in samples if each.what not in seconds])
    device = rates.device("this core", 1e9, {})
    rows = [
        Row(name, _predicted(program, device), (seconds[name], seconds[f"{name}, backward"]))
        for name, program in programs.items()
    ]
    print(table(rows))
    worst = max(abs(row.errors[2]) for row in rows)
    print(f"\nmean error of a step {sum(abs(row.errors[2]) for row in rows) / len(rows):.1%}, worst {worst:.1%}")
    return int(worst > 0.1)


def table(rows: Sequence[Row]) -> str:
    """A line for each model: milliseconds, and how far the prediction is off."""

    def cells(row: Row) -> Iterator[str]:
        for predicted, measured, error in zip(row.predicted, row.measured, row.errors[:2], strict=True):
            yield from (f"{1e3 * measured:.1f}", f"{1e3 * predicted:.1f}", f"{error:+.0%}")
        yield f"{row.errors[2]:+.1%}"

    headers = ["model", "forward ms", "predicted", "", "backward ms", "predicted", "", "step"]
    return tabulate([[row.model, *cells(row)] for row in rows], headers, disable_numparse=True, tablefmt="github")


def _load(argument: str) -> ModelFile:
    path, _, batch = argument.partition("@")
    return load_model(path, batch or None)


def _as_microbenchmark(name: str, file: ModelFile) -> Microbenchmark:
    first, tensor = next(iter(file.example.tensors.items()))

    def step(given: Tensor) -> Tensor:
        values = {**file.example.tensors, first: given}
        loss: Tensor = file.example.loss_of(file.example.output(file.model, values), values)
        return loss

    return Microbenchmark(name, step, tensor, tuple(file.model.parameters()))


def _predicted(program: Program, device: Device) -> tuple[float, float]:
    seconds = [layer_seconds(line.at(program.batch), device, "float32") for line in program.costs.values()]
    return sum(forward for forward, _ in seconds), sum(backward for _, backward in seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compute_accuracy",
        description="Compare predicted with measured seconds of forward and backward, one process and one thread.",
        epilog="exit codes: 0 no step is off by more than a tenth; 1 one is; 2 it could not be run",
        allow_abbrev=False,
    )
    parser.add_argument(
        "models", nargs="*", default=list(MODELS), metavar="MODEL@BATCH", help="a model with a loss, and its batch"
    )
    parser.add_argument("--seconds", type=positive, default=40, metavar="S", help="how long to measure (default: 40)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
