"""Imports run one way: core <- cost_models <- passes <- api, codegen, cli; the runtime imports torch and itself."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

from tests import ROOT

FILES = sorted(p for room in ("splitc", "cost_models", "passes") for p in (ROOT / room).rglob("*.py"))
UPPER = {
    "api",
    "build",
    "cli",
    "codegen",
    "deferred",
    "fits",
    "model_file",
    "module_tree",
    "one_process",
    "rank_memory",
    "rank_source",
    "report",
    "part_source",
    "step_source",
    "stage_source",
    "verify",
    "demo",
    "sweep",
}


def module_name(path: Path) -> str:
    parts = path.relative_toROOT.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, at_top: bool = True) -> Iterator[str]:
    """Absolute names of the modules that a file imports when it is loaded (`at_top`), or ever."""
    tree = ast.parse(path.read_text())
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    skipped = {id(n) for node in tree.body if _type_checking(node) for n in ast.walk(node)}
    for node in tree.body if at_top else ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{package}.{node.module}" if node.level else str(node.module)


def _type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def level(module: str) -> int:
    room, _, rest = module.partition(".")
    if room == "cost_models":
        return 1
    if room == "passes":
        return 2
    return 3 if rest.split(".")[0] in UPPER else 0


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_module_imports_only_from_its_own_room_or_below(path: Path) -> None:
    own = module_name(path)
    for name in imports(path, at_top=False):
        if name.split(".")[0] in ("splitc", "cost_models", "passes"):
            lazily = own in ("splitc", "splitc.api", "splitc.cli")
            assert level(name) <= level(own) or lazily, f"{own} imports {name}, which lies above it"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = nx.DiGraph((module_name(path), name) for path in FILES for name in imports(path))
    ours = graph.subgraph(n for n in graph if n.split(".")[0] in ("splitc", "cost_models", "passes"))
    assert list(nx.simple_cycles(ours)) == []


@pytest.mark.parametrize("path", sorted((ROOT / "splitc" / "runtime").glob("*.py")), ids=lambda p: p.stem)
def test_the_runtime_imports_torch_and_itself_only(path: Path) -> None:
    for name in imports(path, at_top=False):
        root = name.split(".")[0]
        assert root == "torch" or root in sys.stdlib_module_names or name.startswith("splitc.runtime"), name
