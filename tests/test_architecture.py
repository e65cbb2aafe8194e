"""Imports run one way: by the order of the rooms that docs/design.md gives, and without a circle inside any room."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

from tests import ROOT

LINKED = {"passes": "splitc.passes", "cost_models": "splitc.cost_models"}
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
def imported(module: str) -> frozenset[str]:
    """The modules that a module imports, anywhere in its file, type-only imports included."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(name for node in ast.walk(ast.parse(path.read_text())) for name in _names(node, package))


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
    line = re.search(r"^Import order: (.*)\.$", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    assert line is not None
    return [re.findall(r"`(\w+)`", level) for level in line[1].split("<")]


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_own_room_or_from_rooms_below(module: str) -> None:
    levels = {name: number for number, level in enumerate(import_order()) for name in level}
    if module == "splitc":
        return  # its names load on first use
    for name in imported(module):
        if name in MODULES and room(name) != room(module):
            assert levels[room(name)] < levels[room(module)], f"{module} imports {name}"


@pytest.mark.parametrize("folder", sorted({module.rpartition(".")[0] for module in MODULES} - {""}))
def test_the_files_and_folders_of_a_folder_import_each_other_in_one_direction(folder: str) -> None:
    """Each folder inside counts as one; imports for types only count too."""
    inside = [module for module in MODULES if module.startswith(f"{folder}.")]
    entry = {module: module.removeprefix(f"{folder}.").split(".")[0] for module in inside}
    graph = nx.DiGraph(
        (entry[module], entry[name])
        for module in inside
        for name in imported(module)
        if name in entry and entry[name] != entry[module]
    )
    assert list(nx.simple_cycles(graph)) == []


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("splitc.runtime")])
def test_the_runtime_imports_torch_and_itself_only(module: str) -> None:
    for name in imported(module):
        first = name.split(".")[0]
        assert first == "torch" or first in sys.stdlib_module_names or name.startswith("splitc.runtime"), name


@pytest.mark.parametrize("module", MODULES)
def test_imports_stand_at_the_top_of_a_file(module: str) -> None:
    """The command line, which loads torch late, is the exception."""
    if room(module) == "cli":
        return
    functions = [n for n in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(n, ast.FunctionDef)]
    inner = [n.lineno for f in functions for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert inner == [], f"{MODULES[module]} imports inside a function, lines {inner}"


@pytest.mark.parametrize("folder", ["splitc", "passes", "cost_models", "tests", "benchmarks", "examples"])
def test_passes_and_cost_models_have_one_import_name_each(folder: str) -> None:
    """Under a second name a module would load twice, and its classes would differ from themselves."""
    for path in (ROOT / folder).rglob("*.py"):
        assert not re.search(rf"^ *(from|import) ({'|'.join(LINKED)})[. ]", path.read_text(), re.MULTILINE), path


def test_few_files_lie_directly_in_splitc() -> None:
    assert len(list((ROOT / "splitc").glob("*.py"))) <= 14
