"""How much faster is DiLoCo between two sites than the best exact plan over both, and what if one is cut off?

Two sites of two ranks: links inside of a rate, a thin line between them.  Ranks are calibrated inside a site; the best
exact plan that all ranks work in, and `sites`, run in turns.  With --cut the line is cut for so many seconds under
`sites`, whose site beyond it goes on by itself and comes back.

    python -m benchmarks.sites                      100 Mbit/s inside, 5 Mbit/s and 50 ms between
    python -m benchmarks.sites --cut 60
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.cases import Case
from benchmarks.layout import parse_rate
from benchmarks.session import Session
from benchmarks.testbed import NetworkTestbed
from benchmarks.thin_line import ThinLine
from splitc.compiled import CompiledProgram, compile_example
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import parse_cluster, to_toml
from splitc.ir.device import Link
from splitc.ir.short_wire import parse_wire
from splitc.passes.place import Place
from splitc.passes.planner.strategy import parse_strategy
from splitc.report.what_if import choice_text
from splitc.specialise import Settings

GOODPUT = 0.95  # of a rate, behind the headers of frames
PATIENCE = 3600.0  # seconds that a run may take
SITES = "sites(period=16, outer_lr=0.7, outer_momentum=0.9, delay=8, through=server, patience=2)"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each plan."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sites", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--input", default="2048x3x16x16", help="a rank's batch")
    parser.add_argument("--strategy", default=SITES)
    parser.add_argument("--wire", default="averages=int8", help="of the sites; the exact plan's numbers are exact")
    parser.add_argument("--rate", default="100Mbit", help="inside a site")
    parser.add_argument("--line", default="5Mbit", help="between sites")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds of the line, one way")
    parser.add_argument("--cpus", type=float, default=2.0, help="processors of all ranks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32, help="of sites in a round: two periods at least")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds to calibrate")
    parser.add_argument("--cluster", type=Path, help="calibrated before, with its line; it is not calibrated then")
    parser.add_argument("--cut", type=float, help="seconds; only the run with a cut")
    args = parser.parse_args(argv)
    line = parse_rate(args.line)
    with (
        tempfile.TemporaryDirectory() as name,
        NetworkTestbed(4, parse_rate(args.rate), args.cpus / 4) as testbed,
        Session(testbed) as session,
    ):
        text = args.cluster.read_text() if args.cluster else session.calibrate(args.budget)[0]
        cluster = parse_cluster(text, "the calibrated cluster")
        if cluster.site_link is None:
            cluster = replace(cluster, site_link=Link(GOODPUT * line, args.delay, shared=True), ranks_per_site=2)
        print(to_toml(cluster))
        programs = _programs(args, cluster)
        for key, program in programs.items():
            session.load(key, program.save(Path(name) / key))
        with ThinLine(testbed, 2, line, args.delay) as between:
            if args.cut is not None:
                _cut(session, between, args.cut, programs["sites"])
            else:
                _compare(session, args.rounds, args.steps, programs)
            for key in programs:
                session.do("unload", timeout=PATIENCE, name=key)
    return 0


def _programs(args: argparse.Namespace, cluster: Cluster) -> dict[str, CompiledProgram]:
    """The best exact plan that all ranks work in, of one global batch, and that of sites."""
    case, settings = Case(args.model, args.input), Settings(4, None, cluster, args.strategy, wire=parse_wire(args.wire))
    file = case.file
    sites = compile_example(file.model, file.example, settings, name=args.model)
    if args.cut is not None:
        return {"sites": sites}
    batch, auto = sites.plan.global_batch, parse_strategy("auto")
    priced = Place(cluster, 4, auto, global_batch=batch).simulated(case.program)
    alone = max(priced, key=lambda each: each.samples_per_second)
    print(f"of all exact plans the fastest is {alone.strategy}: {alone.samples_per_second:.1f} samples/s, as predicted")
    working = [e for e in priced if e.plan is not None and e.exact and all(e.plan.duties(rank) for rank in range(4))]
    best = max(working, key=lambda each: each.samples_per_second)
    exact = Settings(4, batch, cluster, auto)
    return {"exact": compile_example(file.model, file.example, exact, name=args.model, plan=best.plan), "sites": sites}


def _compare(session: Session, rounds: int, steps: int, programs: dict[str, CompiledProgram]) -> None:
    """Run both in turns; a step is the median over the exact plan's steps, and over whole rounds of the sites."""
    seconds: dict[str, list[float]] = {key: [] for key in programs}
    for _ in range(rounds):
        for key, program in programs.items():
            count, period = (steps if key == "sites" else 1), program.plan.period
            run = session.run(key, count + 1, int(key == "sites"), timeout=PATIENCE)
            ends = [max(clocks) for clocks in zip(*run.ends, strict=True)]
            print(f"{key}: {[round(b - a, 2) for a, b in pairwise(ends)]}", flush=True)
            seconds[key] += [(b - a) / period for a, b in pairwise(ends[::period])]
    rates = {key: programs[key].plan.global_batch / statistics.median(each) for key, each in seconds.items()}
    for key, program in programs.items():
        step = statistics.median(seconds[key])
        print(
            f"{choice_text(program.plan):40} {rates[key]:8.2f} samples/s; a step {step:.3g} s "
            f"[{min(seconds[key]):.3g}, {max(seconds[key]):.3g}], predicted {program.plan.step_seconds:.3g} s"
        )
    print(f"sites are {rates['sites'] / rates['exact']:.1f} times as fast")


def _cut(session: Session, line: ThinLine, seconds: float, program: CompiledProgram) -> None:
    """Cut the line in a run of four times as long, after a third of that time.

    TCP sends what was lost again after waits that double, so a site may be back as late as one cut after it has ended.
    """

    def cut() -> None:
        for wait, do in ((seconds / 3, line.cut), (seconds, line.mend)):
            for _ in range(round(2 * wait)):
                time.sleep(0.5)  # so that time in which the whole machine stands still does not count
            do()

    step = session.run("sites", program.plan.period, 1, timeout=PATIENCE).step_seconds
    thread = threading.Thread(target=cut)
    thread.start()
    run = session.run("sites", round(4 * seconds / step), 0, timeout=PATIENCE)
    thread.join()
    for rank, log in enumerate(session.logs):
        steps = run.seconds[rank]
        print(f"rank {rank}: {len(steps)} steps of {statistics.median(steps):.3g} s, the longest {max(steps):.3g} s")
        print("".join(f"  {line}\n" for line in log.read_text().splitlines() if line.startswith("round ")), end="")


if __name__ == "__main__":
    sys.exit(main())
