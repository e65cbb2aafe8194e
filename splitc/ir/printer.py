"""Print a program as annotated Python: one node a line, with shape, role and source; communication stands out."""

from __future__ import annotations

from typing import Any

from torch import fx

from splitc.ir import comm_ops
from splitc.ir.comm_ops import op_of
from splitc.ir.graph import copy_node, info
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram, Program, SizeSpec, Spec, TensorSpec
from splitc.ir.schedule.actions import print_actions
from splitc.ir.schedule.verb import Among
from splitc.runtime.collectives.layouts import State


def print_program(program: Program) -> str:
    """The graph, then the stages' action lists where there are any.

    features_0 = self.features.0(images)   # f32[b, 64, 55, 55]   conv   alexnet.py:30
    """
    rows = [(_statement(node), _note(node)) for node in program.graph.nodes if node.op != "output"]
    width = min(max(len(text) for text, _ in rows), 72)
    inputs = ", ".join(i.name for i in program.inputs)
    lines = [
        f"def {program.name}({inputs}):",
        *(f"    {text:<{width}}  # {note}" for text, note in rows),
        f"    return {program.loss.name}",
    ]
    for part in program.rank_programs if isinstance(program, LoweredProgram) else ():
        if part.actions:
            roles = f"role{'s' if len(part.roles) > 1 else ''} {' and '.join(part.roles)}"
            lines += ["", f"# step of {roles}", *(f"#   {line}" for line in print_actions(part.actions).splitlines())]
    return "\n".join(lines) + "\n"


def rank_graph(program: LoweredProgram, rank: int) -> fx.GraphModule:
    """The graph of one rank as a GraphModule, of all its roles.

    `meta["shape"]` is a node's shape on this rank; `meta["comm"]` of send and recv nodes has the peers and their
    examples, of other communication nodes the ranks that communicate.
    """
    plan, part = program.plan, program.rank_program(rank)
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        role = info(node).role
        if node.op == "output" or role not in part.roles:
            continue
        mapping[node] = copy_node(graph, node, mapping)
        _annotate(plan, mapping[node], role, rank)
    graph.output(mapping.get(program.loss))
    return fx.GraphModule(program.root, graph, class_name=f"{program.name}_rank{rank}")


def _annotate(plan: Plan, node: fx.Node, role: str, rank: int) -> None:
    spec = info(node).spec
    if isinstance(spec, TensorSpec):
        own = node.target in (comm_ops.send, comm_ops.recv) or info(node).state is State.BATCH
        node.meta["shape"] = spec.at(plan.batch(role, rank) if own else plan.peak_batch(role, rank))
    op = op_of(node)
    match None if op is None else op.among:
        case Among.PAIR:
            node.meta["comm"] = plan.routes(rank, role, str(node.kwargs["role"]))
        case Among.GROUP:
            node.meta["comm"] = plan.group(role, rank)
        case Among.REPLICAS:
            node.meta["comm"] = plan.replicas(role, rank)


def _statement(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.name} = input"
    arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    if node.op == "call_module":
        call = f"self.{node.target}"
    elif node.op == "call_method":
        call = f"{arguments.pop(0)}.{node.target}"
    else:
        call = getattr(node.target, "__name__", str(node.target))
    return f"{node.name} = {call}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_argument, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    return str(value).removeprefix("torch.") if not isinstance(value, str) else repr(value)


def _note(node: fx.Node) -> str:
    known = info(node)
    return "  ".join(filter(None, (show_spec(known.spec), known.role or known.layer, known.source)))


def show_spec(spec: Spec) -> str:
    """`f32[b, 64, 55, 55]`; the batch is `b`."""
    if isinstance(spec, SizeSpec):
        scaled = "b" if spec.scale == 1 else f"{spec.scale}*b"
        return f"{scaled} + {spec.offset}" if spec.offset else scaled
    if isinstance(spec, TensorSpec):
        rows = "b" if spec.rows == 1 else f"{spec.rows}*b"
        sizes = ", ".join(rows if d == spec.batch_dim else str(n) for d, n in enumerate(spec.shape))
        kind = str(spec.dtype).removeprefix("torch.")
        return f"{kind.replace('float', 'f').replace('int', 'i')}[{sizes}]"
    return "(" + ", ".join(map(show_spec, spec)) + ")" if isinstance(spec, tuple) else ""
