"""Write the file of a role: what comes in and goes out, its Stage, its buckets, and one step, line by line."""

from __future__ import annotations

from splitc import units
from splitc.actions import Action
from splitc.plan import ranks_text
from splitc.program import Cut, Program, Stage, TensorSpec
from splitc.stage_source import (
    aligned,
    forward_inputs,
    module_imports,
    parameter_count,
    shape_text,
    stage_class,
    variables,
)
from splitc.version import __version__


def role_file(program: Program, stage: Stage) -> str:
    """The module of one role."""
    plan = program.required_plan
    ranks = plan.roles[stage.role]
    batches = {plan.batch(rank) for rank in ranks}
    batch = batches.pop() if len(batches) == 1 else None
    stage_lines, returned = stage_class(program, stage, batch)
    body = [f'PLAN = "{plan.hash}"', "", "", *stage_lines, "", ""]
    if stage.buckets and len(ranks) > 1:
        body += [*_buckets(program, stage), "", ""]
    body += _step(program, stage, returned, batch)
    body += ["", "", *_evaluate(program, stage, returned, batch)]
    return "\n".join([*_role_header(program, stage, batch), "", *module_imports(body), "", *body, ""])


def _role_header(program: Program, stage: Stage, batch: int | None) -> list[str]:
    plan = program.required_plan
    inputs = {i.name: i.spec for i in program.inputs}
    rows = [("in", name, inputs[name], "read by this role") for name in stage.inputs]
    rows += [("in", cut.name, cut.spec, f"<- {cut.producer}") for cut in stage.receives]
    rows += [
        ("out", cut.name, cut.spec, f"-> {cut.consumer}" + (", its gradient comes back" if cut.gradient else ""))
        for cut in stage.sends
    ]
    lines = [
        f'"""Role "{stage.role}" of {program.name}: {ranks_text(plan.roles[stage.role])} of {plan.world}.  '
        f"Written by splitc {__version__}; yours to edit.",
        "",
    ]
    width = max((len(name) for _, name, _, _ in rows), default=0)
    before = ""
    for kind, name, spec, note in rows:
        lines.append(
            f"{kind if kind != before else '':<9}{name:<{width}}  {shape_text(spec, batch):<22} "
            f"{str(spec.dtype).removeprefix('torch.'):<8} {note}"
        )
        before = kind
    if stage.has_loss:
        lines.append(f"{'' if before == 'out' else 'out':<9}loss")
    held = [program.holdings[h] for h in stage.holdings]
    lines.append(
        f"holds    {units.count(parameter_count(program, stage))} parameters, "
        f"{units.nbytes(sum(h.nbytes for h in held if h.parameter))}"
    )
    flops, seconds = stage_work(program, stage)
    lines.append(f"predicts {units.flops(flops)}, {units.seconds(seconds)} of compute in a step on {plan.cluster}")
    return [*lines, f"plan     {plan.hash}", '"""']


def stage_work(program: Program, stage: Stage) -> tuple[float, float]:
    """FLOPs and compute seconds of the role's busiest rank in one step."""
    plan = program.required_plan
    batch = plan.largest_batch(stage.role)
    flops = sum(program.costs[layer].at(batch).flops for layer in stage.layers)
    return flops, sum(plan.seconds.get(layer, 0.0) for layer in stage.layers)


def _buckets(program: Program, stage: Stage) -> list[str]:
    lines = [
        "BUCKETS = (  # whose gradients are summed over the role together, in the order in which backward fills them"
    ]
    for bucket in stage.buckets:
        size = units.nbytes(sum(program.holdings[name].nbytes for name in bucket))
        lines.append(f"    (  # {size}")
        lines += [f'        "{name}",' for name in bucket]
        lines.append("    ),")
    return [*lines, ")"]


def _step(program: Program, stage: Stage, returned: list[str], batch: int | None) -> list[str]:
    arguments = ", ".join(["rank", "stage", *_input_names(stage)])
    body = [(text, note) for action in stage.actions for text, note in _lines(program, stage, action, returned, batch)]
    doc = '"""One batch forward and backward; the gradients are left in `.grad`, summed over the role."""'
    return [f"def step({arguments}):", f"    {doc}", *aligned([*body, (_return_loss(program, returned), "")], "    ")]


def _evaluate(program: Program, stage: Stage, returned: list[str], batch: int | None) -> list[str]:
    arguments = ", ".join(["rank", "stage", *_input_names(stage)])
    kept = [a for a in stage.actions if a.verb in ("recv", "send", "forward", "sum_loss")]
    body = [
        (text.replace(".requires_grad_()", ""), note)
        for action in kept
        for text, note in _lines(program, stage, action, returned, batch)
    ]
    return [
        f"def evaluate({arguments}):",
        '    """The loss of one batch, forward only."""',
        *aligned([*body, (_return_loss(program, returned), "")], "    "),
    ]


