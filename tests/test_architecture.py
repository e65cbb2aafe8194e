"""Imports run one way: by the order of the rooms that docs/design.md gives, and without a circle inside any room."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx

from tests import ROOT

LINKED = {path.resolve().name: f"splitc.{path.name}" for path in (ROOT / "splitc").iterdir() if path.is_symlink()}
"""Folders at the top of the checkout -> the names they are imported by."""


def module_name(path: Path) -> str:
    """`splitc.passes.place` of `passes/place.py`."""
    first, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([LINKED.get(first, first), *(rest[:-1] if path.name == "__init__.py" else rest)])


def python_files() -> list[Path]:
    """Every product file once, under its real path."""
    rooms = [ROOT / "splitc", *(ROOT / folder for folder in LINKED)]
    return sorted({path.resolve() for room in rooms for path in room.rglob("*.py")})


MODULES = {module_name(path): path for path in python_files()}


@cache
def statements(module: str) -> list[tuple[ast.AST, bool]]:
    """The statements of a module, at any depth, and whether they stand in a function; expressions import nothing."""
    found: list[tuple[ast.AST, bool]] = [(ast.parse(MODULES[module].read_text()), False)]
    for node, inside in found:  # which grows meanwhile
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += [(each, inside) for each in getattr(node, block, ())]
    return found


@cache
def imported(module: str) -> frozenset[str]:
    """The modules that a module imports, anywhere in its file, type-only imports included."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(name for node, _ in statements(module) for name in _names(node, package))


def _names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        origin = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            yield f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in MODULES else origin


def import_order() -> list[list[str]]:
    """The levels of docs/design.md, lowest first; rooms of one level do not import each other."""
    line = re.search(r"^Import order: (.*?)\.$", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE | re.DOTALL)
    assert line is not None
    return [re.findall(r"`(\w+)`", level) for level in line[1].split("<")]


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


ROOMS = sorted({room(module) for module in MODULES} - {"splitc"})  # whose names load on first use


def test_a_module_imports_only_from_its_own_room_or_from_rooms_below() -> None:
    levels = {room: number for number, level in enumerate(import_order()) for room in level}
    upwards = [
        f"{module} imports {other}"
        for module in MODULES
        if room(module) in ROOMS
        for other in imported(module)
        if other in MODULES and room(other) != room(module) and levels[room(other)] >= levels[room(module)]
    ]
    assert upwards == []


def test_the_files_and_folders_of_a_folder_import_each_other_in_one_direction() -> None:
    """Each folder inside counts as one; imports for types only count too."""
    for folder in sorted({module.rpartition(".")[0] for module in MODULES} - {""}):
        inside = [module for module in MODULES if module.startswith(f"{folder}.")]
        entry = {module: module.removeprefix(f"{folder}.").split(".")[0] for module in inside}
        graph = nx.DiGraph(
            (entry[module], entry[name])
            for module in inside
            for name in imported(module)
            if name in entry and entry[name] != entry[module]
        )
        assert list(nx.simple_cycles(graph)) == [], folder


def test_the_runtime_imports_torch_and_itself_only() -> None:
    """So that a build can bring it along and run where splitc is not installed."""
    allowed = {"torch", *sys.stdlib_module_names}
    for module in (module for module in MODULES if room(module) == "runtime"):
        for name in imported(module):
            assert name.split(".")[0] in allowed or name.startswith("splitc.runtime"), f"{module} imports {name}"


def test_imports_stand_at_the_top_of_a_file() -> None:
    """But in `cli`, which loads torch late."""
    inner = [
        f"{MODULES[module]}:{node.lineno}"
        for module in MODULES
        if room(module) in set(ROOMS) - {"cli"}
        for node, inside in statements(module)
        if inside and isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert inner == []


FOLDERS = sorted({path.parent.name for path in ROOT.glob("*/*.py") if not path.parent.name.startswith(".")})
"""The folders at the top of the checkout that hold code."""


def test_passes_and_cost_models_have_one_import_name_each() -> None:
    """Under a second name a module would load twice, and its classes would differ from themselves."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(rf"^ *(from|import) ({'|'.join(LINKED)})[. ]", path.read_text(), re.MULTILINE), path


def test_few_files_lie_directly_in_splitc() -> None:
    assert len(list((ROOT / "splitc").glob("*.py"))) <= 14


# -- the tests ---------------------------------------------------------------------------------------------------------

TESTS = ROOT / "tests"


def test_every_folder_of_tests_is_a_room_of_the_product() -> None:
    """Or of the benchmarks, or an example; those of several rooms at once, and helpers, aside."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    for folder in folders - {Path("end_to_end")}:
        room = ROOT / folder if folder.parts[:1] == ("benchmarks",) else ROOT / "splitc" / folder
        assert room.is_dir() or (ROOT / "examples" / folder).is_dir(), f"tests/{folder} is no room of splitc"


def test_only_the_tests_of_the_benchmarks_import_benchmarks() -> None:
    """The equations of the papers aside, which tests of several rooms compare with."""
    for path in TESTS.rglob("*.py"):
        if path.relative_to(TESTS).parts[0] not in ("benchmarks", "golden"):
            assert not re.search(r"^ *(from|import) benchmarks\b(?!\.papers\b)", path.read_text(), re.MULTILINE), path
