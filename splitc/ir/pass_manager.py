"""Passes and the runner that verifies, times and shows the program after each of them."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar

from splitc.errors import InternalError, bullets
from splitc.ir.program import Program

P = TypeVar("P", bound=Program)
Q = TypeVar("Q", bound=Program)

Check = Callable[[Any], list[str]]
"""Finds what is wrong with a program of the stage that a pass takes or returns: one line for each problem."""

Watcher = Callable[[Any, Program, float], None]
"""Called after every pass with the pass, the program it returned and the seconds it took."""


class Pass(ABC, Generic[P, Q]):
    """One step of the compiler, from a program of type P to one of type Q.

    It decides (fills plan or costs) or rewrites (changes the graph), never both.  A subclass is a small frozen
    dataclass: its fields are its options.  `requires` must hold before it runs, `ensures` of the program it returns.
    Its name is that of the class, in words: InsertComm is insert-comm.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[Check, ...]] = ()
    ensures: ClassVar[tuple[Check, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not hasattr(cls, "name"):  # else it is a variant of another pass
            cls.name = re.sub(r"\B(?=[A-Z])", "-", cls.__name__).lower()

    @abstractmethod
    def run(self, program: P) -> Q:
        """Return the program with this pass's decision or rewrite; `program` itself does not change."""


def run_pass(each: Pass[P, Q], program: P, watch: Watcher | None = None) -> Q:
    """Run one pass, check what it requires and ensures, and call `watch` with the result.

    Raises InternalError that names the pass when a check fails.
    """
    _verify(program, each.requires, f"{each.name} cannot start")
    begin = time.perf_counter()
    result = each.run(program)
    seconds = time.perf_counter() - begin
    _verify(result, each.ensures, f"{each.name} broke the program")
    if watch is not None:
        watch(each, result, seconds)
    return result


def run_passes(program: P, passes: Iterable[Pass[P, P]], watch: Watcher | None = None) -> P:
    """Run passes that keep the program's stage, in order."""
    for each in passes:
        program = run_pass(each, program, watch)
    return program


def _verify(program: Program, checks: tuple[Check, ...], title: str) -> None:
    if problems := [f"{check.__name__}: {problem}" for check in checks for problem in check(program)]:
        raise InternalError(bullets(f"{title}:", problems))
