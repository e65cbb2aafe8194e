"""Write the file of a rank program: its inputs and outputs, its Stage, its buckets, and one step, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from splitc import units
from splitc.codegen.cut_lines import common_batch, in_state
from splitc.codegen.features import constant_imports, features
from splitc.codegen.layout import docstring
from splitc.codegen.rank_spec import trained_every_microbatch
from splitc.codegen.stage import module_imports, shape_text, stage_class
from splitc.codegen.stage_names import bucket_table, constant
from splitc.codegen.step_functions import step_functions
from splitc.ir.constructors import literal
from splitc.ir.program import LoweredProgram, PlacedProgram, Stage, TensorSpec
from splitc.ir.regions import regions
from splitc.ir.roles import ranks_text
from splitc.ir.schedule.actions import RankProgram
from splitc.ir.wire import numel_on
from splitc.runtime.collectives.layouts import Move


def role_file(program: LoweredProgram, rank_program: RankProgram) -> str:
    """The module of the ranks that have the same roles."""
    plan = program.plan
    stages = program.stages_of(rank_program)
    held = stages or [own for each in features() if (own := each.stage(program, rank_program)) is not None]
    peaks = {stage.role: {plan.peak_batch(stage.role, rank) for rank in rank_program.ranks} for stage in stages}
    batches = {role: min(found) if len(found) == 1 else None for role, found in peaks.items()}
    tables, functions = _constants(program, rank_program, stages), step_functions(program, rank_program)
    parts = [[f'PLAN = "{plan.hash}"'], stage_class(program, held, batches), *tables, *functions]
    body = "\n\n\n".join(map("\n".join, parts)).splitlines()
    constants = [line for each in constant_imports(body) for line in ("", each)]
    return "\n".join([*_header(program, rank_program, stages), "", *module_imports(body), *constants, "", *body, ""])


def _header(program: PlacedProgram, rank_program: RankProgram, stages: list[Stage]) -> list[str]:
    plan = program.plan
    roles = " and ".join(f'"{role}"' for role in rank_program.roles)
    title = f"Role{'s' if len(rank_program.roles) > 1 else ''} {roles} of {program.name}: "
    title += f"{ranks_text(rank_program.ranks)} of {plan.world}."
    lines: list[str] = []
    rows = [row for stage in stages for row in _rows(program, rank_program, stage)]
    width = max((len(name) for _, name, _ in rows), default=0)
    rows += [("out", "loss", "")] * any(stage.has_loss for stage in stages)
    before = ""
    for kind, name, text in sorted(rows, key=lambda row: row[0] != "in"):
        lines.append(f"{kind if kind != before else '':<9}{name:<{width}}  {text}".rstrip())
        before = kind
    if stages:
        held = [each for stage in stages for each in _held(program, stage)]
        count, nbytes = sum(numel for numel, _ in held), sum(numel * size for numel, size in held)
        lines.append(f"holds    {units.count(count)} parameters, {units.nbytes(nbytes)}")
        work = [(program.costs[layer], plan.largest_batch(stage.role)) for stage in stages for layer in stage.layers]
        flops = sum(cost.at(batch).flops for cost, batch in work)
        seconds = sum(plan.prediction.layer_seconds.get(layer, 0.0) for stage in stages for layer in stage.layers)
        cost = f", {units.seconds(seconds)} of compute in a step on {plan.prediction.cluster}" * bool(seconds)
        lines.append(f"predicts {units.flops(flops)}{cost}")
    else:
        lines.append("holds    its rows of the parameters, which rankN.py lists")
    for k, own in enumerate({own.path: own for stage in stages for _, own in regions(program, stage.graph)}.values()):
        where = f"{own.path or 'the whole model'}, since {own.why.partition(': ')[0]} cannot be traced"
        lines.append(f"{'' if k else 'own code':<9}{where}")
    return docstring(title, [*lines, f"plan     {plan.hash}"])


def _rows(program: PlacedProgram, rank_program: RankProgram, stage: Stage) -> Iterator[tuple[str, str, str]]:
    """(in or out, name, the rest) of what a stage exchanges with other ranks."""
    inputs = {i.name: i.spec for i in program.inputs}
    batch = common_batch(program, rank_program, stage)

    def text(spec: TensorSpec, note: str) -> str:
        return f"{shape_text(spec, batch):<22} {str(spec.dtype).removeprefix('torch.'):<8} {note}"

    for name in stage.inputs:
        yield "in", name, text(inputs[name], "read by this role")
    for cut in stage.receives:
        if cut.gathered and cut.entry is not None:
            size = program.plan.groups[stage.role].size
            how = "gathered over" if cut.entry.move is Move.GATHER else f"{cut.entry}, in"
            yield "in", cut.name, text(cut.spec, f"{how} groups of {size} ranks")
        if cut.sent:
            yield "in", cut.name, text(cut.spec, f"<- {cut.producer}{in_state(cut.arrives)}")
    for cut in stage.sends:
        if cut.sent:
            back = ", its gradient comes back" if cut.gradient else ""
            yield "out", cut.name, text(cut.spec, f"-> {cut.consumer}{in_state(cut.arrives)}{back}")


def _held(program: PlacedProgram, stage: Stage) -> Iterator[tuple[int, int]]:
    """(elements, bytes of one) of every parameter on the first rank of the role."""
    for tensor in map(program.tensors.__getitem__, stage.tensors):
        if tensor.parameter:
            yield numel_on(program, stage, tensor.name, program.plan.roles[stage.role][0]), tensor.dtype.itemsize


def _constants(program: LoweredProgram, rank_program: RankProgram, stages: list[Stage]) -> Iterator[list[str]]:
    """The tables that the functions of a step read."""
    for stage in (stage for stage in stages if stage.buckets):
        name = constant("BUCKETS", rank_program, stage)
        head = f"{name} = (  # gradients all-reduced together, in the order of backward"
        yield bucket_table(program, stage, stage.buckets, head)
    for stage in stages:
        for feature in features():
            yield from feature.tables(program, rank_program, stage)
    if any(action.verb == "all_reduce_tied" for action in rank_program.actions):
        yield _tied(program, rank_program)
    if every := {stage.role: names for stage in stages if (names := trained_every_microbatch(program, stage))}:
        yield _every_microbatch(every)


def _tied(program: PlacedProgram, rank_program: RankProgram) -> list[str]:
    lines = ["TIED = {  # parameters that several roles use -> the ranks over which their gradients are summed"]
    found = {name: ranks for name, ranks in program.tied.items() if set(rank_program.ranks) <= set(ranks)}
    return [*lines, *(f"    {literal(name)}: {ranks}," for name, ranks in found.items()), "}"]


def _every_microbatch(trained: Mapping[str, Sequence[str]]) -> list[str]:
    lines = ["EVERY_MICROBATCH = {  # parameters that are updated after every microbatch, unlike in one process"]
    for role, names in trained.items():
        lines += [f'    "{role}": (', *(f"        {literal(name)}," for name in names), "    ),"]
    return [*lines, "}"]
