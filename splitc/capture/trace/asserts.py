"""Tell whether an assert statement asks for the truth of a value, and with which truth the statement passes.

An assertion on data has no part in what a model computes, so a trace leaves it out.  `if bad: raise ...` is one too,
unless its function handles what is raised.  Where a statement tests several values, each is taken for what lets it
pass.
"""

from __future__ import annotations

import ast
import linecache
from functools import cache
from itertools import islice
from types import FrameType

_Place = tuple[int | None, int | None, int | None, int | None]
"""First and last line, first and last column."""


def passing_truth(frame: FrameType) -> bool | None:
    """The truth of the value that `frame` tests at this moment with which its assert passes; None in other code."""
    *before, own = islice(frame.f_code.co_positions(), frame.f_lasti // 2 + 1)
    value = next((place for place in reversed(before) if place != own), own)  # a jump may have that of another value
    tests = _asserts(frame.f_code.co_filename)
    found = (_truth(test, passes, place) for place in (value, own) for test, passes in tests)
    return next((truth for truth in found if truth is not None), None)


def _truth(test: ast.expr, wanted: bool, place: _Place) -> bool | None:
    """The truth of the part of a test at `place` that gives the test the wanted one; None where it has no such part."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truth(test.operand, not wanted, place)
    if isinstance(test, ast.BoolOp):
        found = (_truth(part, wanted, place) for part in test.values)
        return next((truth for truth in found if truth is not None), None)
    return wanted if place == (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset) else None


@cache
def _asserts(file: str) -> tuple[tuple[ast.expr, bool], ...]:
    """The tests of a file's assertions, with the truth that lets each pass; none where its text is not known."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()
    handled = {each for node in nodes if isinstance(node, ast.Try) for s in node.body for each in ast.walk(s)}
    asserts = [(node.test, True) for node in nodes if isinstance(node, ast.Assert)]
    ifs = (node for node in nodes if isinstance(node, ast.If) and node not in handled)
    return (*asserts, *((node.test, False) for node in ifs if isinstance(node.body[0], ast.Raise)))
