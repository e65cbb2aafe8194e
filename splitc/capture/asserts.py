"""Tell whether an assert statement asks for the truth of a value, and with which truth the statement passes.

An assertion on data has no part in what a model computes, so a trace leaves it out.  `if bad: raise ...` is one too,
unless its function handles what is raised.  In bytecode `assert not x` is a jump over the code that raises; where a
statement tests several values, each is taken for what lets it pass.
"""

from __future__ import annotations

import ast
import dis
import linecache
from functools import cache
from types import FrameType

_Range = tuple[tuple[int, int], tuple[int, int]]
"""First line and column, last line and column."""

_Statement = tuple[_Range, _Range | None]
"""Where an assertion stands, and where it raises if it is an `if`."""


def passing_truth(frame: FrameType) -> bool | None:
    """The truth of the value that `frame` tests at this moment with which its assert passes; None in other code."""
    code = list(dis.get_instructions(frame.f_code))
    k = next(k for k, each in enumerate(code) if each.offset == frame.f_lasti)
    while code[k].opname in ("COMPARE_OP", "TO_BOOL", "CACHE", "EXTENDED_ARG"):
        k += 1
    jump = code[k]
    if "IF_TRUE" not in jump.opname and "IF_FALSE" not in jump.opname:
        return None
    statement = next((each for each in _asserts(frame.f_code.co_filename) if _is_in(jump, each[0])), None)
    if statement is None:
        return None
    taken, target = "IF_TRUE" in jump.opname, next(i for i, each in enumerate(code) if each.offset == jump.argval)
    if _fails(code, target, statement):
        return not taken
    return taken if _fails(code, k + 1, statement) or not _is_in(code[target], statement[0]) else True


def _fails(code: list[dis.Instruction], k: int, statement: _Statement) -> bool:
    """Whether the code from `k` on raises, after it has dropped a value that was compared."""
    while code[k].opname in ("POP_TOP", "NOT_TAKEN", "CACHE", "EXTENDED_ARG"):
        k += 1
    if statement[1] is not None:
        return _is_in(code[k], statement[1])
    return code[k].opname == "LOAD_ASSERTION_ERROR" or code[k].argrepr == "AssertionError"


def _is_in(each: dis.Instruction, statement: _Range) -> bool:
    at, (first, last) = each.positions, statement
    return at is not None and at.lineno is not None and first <= (at.lineno, at.col_offset or 0) <= last


@cache
def _asserts(file: str) -> tuple[_Statement, ...]:
    """The assertions of a file; none where its text is not known."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()
    handled = {each for node in nodes if isinstance(node, ast.Try) for s in node.body for each in ast.walk(s)}
    found: list[_Statement] = [(_range(node, node), None) for node in nodes if isinstance(node, ast.Assert)]
    for node in nodes:
        if isinstance(node, ast.If) and isinstance(raised := node.body[0], ast.Raise) and node not in handled:
            found.append((_range(node, raised), _range(raised, raised)))
    return tuple(found)


def _range(first: ast.stmt, last: ast.stmt) -> _Range:
    return (first.lineno, first.col_offset), (last.end_lineno or 0, last.end_col_offset or 0)
