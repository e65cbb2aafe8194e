"""Tell whether an assert statement asks for the truth of a value, and with which truth the statement passes.

An assertion on data has no part in what a model computes, so a trace leaves it out.  In bytecode `assert not x` is a
jump over the code that raises; where a statement tests several values, each is taken for what lets it pass.
"""

from __future__ import annotations

import ast
import dis
import linecache
from functools import cache
from types import FrameType

_Range = tuple[tuple[int, int], tuple[int, int]]
"""First line and column, last line and column."""


def passing_truth(frame: FrameType) -> bool | None:
    """The truth of the value that `frame` tests at this moment with which its assert passes; None in other code."""
    code = list(dis.get_instructions(frame.f_code))
    k = next(k for k, each in enumerate(code) if each.offset == frame.f_lasti)
    while code[k].opname in ("COMPARE_OP", "TO_BOOL", "CACHE", "EXTENDED_ARG"):
        k += 1
    jump = code[k]
    if "IF_TRUE" not in jump.opname and "IF_FALSE" not in jump.opname:
        return None
    statement = next((each for each in _asserts(frame.f_code.co_filename) if _is_in(jump, each)), None)
    if statement is None:
        return None
    taken, target = "IF_TRUE" in jump.opname, next(i for i, each in enumerate(code) if each.offset == jump.argval)
    if _fails(code, target):
        return not taken
    return taken if _fails(code, k + 1) or not _is_in(code[target], statement) else True


def _fails(code: list[dis.Instruction], k: int) -> bool:
    """Whether the code from `k` on raises the AssertionError, after it has dropped a value that was compared."""
    k += code[k].opname == "POP_TOP"
    return code[k].opname == "LOAD_ASSERTION_ERROR" or code[k].argrepr == "AssertionError"


def _is_in(each: dis.Instruction, statement: _Range) -> bool:
    at, (first, last) = each.positions, statement
    return at is not None and at.lineno is not None and first <= (at.lineno, at.col_offset or 0) <= last


@cache
def _asserts(file: str) -> tuple[_Range, ...]:
    """First and last line and column of each assert statement of a file; none where its text is not known."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()
    found = [node for node in nodes if isinstance(node, ast.Assert)]
    return tuple(((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in found)
