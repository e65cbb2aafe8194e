"""Give a lowered program the stages of its evaluation, where a model in evaluation mode computes something else.

The same plan places its layers by name, and the same passes rewrite its graph; the stages of training hold what both
read.  Of subnets the whole model is evaluated, by the shards in which ranks own it between rounds.

Evaluation trains nothing, so every value that training changes must be read in a role that has it anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

from splitc.errors import PlacementError, SplitcError
from splitc.ir.graph import copy_graph, info, update_info
from splitc.ir.pass_manager import Pass, run_pass, run_passes
from splitc.ir.program import LoweredProgram, PlacedProgram, Program, Refusal, TensorSpec
from splitc.passes.features import features, plan_of
from splitc.passes.rewriting import ON_THE_GRAPH
from splitc.passes.schedule import ScheduleForward
from splitc.passes.split_ranks import SplitRanks


def with_evaluation(program: LoweredProgram, captured: Program) -> LoweredProgram:
    """The program with its evaluation lowered too; with the reason where that is not possible.

    captured: what `program` was lowered from.  Raises PlacementError where subnets cannot be evaluated, of which
    the statistics of the whole model are computed so.
    """
    needed = next((each.needed for each in features() if each.evaluated(program.plan) is not program.plan), "")
    if needed and program.evaluation is None:
        program = replace(program, evaluation=captured)  # which shards of the whole model compute otherwise
    evaluation, tensors = program.evaluation, program.tensors
    if isinstance(evaluation, Program):
        own = {name: t for name, t in evaluation.tensors.items() if name not in tensors}
        tensors = {**tensors, **{name: replace(t, requires_grad=False) for name, t in own.items()}}
        try:
            evaluation = _lowered(program, replace(evaluation, tensors=tensors))
        except SplitcError as error:
            evaluation = Refusal(str(error))
    if isinstance(evaluation, Refusal) and needed:
        raise PlacementError(f"{needed}: {evaluation.why}")
    if not isinstance(evaluation, LoweredProgram):
        return replace(program, evaluation=evaluation)
    stages = []
    for stage in program.stages:
        other = evaluation.stage(stage.role)
        held = {*stage.tensors, *other.tensors}
        both = tuple(name for name in tensors if name in held)
        stages.append(replace(stage, tensors=both, shards={**other.shards, **stage.shards}))
    return replace(program, tensors=tensors, stages=tuple(stages), evaluation=evaluation)


def _lowered(program: LoweredProgram, evaluation: Program) -> LoweredProgram:
    graph, _ = copy_graph(evaluation.graph)
    for node in graph.nodes:
        if isinstance(spec := info(node).spec, TensorSpec):
            update_info(node, spec=replace(spec, requires_grad=False))
    placed = replace(evaluation, graph=graph, costs=program.costs).placed(plan_of(program.plan))
    lowered = lowered_beside(program, placed, ScheduleForward())
    for problem in _stale(program, lowered):
        raise PlacementError(problem)
    return lowered


def lowered_beside(
    program: LoweredProgram, placed: PlacedProgram, schedule: Pass[LoweredProgram, LoweredProgram]
) -> LoweredProgram:
    """Lower what is computed without gradients, of the parameters that `program` trains."""
    lowered = run_pass(SplitRanks(), run_passes(placed, ON_THE_GRAPH))
    return run_pass(schedule, reduce(lambda each, feature: feature.beside(program, each), features(), lowered))


def _stale(program: LoweredProgram, evaluation: LoweredProgram) -> Iterator[str]:
    """What evaluation reads in a role where training does not update it, or divides otherwise."""
    changed = {name for name, t in program.tensors.items() if t.trainable or (t.persistent and not t.parameter)}
    held = {name for stage in program.stages for name in stage.tensors}
    for stage in evaluation.stages:
        training = program.stage(stage.role)
        for name in stage.tensors:
            if name in changed & held and name not in training.tensors:
                yield f"evaluation reads {name} in role {stage.role}, which does not have it in training"
            if name in training.tensors and stage.shards.get(name) != training.shards.get(name):
                yield f"evaluation reads {name} in role {stage.role} in another division than training"
