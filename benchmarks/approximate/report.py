"""The tables of what was measured."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence

from tabulate import tabulate

from benchmarks.approximate.curves import FOREIGN, Bed, Curve, Results, mean
from benchmarks.approximate.methods import METHODS
from benchmarks.approximate.tasks import TASKS, Task
from benchmarks.errors import BenchmarkError

BASELINE = "ddp"
BEGIN, END = "<!-- python -m benchmarks.approximate --page -->", "<!-- end of the tables -->"


def report(results: Results) -> str:
    """A section for each task, with what was set and a row for each number of ranks and method."""
    sections = []
    for task in TASKS.values():
        curves = [curve for key, curve in results.curves.items() if key.task == task.name]
        if curves:
            beds = [bed for (name, _), bed in sorted(results.beds.items()) if name == task.name]
            sections.append(f"### {task.name}\n\n{setting(task, beds)}\n\n{table(task, curves)}")
    return "\n\n".join(sections)


def into(page: str, results: Results, image: str) -> str:
    """The page with the report and the plot between its two marks.  Raises BenchmarkError where it has none."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise BenchmarkError(f"the page has no place for tables; write the lines {BEGIN} and {END}")
    curves = f"![Held-out accuracy over seconds of training, first seed]({image})"
    return f"{head}{begin}\n\n{report(results)}\n\n{curves}\n\n{end}{tail}"


def setting(task: Task, beds: Sequence[Bed]) -> str:
    """Model, batch, rates and bandwidth in words."""
    rates = ", ".join(f"{rate:g} ({family})" for family, rate in task.rates.items())
    speeds = "; ".join(
        f"{bed.world} ranks: {bed.rate * 8e-6:.0f} Mbit/s a link, a rank computes {bed.compute * 1e3:.1f} ms"
        for bed in beds
    )
    text = (
        f"Layers of {' - '.join(map(str, task.sizes))}, {task.parameters / 1e6:.2f} M parameters; {task.steps} "
        f"steps of {task.batch} examples over all ranks, {task.steps * task.batch:,} in all; SGD, learning "
        f"rate {rates}; r_P {task.ratio:g}. {speeds}. {'; '.join(sorted({bed.about for bed in beds}))}."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False)


def table(task: Task, curves: Sequence[Curve]) -> str:
    """A row for each number of ranks and method: means over the seeds, beside DDP's."""
    rows = []
    for world in sorted({curve.key.world for curve in curves}):
        for name in METHODS:
            some = [curve for curve in curves if (curve.key.world, curve.key.method) == (world, name)]
            base = [curve for curve in curves if (curve.key.world, curve.key.method) == (world, BASELINE)]
            if some:
                rows.append([world, _label(some), *_figures(task, some, base)])
    times = [f"s to {target:.0%}" for target in task.targets]
    headers = ["ranks", "method", "seeds", "samples/s", "kB/sample", *times, "times DDP", "final", "points from DDP"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=["right", "left"] + ["right"] * 7)


def time_to(curves: Sequence[Curve], accuracy: float) -> float | None:
    """Mean seconds to an accuracy; None when a curve never reaches it."""
    times = [curve.time_to(accuracy) for curve in curves]
    found = [seconds for seconds in times if seconds is not None]
    return mean(found) if found and len(found) == len(times) else None


def _label(curves: Sequence[Curve]) -> str:
    plans = sorted({curve.plan for curve in curves})
    return f"auto: {', '.join(plans)}" if curves[0].key.method == "auto" else curves[0].key.method


def _figures(task: Task, curves: Sequence[Curve], base: Sequence[Curve]) -> list[str]:
    finals = [curve.final for curve in curves]
    spread = f" ± {statistics.stdev(finals):.1%}" if len(finals) > 1 else ""
    times = [time_to(curves, target) for target in task.targets]
    first, of_base = times[0], time_to(base, task.targets[0])
    disturbed = "*" if any(curve.foreign > FOREIGN for curve in curves) else ""
    return [
        str(len(curves)),
        f"{mean([curve.speed for curve in curves]):.0f}{disturbed}",
        f"{mean([curve.sent_per_sample for curve in curves]) / 1e3:.2f}",
        *("-" if seconds is None else f"{seconds:.1f}" for seconds in times),
        "-" if first is None or of_base is None else f"{of_base / first:.1f}",
        f"{mean(finals):.1%}{spread}",
        f"{100 * (mean(finals) - mean([curve.final for curve in base])):+.1f}" if base else "-",
    ]
