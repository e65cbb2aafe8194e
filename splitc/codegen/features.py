"""What a feature of training adds to the generated files."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import ClassVar, Protocol

from splitc.codegen.layout import Line
from splitc.features import parts
from splitc.ir.program import LoweredProgram, Stage
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.runtime.spec import RankSpec, RoleSpec


class Writer(Protocol):
    """What writes the functions of a rank program (`StepWriter`)."""

    program: LoweredProgram
    rank_program: RankProgram

    def comm(self, role: str) -> str: ...

    def lines(self, action: Action) -> list[Line]: ...

    def function_of(self, name: str, inputs: Sequence[str], doc: str, body: Sequence[Line]) -> list[str]: ...


class Feature:
    """A feature's part of the generated files; what it leaves out it does not add to.

    notes: the comments of the fields that it adds to a rank's description.
    constants: such a field that is alike on all ranks -> its constant, and the file that has it.
    docs: the docstrings of a function of ranks without stages, by its name.
    """

    notes: ClassVar[Mapping[str, str]] = {}
    constants: ClassVar[Mapping[str, tuple[str, str]]] = {}
    docs: ClassVar[Mapping[str, str]] = {}

    # -- files ---------------------------------------------------------------------------------------------------------

    def files(self, program: LoweredProgram) -> dict[str, str]:
        """Files beside those of roles and ranks."""
        return {}

    def held(self, program: LoweredProgram, rank: int) -> Iterable[str]:
        """The tensors that a rank holds beside those of its stages."""
        return ()

    def stage(self, program: LoweredProgram, rank_program: RankProgram) -> Stage | None:
        """What ranks without layers hold."""
        return None

    def held_as(self, stage: Stage, name: str) -> str:
        """How ranks hold a part of a tensor, in a word; "" where it is a shard."""
        return ""

    # -- the description of a rank -------------------------------------------------------------------------------------

    def of_rank(self, program: LoweredProgram, spec: RankSpec) -> RankSpec:
        """The description with what it adds."""
        return spec

    def of_role(self, program: LoweredProgram, rank: int, role: RoleSpec) -> RoleSpec:
        """The description of one of a rank's roles with what it adds."""
        return role

    # -- the lines of a step -------------------------------------------------------------------------------------------

    def tables(self, program: LoweredProgram, rank_program: RankProgram, stage: Stage) -> Iterator[list[str]]:
        """Yield the constants that its lines read."""
        yield from ()

    def functions(self, spec: RankSpec) -> tuple[str, ...]:
        """The names of the functions beside `step` that it calls."""
        return ()

    def further(self, writer: Writer) -> Iterator[list[str]]:
        """Yield the lines of these functions."""
        yield from ()

    def lines(self, writer: Writer, action: Action, comm: str) -> list[Line] | None:
        """The lines of one of its actions; None for others."""
        return None

    def around_backward(self, program: LoweredProgram, stage: Stage, comm: str) -> tuple[list[Line], list[Line]]:
        """What the backward of a stage runs in, and the lines after it."""
        return [], []

    def where(self, stages: Iterable[Stage]) -> str:
        """Where a step leaves gradients, beside `.grad`."""
        return ""


@cache
def features() -> tuple[Feature, ...]:
    """Those of the registry."""
    return tuple(part.FEATURE for part in parts("splitc.codegen", "feature"))


def constant_imports(lines: Iterable[str]) -> Iterator[str]:
    """Yield the imports of the constants that lines of a file use."""
    used = {node.id for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Name)}
    for feature in features():
        yield from (f"from {file} import {name}" for name, file in feature.constants.values() if name in used)
