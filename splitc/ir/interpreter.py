"""Run captured graphs node by node, and on fake tensors: shapes, dtypes and autograd without data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from splitc.errors import CaptureError
from splitc.ir.comm_ops import recv
from splitc.ir.fake_mode import FakeMode
from splitc.ir.graph import cut_of, info, is_region
from splitc.ir.program import Program, Stage, TensorSpec
from splitc.ir.repeats import without_repeats
from splitc.runtime.nested import unpacked
from splitc.runtime.seeded.mode import running


def fake_copy(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of `module` whose parameters and buffers are fake; tied ones stay tied, other tensors are shared.

    Raises CaptureError for a module that cannot be copied.
    """
    memo: dict[int, Any] = {
        id(value): value for m in module.modules() for value in vars(m).values() if isinstance(value, torch.Tensor)
    }
    memo.update({id(tensor): mode.from_tensor(tensor) for tensor in (*module.parameters(), *module.buffers())})
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied: {type(error).__name__}: {error}; keep what copy.deepcopy does "
            f"not take (locks, files, process groups) out of its attributes"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log of operations that fail on fake tensors; callers explain them to the user."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def mode_of(root: nn.Module) -> FakeTensorMode:
    """The FakeTensorMode of the tensors of `root`; a new one for a model without tensors."""
    for tensor in (*root.parameters(), *root.buffers()):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeMode()


def fake_inputs(program: Program, batch: int, mode: FakeTensorMode) -> dict[str, torch.Tensor]:
    """Fake inputs of the program, of `batch` examples."""
    with mode:
        return {i.name: torch.empty(i.spec.at(batch), dtype=i.spec.dtype) for i in program.inputs}


NodeHook = Callable[[fx.Node, Callable[[], Any]], Any]


class NodeRunner(fx.Interpreter):
    """Interpreter that calls `hook(node, run)` for each node; modules and tensors are those of `root`.

    Used to check shapes, count costs and validate captured graphs, never to train.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, hook: NodeHook | None = None) -> None:
        super().__init__(root, garbage_collect_values=hook is None, graph=graph)
        self.extra_traceback = False  # callers explain errors
        self._hook = hook

    def run_node(self, n: fx.Node) -> Any:
        mode = running() if is_region(n) else None
        with nullcontext() if mode is None else mode.region(info(n).draw):
            if self._hook is None:
                return super().run_node(n)
            return self._hook(n, lambda: super(NodeRunner, self).run_node(n))

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_module(target, unpacked(args), unpacked(kwargs))

    def fetch_attr(self, target: str) -> Any:
        return super().fetch_attr(target) if target else self.module

    def run_named(self, inputs: Mapping[str, Any]) -> Any:
        """Run on inputs by the names of the placeholders."""
        return self.run(*(inputs[n.target] for n in self.graph.nodes if n.op == "placeholder"))


def shapes_at(program: Program, batch: int, stage: Stage | None = None) -> list[str]:
    """Run the graph at `batch` examples, or that of a stage.

    Returns a line for each node that fails or whose shape is not its spec's.
    """
    graph, inside = (program.graph, "") if stage is None else (stage.graph, f" in role {stage.role}")
    mode = mode_of(program.root)
    problems: list[str] = []
    where = "output"

    def check(node: fx.Node, run: Callable[[], Any]) -> Any:
        nonlocal where
        where, spec = f"{info(node).source}: {node.name}", info(node).spec
        if node.target is recv:
            assert isinstance(spec, TensorSpec)
            value = torch.empty(spec.at(batch), dtype=spec.dtype)
            return value.requires_grad_() if cut_of(node).gradient else value
        value = run()
        if isinstance(spec, TensorSpec) and isinstance(value, torch.Tensor) and tuple(value.shape) != spec.at(batch):
            problems.append(f"{where} is {tuple(value.shape)}{inside} at a batch of {batch}, not {spec.at(batch)}")
        return value

    try:
        with mode, quiet():
            shorter, _ = without_repeats(program.root, graph)
            NodeRunner(program.root, shorter, check).run_named(fake_inputs(program, batch, mode))
    except Exception as error:
        problems.append(f"{where} does not run{inside} at a batch of {batch}: {str(error).partition(chr(10))[0]}")
    return problems
