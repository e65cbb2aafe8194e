"""Compile third-party models, compare them with eager, train them under three strategies, and write the table.

    python -m benchmarks.real_models                                   # all of them, one after the other
    python -m benchmarks.real_models resnet18 bert --package timm      # two by name, and all of a package
    python -m benchmarks.real_models --table docs/measurements/real-models.md
    python -m benchmarks.real_models --folder results --kept           # go on where a run was ended

Each model runs in a process of its own with a limit of time and of memory.  The packages are those of
`benchmarks/real_models/requirements.txt`; a model whose package is not installed is left out, and named.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from benchmarks.real_models.case import Entry, entries
from benchmarks.real_models.measure import Result, measure_alone, read
from benchmarks.real_models.table import line, page

PROCESSES = multiprocessing.get_context("forkserver")  # which has imported torch and splitc once
STANDSTILL = 8  # a process that lasts so many times its CPU seconds is ended


@dataclass(frozen=True)
class Limits:
    """What one model may use."""

    seconds: int = 150  # of CPU
    nbytes: int = 10 * 10**9


def chosen(names: list[str], packages: list[str]) -> dict[str, Entry]:
    """The entries of these names and packages; all if neither is given.  Raises SystemExit for an unknown one."""
    known = entries()
    unknown = sorted({*names} - known.keys() | {*packages} - {entry.package for entry in known.values()})
    if unknown:
        raise SystemExit(f"there is no {', '.join(unknown)}; the models are: {' '.join(known)}")
    return {
        name: entry
        for name, entry in known.items()
        if not (names or packages) or name in names or entry.package in packages
    }


def installed(package: str) -> bool:
    """Whether a distribution is there."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run(name: str, entry: Entry, folder: Path, limits: Limits) -> Result:
    """Measure one model in a process of its own; its log and its result are left in `folder`."""
    file = folder / f"{name}.json"
    file.unlink(missing_ok=True)
    arguments = (name, file, folder / f"{name}.log", limits.nbytes, limits.seconds)
    process = PROCESSES.Process(target=measure_alone, args=arguments)
    process.start()
    process.join(STANDSTILL * limits.seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    result = read(file.read_text()) if file.exists() else Result(name, entry.package, entry.shows, entry.batched)
    if process.exitcode and not result.failed:
        result.failed, result.why = "limits", f"ended with {process.exitcode}, of {limits}"
    return result


def finished(file: Path) -> Result | None:
    """The result in a file, if all its stages were run."""
    result = read(file.read_text()) if file.exists() else None
    return result if result and (result.failed or result.seconds_in_all) else None


def run_all(models: dict[str, Entry], jobs: int, folder: Path, limits: Limits) -> Iterator[Result]:
    """The results, each as soon as it is there."""
    PROCESSES.set_forkserver_preload(["benchmarks.real_models.measure"])
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run, name, entry, folder, limits) for name, entry in models.items()]
        for done in as_completed(running):
            yield done.result()


def main(argv: list[str] | None = None) -> int:
    """Print a line for each model, and write the table where asked to; 1 when a model with a batch dimension fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_models", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="models; none: all")
    parser.add_argument("--package", nargs="+", default=[], help="all models of these distributions")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--table", type=Path, help="the page to write")
    parser.add_argument("--folder", type=Path, help="where logs and results go; else a folder that is removed")
    parser.add_argument("--kept", action="store_true", help="measure only what has no result in --folder yet")
    parser.add_argument("--seconds", type=int, default=Limits.seconds, help="limit of a model's CPU seconds")
    parser.add_argument("--nbytes", type=int, default=Limits.nbytes, help="limit of a model's memory")
    parser.add_argument("--list", action="store_true", help="name the models and stop")
    args = parser.parse_args(argv)
    models = chosen(args.names, args.package)
    if args.list:
        print("\n".join(f"{name:24} {entry.package:30} {entry.shows}" for name, entry in models.items()))
        return 0
    missing = sorted({entry.package for entry in models.values() if not installed(entry.package)})
    if missing:
        print(f"not installed, and left out: {', '.join(missing)}", flush=True)
    models = {name: entry for name, entry in models.items() if entry.package not in missing}
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        kept = [result for name in models if args.kept and (result := finished(folder / f"{name}.json"))]
        results += kept
        left = {name: entry for name, entry in models.items() if name not in {result.name for result in kept}}
        for result in run_all(left, args.jobs, folder, Limits(args.seconds, args.nbytes)):
            results = sorted([*results, result], key=lambda each: list(models).index(each.name))
            print(line(result), flush=True)
            if args.table:
                args.table.write_text(page(results, missing), encoding="utf-8")  # as far as it is
    text = page(results, missing)
    if args.table:
        args.table.write_text(text, encoding="utf-8")
    else:
        print("\n" + text)
    return 1 if any(result.failed for result in results if result.batched) else 0


if __name__ == "__main__":
    sys.exit(main())
