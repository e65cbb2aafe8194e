"""`splitc run --measure`: run a build, and print its measured phases beside the predicted ones."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitc.cli.correcting import cluster_to_correct, correction_command, write_correction
from splitc.cli.files import check_writable, write_file
from splitc.cli.pages import write_page
from splitc.codegen.build_folder import TIMELINE
from splitc.cost_models.calibration.correction import Factors, factors_of
from splitc.cost_models.calibration.record import Seen, keep, run_of
from splitc.cost_models.simulation.trace import chrome_trace
from splitc.errors import LaunchError
from splitc.ir.plan import Plan
from splitc.report.figures import of_plan
from splitc.report.measurement import Measurement, as_json, as_text, factors_in_words, read_measurement
from splitc.report.step import drawn
from splitc.report.tables import wrap
from splitc.runtime.progress import Step
from splitc.runtime.transport.phases import TRACED, WARM_UP, Span

STEPS = 10


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
    """The figures of the page: those that a plan tells by itself, and beside them what was measured."""
    of_measured = drawn(plan, measured.spans, max(phases.step for phases in measured.ranks))
    found = {**as_json(plan, measured, factors), "timeline": of_measured}
    return {**of_plan(plan, folder.name), "timeline": drawn(plan, _predicted(folder)), "measured": found}


def _predicted(folder: Path) -> tuple[Span, ...]:
    """The spans of the predicted steps of a build; none where it has none.  Raises LaunchError for a damaged file."""
    file = folder / TIMELINE
    try:
        return tuple(Span(*each) for each in json.loads(file.read_text())) if file.is_file() else ()
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
