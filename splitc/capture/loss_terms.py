"""Decompose a loss into terms: the scalars that it is a linear function of, each a sum or a mean over examples.

    loss = cross_entropy(out, target) + 0.1 * activations.mean()     two terms
    loss = (per_example * mask).sum() / mask.sum()                   a term and its denominator

An aggregate is a value that depends on the batch and has no batch dimension.  It must lie on a path of linear
operations to the loss, or belong to a denominator: a scalar without gradient by which such a path is divided or
multiplied.  All else couples examples, whatever it computes on a few of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import fx

from splitc.ir.graph import has_examples, info, is_region, op_name, reached, set_info
from splitc.ir.program import Program, SizeSpec, TensorSpec
from splitc.ir.torch_ops import ops_with

_QUOTIENTS, _PRODUCTS, _SUMS = ops_with("quotient"), ops_with("product"), ops_with("sum")
_SCALED = ops_with("quotient", "product", "negation")
_SAME, _MOVED, _REDUCTIONS = ops_with("kept"), ops_with("moved"), ops_with("reduction")
_OF_SEVERAL = ops_with("sum", "join")
_OF_SIZES = tuple(ops_with("factory"))
_LIKE, _NO_TENSOR = ops_with("shape_only"), ops_with("no_tensor")


def isolate_terms(graph: fx.Graph) -> None:
    """Clone terms that do not depend on the batch, so that scaling one leaves its other readers unchanged.

    loss = task * exp(-s) + s   ->   loss = task * exp(-s) + s.clone()
    """
    terms = LossTerms(graph)
    for node in terms.sums:
        for value in node.all_input_nodes:
            if value not in terms.batched and len(value.users) > 1:
                with graph.inserting_before(node):
                    copy = graph.call_method("clone", (value,))
                set_info(copy, info(value))
                node.replace_input_with(value, copy)


class LossTerms:
    """The decomposition of the loss of a graph.

    uses: its terms and the denominators, each "term" or "denominator".  sums: nodes that add or subtract terms.
    couplings: nodes where examples begin to depend on each other, and why.
    data: nodes whose values depend on the inputs' data.  batched: those, and what depends on the batch size.
    upstream: the loss and what it depends on.  tail: of which it is a linear function.  own_losses: of regions.
    """

    def __init__(self, graph: fx.Graph, own_losses: bool = False) -> None:
        self._own_losses, (self.data, self.batched) = own_losses, _dependent(graph)
        self.uses: dict[fx.Node, str] = {}
        self.sums: dict[fx.Node, None] = {}
        self.couplings: dict[fx.Node, str] = {}
        (loss,) = next(node for node in reversed(graph.nodes) if node.op == "output").all_input_nodes
        upstream = {loss, *_ancestors(loss)}
        self.upstream = {node: None for node in graph.nodes if node in upstream}
        self._linear: set[fx.Node] = set()
        self._denominators: dict[fx.Node, None] = {}
        self._globals: set[fx.Node] = set()  # computed from denominators alone, so every rank has the whole batch's
        self.tail = self._tail(loss)
        self._walk(loss)
        for node in self._denominators:
            if self.uses.setdefault(node, "denominator") == "term":
                self._couples(node, f"{node.name} is a term of the loss and a denominator of another one")
        self._find_couplings()

    def is_scaling(self, node: fx.Node) -> bool:
        """Whether the node is a linear function, of each example for itself, of what it reads in the tail."""
        return node in self.tail and op_name(node) in _SCALED | _SAME | _SUMS

    def _tail(self, loss: fx.Node) -> set[fx.Node]:
        tail = {loss}
        for node in reversed(self.upstream):
            users = [user for user in node.users if user in self.upstream]
            if users and all(user in tail and self._is_linear(user, node) for user in users):
                tail.add(node)
        for node in self.upstream:
            if node in tail and (factor := self._factor(node)) is not None:
                self._denominator(factor)
        return tail

    def _is_linear(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether `node` is linear in `value`; in all that depends on the batch, where it sums several."""
        name, operands = op_name(node), self._operands(node)
        if name not in _SUMS | _SCALED | _SAME | _MOVED or "rounding_mode" in node.kwargs or value not in operands:
            return False
        if (name in _QUOTIENTS and node.args[1] is value) or value is self._factor(node):
            return False
        if name in _MOVED and node.args[0] is not value and name not in ("einsum", "linear", "matmul", "mm"):
            return name in _OF_SEVERAL
        others = [n for n in operands if n is not self._factor(node)]
        others.remove(value)
        if name in _PRODUCTS and not is_aggregate(value):  # by other data of the same example
            return not any(is_aggregate(n) or n is value or value in _ancestors(n) for n in others)
        return name in _OF_SEVERAL or not others

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """The inputs that depend on the batch, but for numbers; one that is read twice is there twice."""
        found: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), found.append)
        return [n for n in found if n in self.batched and not isinstance(info(n).spec, SizeSpec)]

    def _factor(self, node: fx.Node) -> fx.Node | None:
        """The scalar without gradient, of the whole batch, by which `node` divides or multiplies what it reads."""
        name = op_name(node)
        if name not in _QUOTIENTS | _PRODUCTS or len(node.args) != 2 or "rounding_mode" in node.kwargs:
            return None
        value, factor = node.args
        if name in _PRODUCTS and not self._may_divide(factor):
            value, factor = factor, value
        if not self._may_divide(factor) or not isinstance(value, fx.Node):
            return None
        is_scaled = value in self.batched or name in _QUOTIENTS or _requires_grad(value)
        return factor if is_scaled and value is not factor and isinstance(factor, fx.Node) else None

    def _may_divide(self, node: object) -> bool:
        return isinstance(node, fx.Node) and node in self.batched and _is_scalar(node) and not _requires_grad(node)

    def _walk(self, node: fx.Node) -> None:
        name, inputs = op_name(node), node.all_input_nodes
        parts = self._operands(node)
        linear = bool(parts) and all(_is_scalar(n) or _is_stack(n) for n in inputs if n not in self._globals)
        factor = self._factor(node) if linear else None
        if factor is not None and len(parts) == 2:
            terms = [n for n in parts if n is not factor]
        elif linear and name in _OF_SEVERAL and not _added_number(node):
            self.sums[node] = None
            terms = inputs
        elif linear and name in _SCALED | _SAME and len(parts) == 1 and self._is_linear(node, parts[0]):
            terms = parts
        else:
            self._term(node)
            return
        self._linear.add(node)
        for value in terms:
            self._walk(value)

    def _term(self, node: fx.Node) -> None:
        hidden = next((n for n in _ancestors(node) if is_weighted_mean(n) and n not in self._globals), None)
        if hidden is not None:
            number = _added_number(node)
            what = f"adds {number:g} to" if number else "is no sum of"
            self._couples(
                node,
                f"{node.name} {what} {hidden.name} ({info(hidden).source}), which divides by a sum over the whole "
                f"batch: write the loss as a sum of such terms, without numbers added",
            )
        self.uses[node] = "term"

    def _require_sum(self, node: fx.Node) -> None:
        """Note a reduction over examples that is not known to be a sum or a mean."""
        name, is_own = op_name(node), self._own_losses and (is_region(node) or op_name(node) == "getitem")
        if not (is_own or name in _REDUCTIONS or name.endswith("_loss")):
            self._couples(node, f"{node.name} is not known to be a sum or a mean over examples")

    def _denominator(self, node: fx.Node) -> None:
        # The batch size is one of the parts too, of which a rank has its own.
        parts = [n for n in node.all_input_nodes if n in self.batched]
        self._globals.add(node)
        if parts and all(map(_is_scalar, parts)):
            for value in parts:
                self._denominator(value)
        else:
            self._denominators[node] = None

    def _find_couplings(self) -> None:
        for node in self.upstream:
            uneven = [n for n in node.all_input_nodes if info(n).is_linear is False]
            if uneven and info(node).is_linear is None:
                self._couples(
                    node,
                    f"{node.name} reads {uneven[0].name} ({info(uneven[0]).source}), a number that is no linear "
                    f"function of the batch size, and ranks run other batches than one process",
                )
            if node not in self.batched or not is_aggregate(node):
                continue
            if not any(map(is_aggregate, self._operands(node))):
                self._require_sum(node)
            readers = [user for user in node.users if user in self.upstream]
            if node in self._globals:
                readers = [u for u in readers if u not in self._globals and self._factor(u) is not node]
            for user in readers:
                if not is_aggregate(user) or not self._is_linear(user, node):
                    self._couples(
                        user,
                        f"{user.name} is no linear function of {node.name} ({info(node).source}), which is over the "
                        f"whole batch; a rank that sees a part of the batch cannot compute it",
                    )
                elif node in self.uses and user not in self._linear:
                    self._couples(
                        user, f"{user.name} reads {node.name} ({info(node).source}), which is also a term of the loss"
                    )

    def _couples(self, node: fx.Node, why: str) -> None:
        self.couplings.setdefault(node, f"{info(node).source}: the loss couples examples: {why}")


