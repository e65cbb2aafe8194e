"""Find linear layers and embeddings, as modules or functions, and make their parameters nodes.

fc6 = self.classifier.1(x)     ->     weight = self.classifier.1.weight; bias = self.classifier.1.bias
fc6 = linear(x, weight, bias)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from splitc.ir import comm_ops
from splitc.ir.elementwise import maps_each
from splitc.ir.graph import (
    arguments_of,
    called_module,
    has_examples,
    info,
    op_name,
    put_in_place,
    set_info,
    shape_of,
    tensor_spec,
    tensors_of_node,
)
from splitc.ir.layers import Layer
from splitc.ir.program import Program, TensorSpec


@dataclass(frozen=True)
class Linear:
    """A linear layer, y = x W^T + b.

    weight: (out_features, in_features); weight, bias: the names of the parameters in the graph.
    dim: of the parameter, along which its output features lie.  computed: what is computed of it, feature by feature.
    """

    node: fx.Node
    value: fx.Node
    weight: str
    bias: str | None
    dim: int = 0
    computed: tuple[fx.Node, ...] = ()
    late: ClassVar[str] = "late_multiply"

    @property
    def values(self) -> tuple[fx.Node, ...]:
        """What the gradients of its parameters follow from, with the error of its output."""
        return (self.value,)

    @property
    def output(self) -> fx.Node:
        """The node whose error travels."""
        return self.node


@dataclass(frozen=True)
class Table:
    """Rows that are looked up in a table, or sums or means of bags of so many rows each.

    values: as of a `Linear`: the indices, and the weights of rows that are summed.  options: of the function.
    output: as of a `Linear`: the sum or mean of the rows of each example, where nothing else reads them; else `node`.
    """

    node: fx.Node
    values: tuple[fx.Node, ...]
    weight: str
    options: Mapping[str, Any]
    output: fx.Node

    @property
    def late(self) -> str:
        """The name of the communication op, as it is of a `Linear`."""
        return "late_embedding_bag" if "mode" in self.options else "late_embedding"


def as_linear(program: Program, node: fx.Node) -> Linear | None:
    """`node` as a linear layer; None when it is none, or when its weight is computed."""
    if (module := called_module(program.root, node)) is not None:
        read = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if type(module) is not nn.Linear or not isinstance(read, fx.Node):
            return None
        bias_name = None if module.bias is None else f"{node.target}.bias"
        return Linear(node, read, f"{node.target}.weight", bias_name)
    if node.target is not F.linear:
        return None
    value, weight, bias = _operands(node)
    if not all(_is_parameter(program, each) for each in ([weight] if bias is None else [weight, bias])):
        return None
    return Linear(node, value, str(weight.target), None if bias is None else str(bias.target))


def as_columns(program: Program, node: fx.Node) -> Linear | None:
    """`node` as what can be divided by columns: a linear layer, or a product with what is computed of each feature.

    linear(x, normalize(W)), x @ (W / W.norm(dim=0, keepdim=True)); None where anything else reads what is computed.
    """
    dim = int(node.target not in (F.linear, comm_ops.linear_cross_entropy))
    if (linear := as_linear(program, node)) is not None or (dim and op_name(node) not in ("matmul", "mm")):
        return linear
    given: tuple[Any, ...] = (*node.args, None) if dim else _operands(node)
    value, weight, bias = given
    if not all(isinstance(each, fx.Node) for each in (value, weight)) or not has_examples(value):
        return None
    if (found := _features_of(program, weight, dim)) is None or not (bias is None or _is_parameter(program, bias)):
        return None
    name, own, computed = found
    alone = all(user is node or user in computed for each in computed for user in each.users)
    return Linear(node, value, name, bias and str(bias.target), own, tuple(computed)) if alone else None


def _features_of(program: Program, value: fx.Node, dim: int) -> tuple[str, int, dict[fx.Node, None]] | None:
    """The parameter that a value is computed of, each feature along `dim` by itself, its dim, and all nodes between."""
    if len(shape_of(value)) != 2 or value.op == "get_attr":
        return (str(value.target), dim, {}) if _is_parameter(program, value) and len(shape_of(value)) == 2 else None
    name = op_name(value)
    along = arguments_of(value, "input", *(["p"] * name.startswith("norm")), "dim").get("dim")
    along_other = name in ("norm", "normalize", "sum", "mean") and isinstance(along, int) and along % 2 != dim
    reads = [each for each in value.all_input_nodes if isinstance(info(each).spec, TensorSpec)]
    turned = transposed_by(value) is not None
    found = [_features_of(program, each, 1 - dim if turned else dim) for each in reads]
    if not (turned or maps_each(value) or along_other) or len({each and each[:2] for each in found}) != 1:
        return None
    return found[0] and (*found[0][:2], {node: None for each in found if each for node in (*each[2], value)})


def transposed_by(node: Any) -> fx.Node | None:
    """The matrix that a node transposes: w.t(), w.T, w.mT, w.transpose(0, 1); None of any other."""
    if not isinstance(node, fx.Node) or len(shape_of(node)) != 2:
        return None
    name, is_attribute = op_name(node), node.target is getattr and node.args[1] in ("T", "mT")
    turns = name == "t" or (name == "transpose" and set(node.args[1:]) in ({0, 1}, {-1, -2}))
    return node.all_input_nodes[0] if turns or is_attribute else None


def column_layers(program: Program) -> dict[str, tuple[Linear, ...]]:
    """The layers that end in a product with what is computed of their weight."""
    found = ((info(node).layer, as_columns(program, node)) for node in program.graph.nodes)
    return {layer: (use,) for layer, use in found if use is not None and as_linear(program, use.node) is None}


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of an F.linear node."""
    given = arguments_of(node, "input", "weight", "bias")
    return given["input"], given["weight"], given.get("bias")


