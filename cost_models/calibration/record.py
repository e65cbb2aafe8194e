"""The record of what ran on a cluster: beside its file, `cluster.record.toml`, or in the cache folder, by its numbers.

A plan has one entry, whose measured steps are those of its last runs.  Training appends lines of JSON to a journal in
the cache folder (`runtime/journal.py`), which counts as a part of the record.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import tempfile
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from splitc.cost_models.calibration.learning import Run, even_weights, fit, slowed
from splitc.cost_models.network.alpha_beta import ALGORITHMS, point_to_point
from splitc.ir.cluster import Cluster, Learned
from splitc.ir.cluster_file import base_digest, digest
from splitc.ir.decode import decode, hints_of
from splitc.ir.disk_cache import cache_folder, is_off
from splitc.ir.plan import Plan
from splitc.runtime.journal import journal
from splitc.runtime.transport.phases import Phases, Span, phases, transfers
from splitc.runtime.transport.recorder import Step
from splitc.units import numbered

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_RUNS, _STEPS, _SIZES = 64, 9, 6  # that are kept: plans, runs of each, and sizes of each kind of transfer


@dataclass(frozen=True)
class Seen:
    """What was measured of a plan: seconds of a step, and where they are known, of each rank by phase and of transfers.

    steps: in which the transfers are.
    """

    step: float
    ranks: tuple[Phases, ...] = ()
    transfers: tuple[Span, ...] = ()
    steps: int = 1


def seen_in(ranks: Sequence[Sequence[Step]], period: int = 1) -> Seen:
    """What recorded steps say.  ranks: by rank, those that count.  period: of the plan; in rounds means are taken."""
    steps = [list(step) for step in zip(*ranks, strict=True)]
    steps = steps[len(steps) % period :] or steps
    middle: Callable[[Any], float] = statistics.fmean if period > 1 else statistics.median
    by_rank = zip(*([astuple(of)[1:] for of in phases(step)] for step in steps), strict=True)
    own = tuple(Phases(rank, *map(middle, zip(*each, strict=True))) for rank, each in enumerate(by_rank))
    spans = [span for step in steps for under_way in transfers(step) for span in under_way]
    return Seen(middle([max(s.end - s.begin for s in step) for step in steps]), own, tuple(spans), len(steps))


def remember(source: str | Path | None, cluster: Cluster, plan: Plan, seen: Seen, name: str = "") -> None:
    """Write what a plan took on a cluster into its record; what cannot be written is a warning.

    source: the cluster's file, beside which the record lies, or else a name or None.  cluster: as it was loaded.
    plan: with its prediction for that cluster.  name: of the build or the model.
    """
    try:
        if plan.prediction.priced_on != digest(cluster):
            raise ValueError(f"the plan was not priced on {cluster.name}")
        keep(source, run_of(cluster, plan, seen, name))
    except (OSError, ValueError, ArithmeticError) as error:
        warnings.warn(f"what {name or plan.hash} took was not recorded: {error}", stacklevel=2)


def keep(source: str | Path | None, run: Run) -> None:
    """Write a run into the record of its cluster; what cannot be written is a warning."""
    try:
        if (path := _path(source, run.based_on)) is not None:
            with _alone(path):
                _write(path, [*_read(path), run])
    except OSError as error:
        warnings.warn(f"the record of {run.based_on} cannot be written: {error}", stacklevel=2)


def run_of(cluster: Cluster | None, plan: Plan, seen: Seen, name: str = "") -> Run:
    """The entry of a run.  cluster: that the plan was priced on, for the prices of transfers, where it is at hand."""
    told = plan.prediction

    def pair(what: str) -> tuple[float, ...]:
        return tuple(sum(getattr(each, what) for each in of) for of in (told.phases, seen.ranks) if seen.ranks)

    return Run(
        plan.hash,
        name,
        plan.strategy,
        plan.world,
        told.based_on or told.priced_on,
        told.simulated_seconds,
        (seen.step,),
        told.factors,
        told.weights or even_weights(told.phases),
        pair("compute"),
        pair("communication"),
        dict(_by_kind(cluster, seen)),
    )


def _by_kind(cluster: Cluster | None, seen: Seen) -> Iterator[tuple[str, tuple[tuple[float, ...], ...]]]:
    """Kind and ranks, `all_reduce 4` -> by size: number in a step, bytes of one, its predicted and measured seconds."""
    found: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in (span for span in seen.transfers if span.nbytes):
        kind, _, listed = span.name.partition(" of ranks ")
        ranks = len(listed.split()) or 2
        found[f"{kind if listed else 'messages'} {ranks}"][round(math.log2(span.nbytes))].append(span)
    for key, sizes in found.items():
        kind, n = key.split()[0], int(key.split()[1])
        rows = []
        for spans in sizes.values():
            sent = statistics.median(span.nbytes for span in spans)
            whole = sent if kind == "messages" else sent * n / (n - 1) / (2 if kind == "all_reduce" else 1)
            price = 0.0 if cluster is None else _price(kind, whole, n, cluster)
            took = statistics.median(span.end - span.start for span in spans)
            rows.append((round(len(spans) / seen.steps, 2), whole, float(f"{price:.4g}"), float(f"{took:.4g}")))
        yield key, tuple(sorted(rows, key=lambda row: -row[1])[:_SIZES])


def _price(kind: str, nbytes: float, ranks: int, cluster: Cluster) -> float:
    link = cluster.link_over(range(ranks))
    return ALGORITHMS[kind](nbytes, ranks, link) if kind in ALGORITHMS else point_to_point(nbytes, link)


# -- reading -----------------------------------------------------------------------------------------------------------


def runs_on(source: str | Path | None, cluster: Cluster) -> list[Run]:
    """All that ran on a cluster; none that ran before its file had other numbers."""
    base = base_digest(cluster)
    paths = dict.fromkeys([_path(source, base), _path(None, base)])
    found = [run for path in paths if path is not None for run in _read(path)]
    if not is_off():
        found += _journal(journal(cache_folder(), base))
    return [run for run in _merged(found) if run.based_on == base]


def fitted(cluster: Cluster, source: str | Path | None) -> Cluster:
    """The cluster with its numbers changed by what ran on it; as it is where nothing did."""
    runs = [run for run in runs_on(source, cluster) if not run.elsewhere]
    if not runs:
        return cluster
    factors = fit(runs, calibrated=bool(cluster.link.collectives))
    base, seen = digest(cluster), dict[str, tuple[float, ...]]()
    for run in runs:
        for key, rows in run.transfers.items():
            kind, ranks = key.split()[0], float(key.split()[1])
            least, most = min(row[1] for row in rows), max(row[1] for row in rows)
            a, b, c, d = seen.get(kind, (ranks, ranks, least, most))
            seen[kind] = min(a, ranks), max(b, ranks), min(c, least), max(d, most)
        seen |= {factor: () for factor, of in run.weights.items() if factor not in seen and of[1] > 0.02}
    changed = ", ".join(f"{factor} {times:.3g}" for factor, times in factors.items() if abs(times - 1) > 0.005)
    said = f"fitted to {numbered(len(runs), 'plan')} that ran here (times as long: {changed or 'all as before'})"
    return replace(
        slowed(cluster, factors),
        source="; ".join(filter(None, [cluster.source, said])),
        learned=Learned(base, factors, len(runs), {run.plan: run.measured for run in runs}, seen),
    )


def _path(source: str | Path | None, base: str) -> Path | None:
    """Where the record is; None where nothing may be kept."""
    file = Path(source) if source is not None else None
    if file is not None and file.name.endswith(".toml"):
        return file.with_name(f"{file.stem}.record.toml")
    return None if is_off() else cache_folder() / "records" / f"{base}.toml"


def _read(path: Path) -> list[Run]:
    """The runs of a record; none where it is missing, cut off, or another version's."""
    with contextlib.suppress(OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return _decoded(tomllib.loads(path.read_text(encoding="utf-8")).get("run", []))
    return []


def _journal(path: Path) -> list[Run]:
    """The runs that trainings have added."""
    with contextlib.suppress(OSError, ValueError):
        return _decoded(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    return []


def _decoded(tables: Iterable[Any]) -> list[Run]:
    """The runs that tables tell; none for a table that is malformed."""
    needed = ("plan", "name", "strategy", "world", "based_on", "predicted", "steps")
    found = (decode(hints_of(Run), table, needed) for table in tables if isinstance(table, Mapping))
    return [Run(**values) for values, problems in found if not problems and values["steps"]]


def _merged(runs: Sequence[Run]) -> list[Run]:
    """One entry of a plan, the last ones: with all measured steps, and the phases where they are known."""
    found: dict[tuple[str, str], Run] = {}
    for run in runs:
        before = found.pop((run.plan, run.based_on), None)
        if before is not None:
            steps = (*before.steps, *run.steps)[-_STEPS:]
            run = replace(run if run.compute or not before.compute else before, steps=steps)
        found[run.plan, run.based_on] = run
    return [*found.values()][-_RUNS:]


def _write(path: Path, runs: Sequence[Run]) -> None:
    tables = [{key: value for key, value in asdict(run).items() if value not in ((), {})} for run in _merged(runs)]
    text = "# What ran on this cluster; splitc writes it, and fits the cluster's numbers to it.\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
        file.write(text + tomli_w.dumps({"run": tables}))
    os.replace(file.name, path)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock of a record's folder, where the system has such locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
