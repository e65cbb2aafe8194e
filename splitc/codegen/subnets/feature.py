"""The lines and tables of what is dealt to ranks, and what they do when the whole model is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from torch.nn.modules.batchnorm import _BatchNorm

from splitc.codegen.features import Feature, Writer
from splitc.codegen.layout import Line
from splitc.codegen.rank_spec import role_spec
from splitc.codegen.stage_names import constant
from splitc.ir.constructors import literal
from splitc.ir.program import LoweredProgram, Stage
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.runtime.spec import RankSpec, RoleSpec

_NOTES = {
    "deal": "this rank's slices arrive",
    "fetch_ahead": "what the next slices have and nobody trains begins to arrive",
    "collect": "back to their owners",
}


class Subnets(Feature):
    """Slices that arrive before a round and go back after it."""

    notes: ClassVar = {
        "evaluated": "in evaluation the ranks are one group, which holds the whole model",
        "recomputed": "statistics that evaluation computes of a sample of batches",
    }

    def of_rank(self, program: LoweredProgram, spec: RankSpec) -> RankSpec:
        if not program.plan.deals:
            return spec
        stages = [program.stage(role) for role in program.plan.roles_of(spec.index)]
        evaluated = tuple(_evaluated(program, stage, spec.index) for stage in stages)
        return replace(spec, evaluated=evaluated, recomputed=tuple(n for each in stages for n in _norms(program, each)))

    def tables(self, program: LoweredProgram, rank_program: RankProgram, stage: Stage) -> Iterator[list[str]]:
        if stage.dealt:
            yield _dealt(rank_program, stage)

    def lines(self, writer: Writer, action: Action, comm: str) -> list[Line] | None:
        if action.verb not in _NOTES:
            return None
        dealt = constant("DEALT", writer.rank_program, writer.program.stage(action.role))
        return [(f"{comm}.{action.verb}(stage, {dealt})", _NOTES[action.verb])]

    def held_as(self, stage: Stage, name: str) -> str:
        return "dealt" if name in stage.dealt else ""


FEATURE = Subnets()


def _evaluated(program: LoweredProgram, stage: Stage, rank: int) -> RoleSpec:
    """What a rank does in a role when the whole model is evaluated, by another plan than that of training."""
    assert isinstance(program.evaluated, LoweredProgram)
    evaluation = replace(program.evaluated, outputs=program.outputs)
    return replace(role_spec(evaluation, evaluation.stage(stage.role), rank), shards={})


def _norms(program: LoweredProgram, stage: Stage) -> Iterator[str]:
    """The normalisations of a role with subnets, whose statistics training does not know: those of all neurons."""
    for node in stage.graph.nodes if stage.dealt else ():
        module = program.root.get_submodule(path) if (path := str(node.target)) and node.op == "call_module" else None
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            yield path


def _dealt(rank_program: RankProgram, stage: Stage) -> list[str]:
    name = constant("DEALT", rank_program, stage)
    lines = [f"{name} = {{  # tensor -> dim -> the neurons along it, dealt in each round"]
    for name, dims in stage.dealt.items():
        runs = {
            dim: " ".join(f"Neurons({literal(run.layer)}, {run.width})," for run in own) for dim, own in dims.items()
        }
        lines.append(f"    {literal(name)}: {{{', '.join(f'{dim}: ({text})' for dim, text in runs.items())}}},")
    return [*lines, "}"]
