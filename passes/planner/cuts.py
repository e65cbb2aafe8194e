"""What a graph says about cutting it between layers: which orders hold, what crosses, what cannot.

an input of the step      is read by the first role, and crosses forward only
a tensor with examples    may cross; its gradient comes back where it has one
a size, a constant        is made again where it is read (`copied_to_each_stage`), and never crosses
anything else             cannot cross: its maker and its readers stay together
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from splitc.errors import InternalError
from splitc.ir.graph import info
from splitc.ir.program import Program, SizeSpec, TensorSpec
from splitc.passes.planner.pins import Pin


@dataclass(frozen=True)
class Crossing:
    """A value that other layers read.  layer: its producer; None for an input of the step."""

    name: str
    layer: str | None
    readers: tuple[str, ...]
    spec: TensorSpec

    @property
    def gradient(self) -> bool:
        return self.layer is not None and self.spec.requires_grad


@dataclass(frozen=True)
class CutRules:
    """order: pairs (i, j), j reads what i makes.  together: pairs that cannot be parted -> why.

    reader_only: layers that must be in the role that reads the data -> why.
    """

    order: tuple[tuple[str, str], ...]
    together: dict[tuple[str, str], str]
    reader_only: dict[str, str]
    crossings: tuple[Crossing, ...]


def cut_rules(program: Program, copies: bool = False) -> CutRules:
    """The rules of the program's graph and of its tied parameters.

    copies: layers that share a parameter may be parted, with a copy in each role and its gradients summed.
    """
    layer_of = program.layer_of
    order: dict[tuple[str, str], None] = {}
    together = _tied(program, copies)
    reader_only: dict[str, str] = {}
    crossings = []
    for node in program.graph.nodes:
        if node.op == "output" or _is_copied(node):
            continue
        maker = None if node.op == "placeholder" else _layer(node, layer_of)
        after = {_layer(user, layer_of) for user in _readers(node, through=True)} - {maker}
        order.update({(maker, reader): None for reader in sorted(after) if maker is not None})
        direct = {_layer(user, layer_of): user for user in _readers(node, through=False)}
        direct.pop(maker or "", None)
        spec = info(node).spec
        apart = info(node).outer > 0
        loose = maker is None and str(node.target) in {each.name for each in program.inputs if each.loose is not None}
        if isinstance(spec, TensorSpec) and spec.batch_dim is not None and apart and not loose:
            if direct:
                crossings.append(Crossing(node.name, maker, tuple(direct), spec))
            continue
        for reader, user in direct.items():
            lacks = "has no examples to divide" if apart else "depends on which examples a rank has"
            lacks = "a function divides (batch=)" if loose else lacks
            why = f"{reader} ({_source(user)}) reads {node.name}, which {lacks}"
            if maker is None:
                reader_only.setdefault(reader, why)
            else:
                together.setdefault((maker, reader), why)
    return CutRules(tuple(order), together, reader_only, tuple(crossings))


def following(rules: CutRules, layers: Iterable[str]) -> set[str]:
    """These layers, all that follow from them, and those that cannot be parted from any of them."""
    inside = set(layers)
    while True:
        more = {j for i, j in rules.order if i in inside}
        more |= {j for i, j in rules.together if i in inside} | {i for i, j in rules.together if j in inside}
        if more <= inside:
            return inside
        inside |= more


def uncut(rules: CutRules, pins: Mapping[str, Pin], wanted: str) -> str:
    """Why no cut meets `wanted`: the layers that cannot be separated, and the pins."""
    causes = [*rules.together.values(), *rules.reader_only.values()]
    causes += [f"{layer} is pinned by {pin.pattern!r}" for layer, pin in pins.items()]
    more = f", and {len(causes) - 6} more" if len(causes) > 6 else ""
    because = f": {', '.join(causes[:6])}{more}" if causes else ""
    kept = " and keeps to the pins" if pins else ""
    return f"no cut of the layers {wanted}{kept}{because}"


def _tied(program: Program, copies: bool) -> dict[tuple[str, str], str]:
    """Pairs of layers that use one parameter or buffer; constants that are only read may be held twice."""
    copied = {str(node.target) for node in program.graph.nodes if node.op == "get_attr" and _is_copied(node)}
    users: dict[str, list[str]] = {}
    for layer in program.layers:
        for name in dict.fromkeys(layer.tensors):
            users.setdefault(name, []).append(layer.name)
    pairs: dict[tuple[str, str], str] = {}
    for name, layers in users.items():
        holding = program.tensors[name]
        if not holding.parameter and copied & {name, *holding.names}:
            continue
        if holding.parameter and copies:
            continue
        for other in layers[1:]:
            pairs.setdefault((layers[0], other), f"{layers[0]} and {other} share {name}")
    return pairs


def _is_copied(node: fx.Node) -> bool:
    return bool(info(node).copied_to_each_stage) or isinstance(info(node).spec, SizeSpec)


def _readers(node: fx.Node, through: bool) -> Iterator[fx.Node]:
    """The nodes that read the value in their own role; `through`: also by way of its sizes."""
    seen: set[fx.Node] = set()
    todo = list(node.users)
    while todo:
        user = todo.pop(0)
        if user in seen or user.op == "output":
            continue
        seen.add(user)
        if not _is_copied(user):
            yield user
        elif through:
            todo += user.users


def _layer(node: fx.Node, layer_of: dict[str, str]) -> str:
    layer = layer_of.get(node.name) or info(node).layer
    if not layer:
        raise InternalError(f"{node.name} ({_source(node)}) belongs to no layer")
    return layer


def _source(node: fx.Node) -> str:
    return info(node).source
