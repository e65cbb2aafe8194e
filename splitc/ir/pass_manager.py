"""Passes and the runner that verifies, times and shows the program after each of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar

from splitc.errors import InternalError, bullets
from splitc.ir.program import Program

Check = Callable[[Program], list[str]]
"""Finds what is wrong with a program: one line for each problem, none when it holds."""

Watcher = Callable[["Pass", Program, float], None]
"""Called after every pass with the pass, what it returned and the seconds it took."""


class Pass(ABC):
    """One step of the compiler: it decides (fills plan or costs) or rewrites (changes the graph), never both.

    A subclass is a small frozen dataclass: its fields are its options.  `requires` must hold before it runs, `ensures`
    of what it returns.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[Check, ...]] = ()
    ensures: ClassVar[tuple[Check, ...]] = ()

    @abstractmethod
    def run(self, program: Program) -> Program:
        """The program with this pass's decision or rewrite; the one given stays as it was."""


def run_passes(program: Program, passes: Iterable[Pass], watch: Watcher | None = None) -> Program:
    """Run `passes` in order, check each one's promises on what it returns, and call `watch` after each.

    Raises InternalError that names the pass when a promise is broken.
    """
    for each in passes:
        _verify(program, each.requires, f"{each.name} cannot start")
        begin = time.perf_counter()
        program = each.run(program)
        seconds = time.perf_counter() - begin
        _verify(program, each.ensures, f"{each.name} broke the program")
        if watch is not None:
            watch(each, program, seconds)
    return program


def _verify(program: Program, checks: tuple[Check, ...], title: str) -> None:
    problems = [f"{check.__name__}: {problem}" for check in checks for problem in check(program)]
    if problems:
        raise InternalError(bullets(f"{title}:", problems))
