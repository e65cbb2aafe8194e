"""`splitc run --measure`: run a build, and print its measured phases beside the predicted ones.

`--correct` writes what was measured into the file of the cluster.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from splitc.cli.files import check_writable, write_file
from splitc.cli.pages import write_page
from splitc.codegen.build_folder import FIGURES, TIMELINE
from splitc.cost_models.calibration.learning import Run, fit, slowed
from splitc.cost_models.calibration.record import Seen, keep, run_of, runs_on
from splitc.cost_models.clusters.files import THIS_MACHINE, known_clusters
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.simulation.trace import chrome_trace
from splitc.errors import CostError, LaunchError
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import digest, to_toml
from splitc.ir.plan import Plan
from splitc.report.figures import of_plan
from splitc.report.measurement import (
    Factors,
    Measurement,
    as_json,
    as_text,
    factors_in_words,
    factors_of,
    read_measurement,
)
from splitc.report.step import drawn
from splitc.report.tables import wrap
from splitc.runtime.progress import Step
from splitc.runtime.transport.phases import TRACED, WARM_UP, Span

STEPS = 10

T = TypeVar("T")


def measure(folder: Path, plan: Plan, args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the build and print the comparison; returns 1 when a rank fails or what was asked for cannot be corrected.

    arguments: those for launch.py.  Raises LaunchError before any process starts for what is wrong.
    """
    _can_measure(folder, plan, args.steps)
    check_writable("--trace", args.trace)
    check_writable("--html", args.html)
    cluster = None if args.correct is None else cluster_to_correct(args.correct, plan)
    if (measured := _run(folder, plan, args, arguments)) is None:
        return 1
    factors = run = None
    if plan.prediction.phases and measured.examples == plan.global_batch:
        factors = factors_of(plan.prediction.phases, measured.ranks)
        spans = tuple(span for span in measured.spans if span.stream == "comm")
        seen = Seen(max(p.step for p in measured.ranks), measured.ranks, spans, min(TRACED, measured.steps))
        run = run_of(cluster, plan, seen, folder.name)
        if cluster is None:
            keep(None, run)
    if args.json:
        print(json.dumps(as_json(plan, measured, factors), indent=1))
    else:
        print(f"\n{as_text(folder.name, plan, measured)}")
    said = sys.stderr if args.json else sys.stdout
    if factors is not None:
        print(wrap(factors_in_words(factors, plan.prediction.cluster)), file=said)
    if args.trace is not None:
        _write_trace(args.trace, folder, plan, measured)
        print(f"wrote {args.trace}: a timeline of the last steps, which opens in ui.perfetto.dev", file=said)
    if args.html is not None:
        write_page(args.html, _figures(folder, plan, measured, factors), said)
    if factors is None or factors.empty:
        if cluster is not None:
            print(f"{args.correct} was not written: nothing could be compared", file=said)
        return int(cluster is not None)
    if cluster is None:
        print(correction_command(folder, plan), file=said)
    else:
        assert run is not None, "factors are of a run"
        kept = write_correction(args.correct, run, factors, folder.name, plan)
        print(f"wrote {args.correct}{'' if kept is None else f'; as it was it is kept in {kept}'}", file=said)
        print(f"compile the model for it with: splitc compile MODEL --cluster {args.correct}", file=said)
    return 0


def _figures(folder: Path, plan: Plan, measured: Measurement, factors: Factors | None) -> dict[str, Any]:
    """The figures of the page: those that the build tells, and beside them what was measured."""
    of_measured = drawn(plan, measured.spans, max(phases.step for phases in measured.ranks))
    found = {**as_json(plan, measured, factors), "timeline": of_measured}
    told = {**of_plan(plan, folder.name), **_read(folder / FIGURES, dict), "timeline": drawn(plan, _predicted(folder))}
    return {**told, "measured": found}


def _predicted(folder: Path) -> tuple[Span, ...]:
    """The spans of the predicted steps of a build; none where it has none."""
    return _read(folder / TIMELINE, lambda spans: tuple(Span(*each) for each in spans))


def _read(file: Path, read: Callable[[Any], T]) -> T:
    """What a file of a build holds; nothing where the build has none.  Raises LaunchError for a damaged one."""
    try:
        return read(json.loads(file.read_text()) if file.is_file() else ())
    except (ValueError, TypeError) as error:
        raise LaunchError(f"{file} is damaged ({error}); delete it, or compile again") from error


def _can_measure(folder: Path, plan: Plan, steps: int | None) -> None:
    least, whole = WARM_UP + plan.period, f" and takes whole {plan.cycle}s" * plan.trains_in_units
    if steps is not None and steps < least:
        why = f"--measure leaves out the first {WARM_UP} steps{whole}; give {least} or more"
        raise LaunchError(f"--steps {steps}: {why}")
    runtime = folder / "splitc" / "runtime"
    if runtime.is_dir() and not (runtime / "transport" / "recorder.py").is_file():
        raise LaunchError(
            f"{folder} brings the runtime of another splitc, which cannot measure; compile the model again"
        )