def _input_names(stage: Stage) -> list[str]:
    names = variables(stage.graph)
    return [names[node] for node in stage.graph.nodes if node.op == "placeholder"]


def _return_loss(program: Program, returned: list[str]) -> str:
    return f"return {returned[-1]}.detach()" if program.required_plan.world == 1 else "return total.wait()"


def _lines(
    program: Program, stage: Stage, action: Action, returned: list[str], batch: int | None
) -> list[tuple[str, str]]:
    """(statement, comment) of one action."""
    outputs = [cut for cut in stage.sends if cut.value not in stage.inputs]
    variable = {cut.name: returned[k] for k, cut in enumerate(outputs)}
    cuts = {cut.name: cut for cut in (*stage.sends, *stage.receives)}
    value, role = action.value, action.role
    if action.verb == "recv":
        grad = ".requires_grad_()" if cuts[value].gradient else ""
        return [(f"{value} = {_recv(cuts[value], role)}{grad}", f"<- {role}  {_size(cuts[value], batch)}")]
    if action.verb == "send":
        name = variable.get(value, value)
        return [(f'rank.send({name}, "{role}"{_layout(cuts[value].spec)})', f"-> {role}  {_size(cuts[value], batch)}")]
    if action.verb == "forward":
        call = f"stage({', '.join(['rank', *forward_inputs(stage)])})"
        return [(f"{', '.join(returned)} = {call}" if returned else call, "")]
    if action.verb == "sum_loss":
        if program.required_plan.world == 1:
            return []
        if stage.has_loss:
            return [(f"total = rank.sum_loss({returned[-1]})", "the global loss, the same on every rank")]
        return [(f"total = rank.sum_loss({zero_text(program)})", "this role adds nothing to the loss")]
    if action.verb == "recv_grad":
        return [(f"d_{value} = {_recv(cuts[value], role)}", f"<- {role}  {_size(cuts[value], batch)}")]
    if action.verb == "send_grad":
        return [
            (f'rank.send({value}.grad, "{role}"{_layout(cuts[value].spec)})', f"-> {role}  {_size(cuts[value], batch)}")
        ]
    if action.verb == "backward":
        return _backward(program, stage, returned)
    return []  # reduce: part of the backward's lines


def _backward(program: Program, stage: Stage, returned: list[str]) -> list[tuple[str, str]]:
    outputs = [cut for cut in stage.sends if cut.value not in stage.inputs]
    pairs = [(returned[k], f"d_{cut.name}") for k, cut in enumerate(outputs) if cut.gradient]
    if stage.has_loss:
        pairs.append((returned[-1], ""))
    if len(pairs) == 1:
        call = f"{pairs[0][0]}.backward({pairs[0][1]})"
    else:
        values, grads = (", ".join(pair[k] or "None" for pair in pairs) for k in (0, 1))
        call = f"torch.autograd.backward(({values}), ({grads}))"
    if not stage.buckets or len(program.required_plan.roles[stage.role]) == 1:
        return [(call, "")]
    total = units.nbytes(sum(program.holdings[name].nbytes for bucket in stage.buckets for name in bucket))
    many = f"{len(stage.buckets)} buckets" if len(stage.buckets) > 1 else "1 bucket"
    return [
        ("with rank.all_reduce(stage, BUCKETS):", f"{total} in {many}, summed while backward runs"),
        (f"    {call}", ""),
    ]


def _recv(cut: Cut, role: str) -> str:
    rows = f", rows={cut.spec.rows}" if cut.spec.rows != 1 else ""
    return f'rank.recv("{role}", {cut.spec.template()}, {cut.spec.dtype}{rows})'


def _layout(spec: TensorSpec) -> str:
    parts = ([f"dim={spec.batch_dim}"] if spec.batch_dim else []) + ([f"rows={spec.rows}"] if spec.rows != 1 else [])
    return "".join(f", {part}" for part in parts)


def _size(cut: Cut, batch: int | None) -> str:
    return (
        units.nbytes(cut.spec.nbytes(batch)) if batch is not None else f"{units.nbytes(cut.spec.nbytes(1))} an example"
    )


def zero_text(program: Program) -> str:
    """A loss of nothing, in the loss's own dtype."""
    dtype = program.loss.meta["spec"].dtype
    return "torch.zeros(())" if str(dtype) == "torch.float32" else f"torch.zeros((), dtype={dtype})"
