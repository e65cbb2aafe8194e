"""Cut the methods of a stage into statements that communicate, and the parts between, to be compiled.

A part ends before a statement that calls the communicator for more than dropout or waits for what it has started, and
where the parameters of another gradient bucket begin: then the hooks of a bucket run while backward goes on below it,
as under DDPOptimizer.  Parts keep the file and line numbers of their method.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable, Mapping
from itertools import groupby
from types import FunctionType
from typing import Any

from torch import nn

Part = Callable[..., Any]
Buckets = Mapping[str, int]
"""`self.` and the path of a parameter, or of its module -> its bucket, counted in the order of backward."""

_PARSER = threading.Lock()  # that of Python 3.11 counts the depth of what all threads parse at once


def compiled_methods(stage: nn.Module, buckets: Buckets, compiled: Callable[[Part], Part]) -> dict[str, Part]:
    """The methods of a stage, whose parts are `compiled`."""
    made = {}
    for name, method in vars(type(stage)).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            with _PARSER:
                made[name] = _compiled_method(method, buckets, compiled).__get__(stage)
    return made


def _compiled_method(method: FunctionType, buckets: Buckets, compiled: Callable[[Part], Part]) -> Any:
    lines, first = inspect.getsourcelines(method)
    tree = ast.increment_lineno(ast.parse(textwrap.dedent("".join(lines))), first - 1)
    tree.body[:0] = parts = _cut(tree.body[0], buckets)
    scope = dict(method.__globals__)
    exec(compile(tree, method.__code__.co_filename, "exec"), scope)
    scope |= {part.name: compiled(scope[part.name]) for part in parts}
    return scope[method.__name__]


def _cut(method: Any, buckets: Buckets) -> list[ast.FunctionDef]:
    """Take the parts out of a method, as functions that it calls.  What is one operation by itself stays there."""
    bucket, keys, parts, body = 0, {}, list[ast.FunctionDef](), list[ast.stmt]()
    for line in reversed(method.body):
        bucket = max(bucket, *(buckets.get(_path(node), 0) for node in ast.walk(line)))
        keys[line] = _computes(line), bucket
    known = {argument.arg for argument in method.args.args}
    for (computes, _), group in groupby(method.body, lambda line: keys[line]):
        lines = list(group)
        made = _names(lines, ast.Store)
        if computes and sum(isinstance(node, (ast.Call, ast.BinOp)) for line in lines for node in ast.walk(line)) > 1:
            given = ["self", *sorted(known & _names(lines, ast.Load) - {"self"})]
            header, arguments = ", ".join(given), ", ".join({"comm": "comm.masks()"}.get(each, each) for each in given)
            results = ", ".join(sorted(made & _names([line for line in method.body if line not in lines], ast.Load)))
            name = f"_{method.name}_{len(parts)}"
            new: Any = ast.parse(f"def {name}({header}): return [{results}]\n[{results}] = {name}({arguments})")
            for node in ast.walk(new):
                ast.copy_location(node, lines[0])
            part, call = new.body
            part.body[:0] = lines
            parts.append(part)
            lines = [call]
        body += lines
        known |= made
    method.body = body
    return parts


def _computes(line: ast.stmt) -> bool:
    """Whether a statement assigns what it computes alone, or with dropout."""
    paths = [_path(node) for node in ast.walk(line)]
    waits = any(path.endswith(".wait") for path in paths)
    return isinstance(line, ast.Assign) and not waits and paths.count("comm") == paths.count("comm.dropout")


def _names(lines: list[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    nodes = (node for line in lines for node in ast.walk(line))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _path(node: ast.AST) -> str:
    """`self.layer1.0.conv1` of `self.layer1["0"]["conv1"]`."""
    match node:
        case ast.Attribute(owner, name) | ast.Subscript(owner, ast.Constant(name)):
            return f"{_path(owner)}.{name!s}"
        case ast.Name(name):
            return name
    return ""