def as_table(program: Program, node: fx.Node) -> Table | None:
    """`node` as rows of a table; None when it is none, or for bags of unlike sizes, and of which the maximum is taken.

    Which row of a bag is the largest, and how GPUs add its gradient, need not be alike on all ranks.
    """
    weight, module = embedding_weight(program, node), called_module(program.root, node)
    held = program.tensors.get(program.first_names.get(weight or "", ""))
    if weight is None or held is None or not held.parameter:
        return None
    if module is not None:
        given = vars(module) | arguments_of(node, "input", "offsets", "per_sample_weights")
    else:
        function: Any = node.target
        bound = inspect.signature(function).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        given = bound.arguments
    names = ("mode",) * (isinstance(module, nn.EmbeddingBag) or node.target is F.embedding_bag)
    values = tuple(given[name] for name in ("input", "per_sample_weights") if given.get(name) is not None)
    if not all(isinstance(value, fx.Node) and value.op != "get_attr" for value in values):
        return None
    is_one_size = not names or (given.get("offsets") is None and len(shape_of(values[0])) == 2)
    if not is_one_size or given.get("mode") == "max" or held.shape[0] >= 2**31:  # indices travel in 32 bits
        return None
    found = ((name, given.get(name)) for name in (*names, "per_sample_weights", "padding_idx", "sparse"))
    options = {name: v for name, v in found if v is not None and v is not False}
    reader = next(iter(node.users), node)
    if names or len(node.users) > 1 or not _is_pooling(reader) or len(shape_of(values[0])) != 2:
        return Table(node, values, weight, options, node)
    return Table(node, values, weight, options | {"pool": op_name(reader)}, reader)


def _is_pooling(node: fx.Node) -> bool:
    """Whether a node is x.sum(1) or x.mean(1), of x (batch, rows, features)."""
    given = arguments_of(node, "input", "dim")
    along = given.pop("dim", None)
    is_second = along in (1, -2) or (isinstance(along, (tuple, list)) and [*along] in ([1], [-2]))
    return op_name(node) in ("sum", "mean") and is_second and given.keys() == {"input"} and len(node.args) < 3


def _is_parameter(program: Program, read: Any) -> bool:
    name = program.first_names.get(str(read.target)) if isinstance(read, fx.Node) and read.op == "get_attr" else None
    return name is not None and program.tensors[name].parameter


def as_late(program: Program, node: fx.Node) -> Linear | Table | None:
    """`node` as what can be late-multiplied: the gradients of its parameters follow from its values and its error."""
    return as_linear(program, node) or as_table(program, node)


def linear_layers(program: Program) -> dict[str, tuple[Linear, ...]]:
    """The layers whose parameters only linear nodes read, and which share none with another layer -> these nodes."""
    alone = (layer for layer in program.layers if all(program.users[name] == 1 for name in layer.tensors))
    return _layers(program, alone, as_linear)


def late_layers(program: Program) -> dict[str, tuple[Linear | Table, ...]]:
    """The layers whose parameters only linear layers and tables read, in other layers too -> these nodes."""
    if program not in _LATE:
        found = _layers(program, program.layers, as_late)
        others = {name for layer in program.layers if layer.name not in found for name in layer.tensors}
        _LATE[program] = {name: uses for name, uses in found.items() if others.isdisjoint(program.layer(name).tensors)}
    return _LATE[program]


_LATE: WeakKeyDictionary[Program, dict[str, tuple[Linear | Table, ...]]] = WeakKeyDictionary()


def sparse_tables(program: Program) -> frozenset[str]:
    """The trained parameters with sparse gradients that can be late-multiplied."""
    tables = (use for uses in late_layers(program).values() for use in uses if isinstance(use, Table))
    names = (program.first_names[table.weight] for table in tables if table.options.get("sparse"))
    return frozenset(name for name in names if program.tensors[name].trainable)


Use = TypeVar("Use", bound=Linear | Table)


def _layers(
    program: Program, layers: Iterable[Layer], known: Callable[[Program, fx.Node], Use | None]
) -> dict[str, tuple[Use, ...]]:
    nodes = {node.name: node for node in program.graph.nodes}
    return {layer.name: uses for layer in layers if (uses := _uses(program, layer, nodes, known))}


