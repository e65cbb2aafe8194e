"""Break the product in a temporary copy of the tree, one text at a time, and say which breaks the tests find.

    python -m tests.mutations [NAME...]       run those whose name holds one of NAME, by default all
    python -m tests.mutations --list [NAME...]

`breaks.toml` holds a table for each break: `before` occurs in one place of the product and becomes `after`; `tests` are
pytest's arguments.  A text that is no longer there, or is there twice, is reported as such: edit the list.
The status is 0 when every break that was asked for is found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = "splitc", "passes", "cost_models"
LIST = Path(__file__).with_name("breaks.toml")
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider")
_MINUTES = 10


@dataclass(frozen=True)
class Break:
    """One text of the product that becomes another.  what: what is then wrong.  tests: pytest's arguments."""

    name: str
    what: str
    before: str
    after: str
    tests: tuple[str, ...]

    def place(self, root: Path) -> Path | str:
        """The file that has the text; what is wrong where not exactly one place has it."""
        counts = {path: path.read_text(encoding="utf-8").count(self.before) for path in sources(root)}
        places = [path for path, count in counts.items() if count]
        missing = [test for test in self.tests if not (root / test.partition("::")[0]).exists()]
        if missing:
            return f"no {', '.join(missing)}"
        if sum(counts.values()) == 1 and self.before != self.after:
            return places[0]
        where = ", ".join(str(path.relative_to(root)) for path in places)
        return f"the text is in {sum(counts.values())} places: {where}" if places else "the text is no longer there"

    def run(self, root: Path) -> str:
        """Apply it, run its tests, undo it; "found", "NOT found" or why neither."""
        path = self.place(root)
        if isinstance(path, str):
            return path
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")
        try:
            return outcome(root, self.tests)
        finally:
            path.write_text(text, encoding="utf-8")


def sources(root: Path) -> list[Path]:
    """The modules of the product; links between its rooms are not followed twice."""
    return sorted({path.resolve() for room in ROOMS for path in (root / room).rglob("*.py")})


def outcome(root: Path, tests: tuple[str, ...]) -> str:
    """Run tests up to the first that fails."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*PYTEST, *tests]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60 * _MINUTES)
    except subprocess.TimeoutExpired:
        return f"found: the tests hang for {_MINUTES} minutes"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode in (1, 2) and failed:
        return f"found: {failed[0].partition(' - ')[0].partition(' ')[2]}"
    return "NOT found" if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def copied(to: Path) -> Path:
    """A copy of what git tracks here and of new files, as they stand."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, to / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return to.resolve()


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names; by default all")
    parser.add_argument("--list", action="store_true", help="print what would run, and texts that are not there")
    asked = parser.parse_args()
    table = tomllib.loads(LIST.read_text(encoding="utf-8"))
    breaks = [Break(name, **{**row, "tests": tuple(row["tests"])}) for name, row in table.items()]
    chosen = [one for one in breaks if not asked.names or any(part in one.name for part in asked.names)]
    if asked.list:
        for one in chosen:
            place = one.place(ROOT)
            print(f"{one.name:32} {place if isinstance(place, str) else place.relative_to(ROOT)}: {one.what}")
        return 0
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        for one in chosen:
            told = one.run(root)
            missed += not told.startswith("found")
            print(f"{one.name:32} {told}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