def is_weighted_mean(node: fx.Node) -> bool:
    """Whether `node` is a cross_entropy or nll_loss that divides by the weights of its targets."""
    if node.target not in (F.cross_entropy, F.nll_loss) or node.kwargs.get("reduction", "mean") != "mean":
        return False
    target = node.args[1]
    assert isinstance(target, fx.Node)
    spec = info(target).spec
    return isinstance(spec, TensorSpec) and not spec.dtype.is_floating_point


def is_known(program: Program) -> bool:
    """Whether every node is torch's own, so that what treats examples apart has a gradient that does."""
    modules = (program.root.get_submodule(str(n.target)) for n in program.graph.nodes if n.op == "call_module")
    return all(type(module).__module__.startswith("torch.nn.") for module in modules)


def _dependent(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """Nodes whose values depend on the inputs' data, and those that depend on the batch in any way."""
    data: set[fx.Node] = set()
    batched: set[fx.Node] = set()
    for node in graph.nodes:
        name, spec = op_name(node), info(node).spec
        if node.op == "placeholder":
            if not isinstance(spec, TensorSpec) or spec.batch_dim is not None:  # else it is whole on every rank
                data.add(node)
                batched.add(node)
        elif name in _NO_TENSOR or (name == "getattr" and node.args[1] in _NO_TENSOR) or isinstance(spec, SizeSpec):
            if isinstance(spec, SizeSpec) and spec.scale:
                batched.add(node)
        else:
            read = node.all_input_nodes
            if name.startswith(_OF_SIZES):  # with what they are filled, where it is no constant
                read = [n for n in read if n not in node.args[:1]]
            elif name in _LIKE:
                read = read[:1]
            data |= {node} if not data.isdisjoint(read) else set()
            batched |= {node} if has_examples(node) or not batched.isdisjoint(read) else set()
    return data, batched


def _ancestors(node: fx.Node) -> Iterator[fx.Node]:
    return reached(node.all_input_nodes, lambda value: value.all_input_nodes)


def _added_number(node: fx.Node) -> float:
    """The Python number that a sum adds; 0 where there is none."""
    numbers = [value for value in node.args if isinstance(value, (int, float))]
    return float(numbers[0]) if numbers and op_name(node) in _SUMS else 0.0


def is_aggregate(node: fx.Node) -> bool:
    """Whether a node that depends on the batch is a tensor without a batch dimension."""
    spec = info(node).spec
    parts = spec if isinstance(spec, tuple) and spec else (spec,)
    return all(isinstance(part, TensorSpec) and part.batch_dim is None for part in parts)


def _is_stack(node: fx.Node) -> bool:
    return op_name(node) == "stack" and all(map(_is_scalar, node.all_input_nodes))


def _is_scalar(node: fx.Node) -> bool:
    spec = info(node).spec
    return isinstance(spec, TensorSpec) and spec.shape == ()


def _requires_grad(node: fx.Node) -> bool:
    spec = info(node).spec
    return isinstance(spec, TensorSpec) and spec.requires_grad