def _uses(
    program: Program, layer: Layer, nodes: dict[str, fx.Node], known: Callable[[Program, fx.Node], Use | None]
) -> tuple[Use, ...]:
    """The known nodes of a layer; none when another node reads one of its parameters or buffers."""
    uses: list[Use] = []
    for name in layer.nodes:
        node = nodes[name]
        reads = [n for n in node.all_input_nodes if n.op == "get_attr" and not info(n).copied_to_each_stage]
        module = called_module(program.root, node)
        if module is None and isinstance(info(node).spec, TensorSpec) and not tensor_spec(node).requires_grad:
            continue  # a moving average of the weight, say
        if not (reads if module is None else any(True for _ in module.parameters())):
            continue
        use = known(program, node)
        if use is None or not all(map(_is_batch_first, (use.output, *use.values))) or len(shape_of(use.output)) < 2:
            return ()
        uses.append(use)
    return tuple(uses)


def _is_batch_first(value: fx.Node) -> bool:
    spec = info(value).spec
    return isinstance(spec, TensorSpec) and spec.batch_dim == 0


def factors(given: Iterable[fx.Node], output: fx.Node, weight_trained: bool = True) -> list[tuple[int, torch.dtype]]:
    """Return the numbers of an example, and their dtype, of each factor that a late-multiplied layer sends.

    Its values, in the dtype of its error or, of indices, in 32 bits, where its weight is trained; and its error.
    """
    error = tensor_spec(output)
    values = [tensor_spec(each) for each in given if each.op != "get_attr"] if weight_trained else []
    sizes = [spec.nbytes(1) // spec.dtype.itemsize for spec in (*values, error)]
    dtypes = [error.dtype if spec.dtype.is_floating_point or spec.dtype.is_complex else torch.int32 for spec in values]
    return list(zip(sizes, (*dtypes, error.dtype), strict=True))


def parameter_nodes(graph: fx.Graph, use: Linear | Table) -> tuple[fx.Node, fx.Node | None]:
    """The nodes of weight and bias; they are created before a layer that is a module."""
    bias = use.bias if isinstance(use, Linear) else None
    if use.node.op != "call_module":
        given = {str(each.target): each for each in use.node.all_input_nodes if each.op == "get_attr"}
        return given[use.weight], None if bias is None else given[bias]
    weight = _parameter(graph, use.node, use.weight)
    return weight, None if bias is None else _parameter(graph, use.node, bias)


def _parameter(graph: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    """A node of a parameter of the module that `node` calls."""
    with graph.inserting_before(node):
        attribute = graph.create_node("get_attr", name)
    set_info(attribute, info(node), spec=None, copied_to_each_stage=False, of_module=True, state=None, shards={})
    return attribute


def call_as_function(program: Program, graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Replace the call of a linear or embedding module by a function of its parameters; None for other modules."""
    module = program.root.get_submodule(str(node.target))
    if type(module) not in (nn.Linear, nn.Embedding):
        return None
    parameters = [_parameter(graph, node, f"{node.target}.{name}") for name, _ in module.named_parameters()]
    options: dict[str, Any] = {"padding_idx": module.padding_idx} if isinstance(module, nn.Embedding) else {}
    with graph.inserting_before(node):
        function = F.embedding if options else F.linear
        new = graph.call_function(function, (node.all_input_nodes[0], *parameters), options)
    set_info(new, info(node))
    put_in_place(graph, node, new)
    return new


def embedding_weight(program: Program, node: fx.Node) -> str | None:
    """The parameter of a node that looks up rows of an embedding; None for any other node."""
    if isinstance(called_module(program.root, node), nn.Embedding | nn.EmbeddingBag):
        return f"{node.target}.weight"
    if node.target not in (F.embedding, F.embedding_bag):
        return None
    weight = arguments_of(node, "input", "weight")["weight"]
    return str(weight.target) if isinstance(weight, fx.Node) and weight.op == "get_attr" else None


def divisible_layers(program: Program) -> frozenset[str]:
    """The layers whose parameters only linear layers, embeddings and normalisations of (N, D) over examples read."""
    columns = [found for node in program.graph.nodes if (found := as_columns(program, node)) is not None]
    computed = {node for each in columns for node in (each.node, *each.computed)}

    def divides(node: fx.Node) -> bool:
        is_norm = is_batch_norm(program, node) and len(shape_of(node)) == 2
        return is_norm or node in computed or embedding_weight(program, node) is not None

    whole = (node for node in program.graph.nodes if node.op.startswith("call") and not divides(node))
    others = {name for node in whole for name in tensors_of_node(program, node)}
    own = {layer.name: {n for n in layer.tensors if program.tensors[n].parameter} for layer in program.layers}
    return frozenset(layer for layer, names in own.items() if names and names.isdisjoint(others))


def is_batch_norm(program: Program, node: fx.Node) -> bool:
    """Whether a node is a module that normalises over examples."""
    return isinstance(called_module(program.root, node), _BatchNorm)
