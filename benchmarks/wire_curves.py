"""Does training with short numbers learn as exact training does?  Losses of five seeds, exact beside bf16 and int8.

Three simulated ranks train with all three kinds of numbers on the wire: two share the first layers, and sum their
gradients, the third has the last ones.  In int8 sums of gradients have error feedback.

    python -m benchmarks.wire_curves                                     print the tables
    python -m benchmarks.wire_curves --page docs/measurements/wire.md    write them there, with the plot beside it
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import splitc
from splitc.runtime.launch.trial import run_trial
from splitc.runtime.transport.simulated import run_ranks

WORLD, STRATEGY, READERS = 3, "layer_separation(n_c=2, n_f=1)", 2
FORMATS = ("exact", "bf16", "int8")
SEEDS, STEPS, MEAN = 5, 100, 10
MARKER = "<!-- python -m benchmarks.wire_curves --page -->"


class Language(nn.Module):
    """Predicts each byte of a line from those before it: a causal attention over 64 features."""

    def __init__(self, context: int = 24) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(128, 64), nn.Embedding(context, 64)
        self.qkv, self.mixed = nn.Linear(64, 192), nn.Linear(64, 64)
        self.hidden, self.out = nn.Linear(64, 128), nn.Linear(128, 128)
        self.register_buffer("place", torch.arange(context))

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the next byte: (batch, context) -> (batch, context, 128)."""
        x = self.bytes(text) + self.places(self.place)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.mixed(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        scores: Tensor = self.out(F.relu(self.hidden(x)))
        return scores


def language_loss(scores: Tensor, following: Tensor) -> Tensor:
    """The cross entropy of a byte."""
    return F.cross_entropy(scores.transpose(1, 2), following)


@dataclass(frozen=True)
class Task:
    """What is learned.  model: made anew for each seed.  data: inputs and targets.  batch: examples of a step."""

    name: str
    about: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: int
    rate: float


def digits(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The 1797 digits of scikit-learn, 8 x 8."""
    from sklearn.datasets import load_digits  # takes a second to load

    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32) / 16
    return images.view(-1, *shape), torch.tensor(found.target)


def text(context: int = 24) -> tuple[Tensor, Tensor]:
    """Windows of the bytes of docs/, and the bytes that follow each one."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    whole = b"".join(page.read_bytes() for page in pages)
    numbers = torch.tensor([byte for byte in whole if byte < 128])
    windows = numbers.unfold(0, context + 1, context)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


TASKS = (
    Task(
        "digits",
        "digits of scikit-learn, layers of 64 - 128 - 64 - 10",
        lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
        partial(digits, (64,)),
        F.cross_entropy,
        64,
        0.1,
    ),
    Task(
        "cnn",
        "the same digits, two convolutions of 16 channels and two linear layers",
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        ),
        partial(digits, (1, 8, 8)),
        F.cross_entropy,
        64,
        0.1,
    ),
    Task("language", "bytes of this documentation, attention over 24 of them", Language, text, language_loss, 32, 0.2),
)


def curve(task: Task, program: splitc.CompiledProgram, seed: int) -> list[float]:
    """The losses of a run from the weights of a seed, on batches in its order."""
    torch.manual_seed(seed)
    inputs, targets = task.data()
    weights = {**program.weights(), "state": task.model().state_dict()}
    part = task.batch // READERS
    feeds = []
    for _ in range(STEPS):
        rows = torch.randint(len(inputs), (READERS, part))
        feeds.append([(inputs[own], targets[own]) for own in rows])
    sizes = [part] * READERS
    train = partial(run_trial, program.files, weights=weights, feeds=feeds, sizes=sizes, period=STEPS)
    trials = run_ranks(WORLD, lambda transport: train(transport, learning_rate=task.rate, momentum=0.9))
    return trials[0].losses


def measured(task: Task, form: str) -> list[list[float]]:
    """The curves of all seeds."""
    inputs, targets = task.data()
    part = slice(task.batch // READERS)
    program = splitc.compile(
        task.model(),
        WORLD,
        inputs[part],
        targets[part],
        task.loss,
        strategy=STRATEGY,
        cluster="v100-10gbe",
        wire=form,
    )
    assert isinstance(program, splitc.CompiledProgram)
    return [curve(task, program, seed) for seed in range(SEEDS)]


def row(form: str, curves: Sequence[Sequence[float]]) -> list[str]:
    """The mean and the standard deviation over the seeds of the losses up to some steps."""
    cells = []
    for end in range(STEPS // 5, STEPS + 1, STEPS // 5):
        losses = [statistics.mean(losses[end - MEAN : end]) for losses in curves]
        cells.append(f"{statistics.mean(losses):.3f} ± {statistics.stdev(losses):.3f}")
    return [form, *cells]


def plot(found: dict[str, dict[str, list[list[float]]]], file: Path) -> None:
    """Draw the mean over the seeds, a panel for each task."""
    import matplotlib  # takes a second to load

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "wire"  # the same curves make the same file
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(found), figsize=(4.2 * len(found), 3.1), layout="constrained")
    for panel, (name, by_form) in zip(panels, found.items(), strict=True):
        for form, curves in by_form.items():
            panel.plot(range(1, STEPS + 1), torch.tensor(curves).mean(0), label=form, linewidth=1)
        panel.set(title=name, xlabel="step", ylabel="loss")
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Train all, and print the tables or write them into a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire_curves", description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables behind its marker, and the plot")
    page = parser.parse_args(argv).page
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[list[float]]]] = {}
    headers, tables = ["", *(f"step {end}" for end in range(STEPS // 5, STEPS + 1, STEPS // 5))], []
    for task in TASKS:
        found[task.name] = {form: measured(task, form) for form in FORMATS}
        rows = [row(form, curves) for form, curves in found[task.name].items()]
        tables.append(f"**{task.name}**: {task.about}.\n\n{tabulate(rows, headers, tablefmt='github')}")
        print(tables[-1], flush=True)
    if page is not None:
        image = page.with_name(f"{page.stem}-curves.svg")
        kept = page.read_text(encoding="utf-8").partition(MARKER)[0]
        shown = f"![Losses of exact and short numbers by step]({image.name})"
        page.write_text("\n\n".join([kept + MARKER, *tables, shown]) + "\n", encoding="utf-8")
        plot(found, image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
