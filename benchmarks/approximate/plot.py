"""Accuracy over seconds of training, a panel for each task and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "approximate"  # the same curves make the same file

from matplotlib import pyplot  # noqa: E402 - the backend is chosen before

from benchmarks.approximate.curves import Curve  # noqa: E402
from benchmarks.approximate.methods import METHODS  # noqa: E402
from benchmarks.approximate.tasks import TASKS  # noqa: E402


def plot(curves: Sequence[Curve], file: Path) -> None:
    """Draw the curves of seed 0."""
    tasks = [name for name in TASKS if any(curve.key.task == name for curve in curves)]
    worlds = sorted({curve.key.world for curve in curves})
    size = (4.2 * len(worlds), 3.1 * len(tasks))
    figure, panels = pyplot.subplots(len(tasks), len(worlds), figsize=size, squeeze=False, layout="constrained")
    colours = {name: matplotlib.colormaps["tab10"](k) for k, name in enumerate(METHODS)}
    for row, task in zip(panels, tasks, strict=True):
        for panel, world in zip(row, worlds, strict=True):
            for name, colour in colours.items():
                for curve in curves:
                    if (curve.key.task, curve.key.world, curve.key.method, curve.key.seed) == (task, world, name, 0):
                        seconds = [point.seconds for point in curve.points]
                        panel.plot(seconds, [100 * point.accuracy for point in curve.points], color=colour, label=name)
            panel.set(
                title=f"{task}, {world} ranks",
                xlabel="seconds of training",
                ylabel="held-out accuracy, %",
                xscale="log",
            )
            panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
