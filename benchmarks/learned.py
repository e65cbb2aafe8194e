"""Do prices of models that never ran get better by what another model took?

Ranks on a testbed are calibrated; then plans of one model are measured and recorded, and the prices of plans of other
models, before and after, are held against what those take.

    python -m benchmarks.learned                 quarter AlexNet, then VGG and an MLP, 4 ranks, 230 Mbit/s
    python -m benchmarks.learned --world 8 --rate 105Mbit --budget 60
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import splitc
from benchmarks.cases import Case
from benchmarks.layout import parse_rate
from benchmarks.session import Session
from benchmarks.testbed import NetworkTestbed
from splitc.compiled import CompiledProgram, compile_example
from splitc.cost_models.calibration.record import Seen, remember
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.simulation.timeline import simulate
from splitc.errors import PlacementError
from splitc.ir.cluster import Cluster
from splitc.runtime.transport.phases import Phases, Span
from splitc.specialise import Settings

STRATEGIES = ("data_parallel", "layer_separation", "late_multiply", "modulo_shard")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print prices beside seconds; exit status 1 when the median error of the others is over 5 %."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learned", description=splitc.__doc__)
    parser.add_argument("--first", default="alexnet", help="the model whose runs are recorded")
    parser.add_argument("--models", nargs="+", default=["vgg", "mlp"], help="those whose prices are to get better")
    parser.add_argument("--input", default="32x3x64x64", help="of the first model")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--rate", default="230Mbit")
    parser.add_argument("--cpus", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path, help="where the cluster and its record are kept")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds to calibrate")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = args.output or folder / "cluster.toml"
        testbed = NetworkTestbed(args.world, rate=parse_rate(args.rate), cpus=args.cpus)
        with testbed, Session(testbed, "benchmarks.learned_rank") as session:
            path.write_text(session.calibrate(args.budget)[0])
            own = load_cluster(path)
            for compiled in _compiled(args.first, args.input, args.world, own):
                seen = _measured(session, compiled, folder, args.steps)
                remember(path, own, compiled.plan, seen, args.first)
                _tell(args.first, compiled, own, own, seen)
            learned, errors = load_cluster(path), list[tuple[float, float]]()
            print(learned.source)
            for model in args.models:
                for compiled in _compiled(model, None, args.world, own):
                    seen = _measured(session, compiled, folder, args.steps)
                    errors.append(_tell(model, compiled, own, learned, seen))
    before, after = (statistics.median(map(abs, each)) for each in zip(*errors, strict=True))
    worst = max(abs(after) for _, after in errors)
    print(f"median error of {len(errors)} plans: {before:.1%} before, {after:.1%} after; worst after {worst:.1%}")
    return int(after > 0.05)


def _compiled(model: str, sizes: str | None, world: int, cluster: Cluster) -> list[CompiledProgram]:
    file, found = Case(model, sizes).file, []
    for strategy in STRATEGIES:
        try:
            settings = Settings(world, None, cluster, strategy)
            found.append(compile_example(file.model, file.example, settings, name=model))
        except PlacementError as error:
            print(f"{model} {strategy}: {str(error).splitlines()[0]}")
    return found


def _measured(session: Session, compiled: CompiledProgram, folder: Path, steps: int) -> Seen:
    build = compiled.save(folder / f"{compiled.program.name}-{compiled.plan.hash}")
    told = session.do("measure", folder=str(build), steps=steps, warm_up=3)[0]
    return Seen(
        told["step"],
        tuple(Phases(**each) for each in told["ranks"]),
        tuple(Span(**each) for each in told["transfers"]),
        told["steps"],
    )


def _tell(model: str, compiled: CompiledProgram, own: Cluster, learned: Cluster, seen: Seen) -> tuple[float, float]:
    """Print the prices of a plan beside its step; the errors before and after."""
    prices = [simulate(compiled.program, cluster).step_seconds for cluster in (own, learned)]
    before, after = (price / seen.step - 1 for price in prices)
    phases = compiled.plan.prediction.phases
    parts = [(sum(p.compute for p in of), sum(p.communication for p in of)) for of in (phases, seen.ranks)]
    words = ", ".join(f"{what} {b / a:.2f}" for what, a, b in zip(("compute", "comm"), *parts, strict=True) if a)
    name = f"{model:12} {compiled.plan.strategy:18} {seen.step * 1e3:6.0f} ms"
    print(f"{name}  {before:+.1%} {after:+.1%}  (measured / predicted: {words})", flush=True)
    return before, after


if __name__ == "__main__":
    sys.exit(main())
