"""Prove that a refactor kept the generated programs: golden programs of two commits, compared as syntax trees.

    python -m benchmarks.refactor f868e7a

Each golden program of the commit is renamed by the tables below and compared with today's by `ast.dump`.  Comments,
docstrings and plan hashes are masked.  Changes made on purpose are undone first:

    RENAMED        words: nodes, runtime methods, classes and their arguments
    roles          role names, from the plans of both commits: `conv` is `trunk` in a model without convolutions, ...
    FLATTENED      tuples that became classes with named fields
    _is_omitted    arguments of rankN.py that are new, or left out where they say nothing
    single use     a value that is read once may have a line of its own
    launch.py      not compared: it shows the training loop now, which `splitc.runtime.launch` held

The exit status is 1 when anything else differs.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path("tests/golden")

RENAMED = {
    "keep": "slice_batch",
    "spread": "all_gather_grad",
    "give_back": "modulo_grad",
    "enter": "copy_to_group",
    "sum_partials": "reduce_from_group",
    "sum_tied": "all_reduce_tied",
    "total_weight": "global_weight",
    "share": "scale_by_share",
    "serve": "send_parameters",
    "collect": "reduce_gradients",
    "turns": "microbatches",
    "Rank": "RankSpec",
    "Seat": "RoleSpec",
    "seats": "roles",
    "shares": "shards",
    "bounds": "batch_offsets",
    "EVERY_TURN": "EVERY_MICROBATCH",
}
"""Old word -> new word, of attributes, arguments, classes and constants."""

FLATTENED = {
    "Route": ("peer", "first", "last"),
    "Shard": ("dim", "first", "last"),
    "Rows": ("server", "first", "last"),
    "Input": ("shape", "dtype", "high"),
}
"""Class of a generated value -> its fields, which were a tuple."""


def main() -> int:
    """Compare and print; 1 when a program differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refactor", description=__doc__.partition("\n")[0])
    parser.add_argument("commit", help="the commit before the refactor")
    commit = parser.parse_args().commit
    differing = compared = 0
    for folder in sorted(path for path in (ROOT / GOLDEN).iterdir() if (path / "plan.json").exists()):
        old_names = _git("ls-tree", "--name-only", f"{commit}:{GOLDEN / folder.name}").split()
        roles = _roles(json.loads(_git("show", f"{commit}:{GOLDEN / folder.name}/plan.json")), folder)
        for name in (n for n in old_names if n.endswith(".py") and n != "launch.py"):
            new = folder / f"{'_'.join(roles.get(part, part) for part in _parts(name, roles))}.py"
            before = _tree(_git("show", f"{commit}:{GOLDEN / folder.name}/{name}"), roles)
            same = new.exists() and before == _tree(new.read_text(), {})
            compared, differing = compared + 1, differing + (not same)
            if not same:
                print(f"{folder.name}/{name} differs from {new.name}")
                print(_first_difference(before, _tree(new.read_text(), {}) if new.exists() else ""))
    print(f"{compared} programs compared with those of {commit}, {differing} differ")
    return 1 if differing else 0


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _roles(old: dict[str, Any], folder: Path) -> dict[str, str]:
    """Old role name -> new one, by their order in the plan."""
    new = json.loads((folder / "plan.json").read_text())
    return dict(zip(old["roles"], new["roles"], strict=True))


def _parts(name: str, roles: dict[str, str]) -> list[str]:
    stem = name.removesuffix(".py")
    return stem.split("_") if set(stem.split("_")) <= set(roles) | {"server"} else [stem]


def _tree(text: str, roles: dict[str, str]) -> str:
    """`ast.dump` of a program, with old words renamed where `roles` are those of the old commit."""
    if roles:
        text = re.sub(r"\brank\.(?=\w+\()", "comm.", text)
        text = re.sub(r"(def \w+\((?:self, )?)rank\b", r"\1comm", text)
        text = re.sub(r"(stage(?:\.\w+)?\()rank\b", r"\1comm", text)
    tree = _Rename(roles).visit(ast.parse(text)) if roles else ast.parse(text)
    tree = _Flatten().visit(_Mask().visit(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("forward"):
            _inline_single_use(node)
    return ast.dump(tree, indent=1)


class _Rename(ast.NodeTransformer):
    def __init__(self, roles: dict[str, str]) -> None:
        self._roles = roles

    def _new(self, word: str) -> str:
        word = RENAMED.get(word, word)
        for old, new in self._roles.items():  # forward_conv, CONV_BUCKETS, cut0_fc
            word = re.sub(rf"(?<![a-z0-9]){old}(?![a-z0-9])", f"<{new}>", word)
            word = re.sub(rf"^{old.upper()}(?=_BUCKETS)", f"<{new.upper()}>", word)
        return re.sub(r"[<>]", "", re.sub(r"(?<=^cut)(\d+)_own$", r"\1_slice", word))

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field, value in ast.iter_fields(node):
            if isinstance(value, str) and not (isinstance(node, ast.Constant) and value.count(" ") > 1):
                setattr(node, field, self._new(value))
        return super().generic_visit(node)


class _Mask(ast.NodeTransformer):
    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if ast.unparse(node.targets[0]) in ("PLAN", "__all__") else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None


class _Flatten(ast.NodeTransformer):
    """Write `Route(peer=0, first=0, last=4)` as the tuple that it was."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.keywords = [k for k in node.keywords if not _is_omitted(k)]
        fields = FLATTENED.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if fields is None:
            return node
        given = dict(zip(fields, node.args, strict=False)) | {str(k.arg): k.value for k in node.keywords}
        return ast.Tuple([given.get(field, ast.Constant(None)) for field in fields], ast.Load())


def _is_omitted(keyword: ast.keyword) -> bool:
    """Whether an argument says nothing: no inputs, one microbatch, or the server's rows, which are imported."""
    value = keyword.value
    if keyword.arg == "inputs":
        return isinstance(value, ast.Dict) and not value.keys
    return keyword.arg == "served" or (keyword.arg == "scheme" and ast.unparse(value) == "'BK'")


def _inline_single_use(function: ast.FunctionDef) -> None:
    """Put the value of each name that is assigned once and read once where it is read."""
    reads = Counter(n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    values: dict[str, ast.expr] = {}

    class Put(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return values.pop(node.id, node) if isinstance(node.ctx, ast.Load) else node

    body: list[ast.stmt] = []
    for statement in function.body:
        statement = Put().visit(statement)
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(statement, ast.Assign) and isinstance(target, ast.Name) and reads[target.id] == 1:
            values[target.id] = statement.value
        else:
            body.append(statement)
    function.body = body


def _first_difference(before: str, after: str) -> str:
    old, new = before.splitlines(), after.splitlines()
    at = next((k for k, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), min(len(old), len(new)))
    return "\n".join([*(f"  - {line}" for line in old[at : at + 6]), *(f"  + {line}" for line in new[at : at + 6])])


if __name__ == "__main__":
    sys.exit(main())
