"""Options and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.forked import as_executable, program

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files anew instead of comparing")


STARTS = re.compile(
    r"\b(run_ranks|on_\w+|worker_of|load_worker|verify\w*|Thread\w*|Popen|subprocess|delays)\(|threading\."
)
"""What a file of tests that starts threads or processes names."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark with `ranks` the tests of files that start threads or processes, by their helpers too.

    Files with real processes come first: they wait for each other, so that beside them other tests run.
    """
    starts = {path for path in {item.path for item in items} if STARTS.search(path.read_text(encoding="utf-8"))}
    for item in items:
        if item.path in starts:
            item.add_marker("ranks")
    waiting = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: item.path not in waiting)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage seldom: not while modules load, nor among the million objects that they make, which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        vars(gc)["get_freeze_count"] = cache(gc.get_freeze_count)  # walks all of them, at each compile
        gc.set_threshold(20_000)  # of 700, a tenth of the time of all tests was spent in looking for it
        gc.enable()


os.environ["SPLITC_CACHE"] = "off"  # tests see what is computed, and processes that they start do too
os.environ["SPLITC_ADVICE"] = "0"  # it plans dozens of times
torch.set_num_threads(1)  # simulated ranks are threads already; more of them fight for the cores


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def forking() -> Iterator[Path]:
    """A program that starts Python processes at once, for `as_executable`."""
    with tempfile.TemporaryDirectory(prefix="splitc-") as folder, program(Path(folder)) as path:
        yield path


@pytest.fixture
def forked(forking: Path) -> Iterator[None]:
    """Let Python processes start at once."""
    with as_executable(forking):
        yield


@pytest.fixture(autouse=True)
def _started(request: pytest.FixtureRequest) -> None:
    """Tests with real processes fork them, but those that say `from_scratch`, and those on a GPU."""
    marked = {mark.name for mark in request.node.iter_markers()}
    if "processes" in marked and not marked & {"from_scratch", "gpu"}:
        request.getfixturevalue("forked")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares `text` with the file of that name, byte by byte."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden file {name}; run pytest --update-golden and read what it wrote"
        assert text == path.read_text(), (
            f"{name} changed; if that is meant, run pytest --update-golden and read the diff"
        )

    return compare