def _run(folder: Path, plan: Plan, args: argparse.Namespace, arguments: Sequence[str]) -> Measurement | None:
    """Run, unless `--measured` has run, and read; None when a rank failed.  With --json ranks print errors only."""
    if args.measured is not None:
        return read_measurement(args.measured, plan.period)
    from splitc.runtime.launch.torchrun import torchrun

    with tempfile.TemporaryDirectory(prefix="splitc-") as temporary:
        found = Path(temporary) / "measured.json"
        steps = args.steps or max(STEPS, WARM_UP + 2 * plan.period)
        command = [str(folder / "launch.py"), *arguments, "--measure", str(found)]
        command += ["--steps", str(steps)] if steps != (args.steps or STEPS) else []
        with Step(f"measuring {steps} steps on {plan.world} ranks", quiet=not args.json):
            done = torchrun(command, plan.world, quiet=args.json)
        if done.returncode:
            print(done.stderr or "", end="", file=sys.stderr)
            return None
        return read_measurement(found, plan.period)


def _write_trace(path: Path, folder: Path, plan: Plan, measured: Measurement) -> None:
    """Write the measured timeline, below the predicted one if the build has that."""
    roles = {rank: ", ".join(plan.duties(rank)) or "idle" for rank in range(plan.world)}
    spans = {"predicted": predicted} if (predicted := _predicted(folder)) else {}
    write_file("--trace", path, json.dumps(chrome_trace({**spans, "measured": measured.spans}, roles)) + "\n")


# -- correcting a cluster ----------------------------------------------------------------------------------------------


def cluster_to_correct(path: Path, plan: Plan) -> Cluster:
    """The cluster that `--correct path` corrects: the one in the file, or for a new file the plan's, by its name.

    Raises LaunchError when it is not the cluster that the plan was priced on, or when the file cannot be written.
    """
    if path.suffix != ".toml":
        raise LaunchError(f"--correct {path}: a cluster file ends in .toml, or --cluster does not take it for one")
    check_writable("--correct", path)
    if not plan.prediction.phases:
        raise LaunchError(
            f"--correct {path}: plan.json has no predicted phases to compare with; compile the model again"
        )
    priced = plan.prediction.cluster  # its name
    if not path.exists() and not _is_known(plan):
        raise LaunchError(
            f"--correct {path}: there is no such file, and {priced} is none of the clusters that splitc knows by name; "
            f"give the file that describes it"
        )
    source = path if path.exists() else priced
    try:
        cluster = load_cluster(source)
    except CostError as error:
        raise LaunchError(f"--correct {error}") from error
    known = plan.prediction.priced_on
    if digest(cluster) == known:
        return cluster
    if cluster.name != priced:
        raise LaunchError(
            f"--correct {path} describes cluster {cluster.name}, but the build was planned for cluster {priced}; "
            f"give the file of {priced} or the name of a new file, or compile the model with --cluster {path}"
        )
    if known:
        raise LaunchError(
            f"--correct {path}: cluster {cluster.name} has other numbers than those that the build was priced on: it "
            f"was corrected or edited since; compile again with --cluster {source}"
        )
    return cluster


def _is_known(plan: Plan) -> bool:
    """Whether splitc has the cluster that a plan was priced on, and not another one by that name."""
    name, numbers = plan.prediction.cluster, plan.prediction.priced_on
    return name == THIS_MACHINE or (name in known_clusters() and numbers in ("", digest(load_cluster(name))))


def write_correction(path: Path, run: Run, factors: Factors, build: str, plan: Plan) -> Path | None:
    """Write the cluster, fitted to this run and all before; returns the backup of the file, if there was one.

    A cluster in a new file is named after that file, since it is another cluster now.
    """
    took = [
        f"{what} took {factor:.4g} times as long as predicted"
        for what, factor in (("computing", factors.compute), ("transfers", factors.communication))
        if factor is not None
    ]
    note = f"corrected on {datetime.date.today().isoformat()} by build {build}, plan {plan.hash}: {', '.join(took)}"
    source = path if path.exists() else plan.prediction.cluster
    cluster = load_cluster(source, learns=False)
    new = slowed(cluster, fit([*runs_on(source, cluster), run]))
    new = replace(new, source="; ".join(filter(None, [cluster.source, note])))
    backup = _back_up(path) if path.exists() else None
    write_file("--correct", path, to_toml(new if backup else replace(new, name=path.stem)))
    return backup


def _back_up(path: Path) -> Path:
    """Copy a file to the first free name of FILE.bak, FILE.bak2, ..."""
    number = 1
    while (kept := path.with_name(f"{path.name}.bak{number if number > 1 else ''}")).exists():
        number += 1
    try:
        kept.write_bytes(path.read_bytes())
    except OSError as error:
        raise LaunchError(f"--correct {path}: cannot write {error.filename or kept}: {error.strerror}") from error
    return kept


def correction_command(folder: Path, plan: Plan) -> str:
    """The command that writes the correction."""
    if _is_known(plan):
        file, where = f"{plan.prediction.cluster}-measured.toml", "a new cluster file"
    else:
        file, where = "CLUSTER.toml", f"the file of cluster {plan.prediction.cluster}, with its name for CLUSTER.toml"
    return f"to write this into {where}:\n  splitc run {folder} --measure --correct {file}"
