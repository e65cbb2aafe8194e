"""Train the user's own model in this process, as the reference that `verify` compares the ranks with.

Dropout is off, and each BatchNorm normalises over the groups of examples that the ranks form, replayed call by call.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from splitc.capture.capture import Loss
from splitc.capture.dropouts import undropped
from splitc.ir import comm_ops
from splitc.ir.plan import Grouping, piece
from splitc.ir.program import PlacedProgram, Program, TensorSpec, under_autocast
from splitc.runtime.launch.trial import Trial
from splitc.runtime.rank import Rank

LEARNING_RATE, MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class NormGroup:
    """Rows of a batch that one BatchNorm normalises over together.

    counts: whether it changes the running statistics, which are the first replica's.
    """

    rows: Tensor
    counts: bool

    @property
    def size(self) -> int:
        return len(self.rows)


class _Replay(TorchFunctionMode):
    """Runs the user's model with dropout off and each BatchNorm over the groups of examples that the ranks form."""

    def __init__(self, groups: Sequence[Sequence[NormGroup]]) -> None:
        super().__init__()
        self._groups = groups
        self._call = 0

    def start(self) -> None:
        self._call = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return undropped(func, args, kwargs)
        bound = inspect.signature(F.batch_norm).bind(*args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        groups = self._groups[self._call]
        self._call += 1
        if not options["training"] or len(groups) == 1:
            return func(**options)
        value = options.pop("input")
        parts = []
        for group in groups:
            statistics = {} if group.counts else {"running_mean": None, "running_var": None}
            parts.append(func(value[group.rows], **{**options, **statistics}))
        return torch.cat(parts)[torch.cat([group.rows for group in groups]).argsort()]


def norm_groups(program: PlacedProgram, sizes: Sequence[int]) -> list[list[NormGroup]]:
    """For every batch_norm call of the model in order: the groups it normalises over."""
    found = []
    for node in _norms(program):
        role = program.plan.placements[node.meta["layer"]].role
        assert role is not None
        spec = node.meta["spec"]
        found.append(_groups(program, role, sizes, spec.rows if isinstance(spec, TensorSpec) else 1))
    return found


def _norms(program: Program) -> Iterator[fx.Node]:
    """The nodes that are BatchNorms."""
    for node in program.graph.nodes:
        module = program.root.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, nn.modules.batchnorm._NormBase) or node.target in (F.batch_norm, comm_ops.batch_norm):
            yield node


def _groups(program: PlacedProgram, role: str, sizes: Sequence[int], rows: int) -> list[NormGroup]:
    """What the ranks of a role have before them at once: of each group in each turn."""
    plan = program.plan
    now = Rank(0, 1, bounds=plan.batch_offsets[plan.reader])
    now.begin(sizes)
    ranks = plan.roles[role]
    grouping = plan.groups.get(role, Grouping(1, "BK"))
    if plan.synchronised:
        return [NormGroup(torch.arange(sum(sizes) * rows), counts=True)]
    found = []
    for first in range(0, len(ranks), grouping.size):
        members = ranks[first : first + grouping.size]
        for turn in range(grouping.num_microbatches):
            parts = [
                piece(now.part(*plan.interval(role, rank)), grouping.scheme, k, turn, grouping.size)
                for k, rank in enumerate(members)
            ]
            indices = torch.cat([torch.arange(a * rows, b * rows) for a, b in parts])
            if len(indices):
                found.append(NormGroup(indices, counts=first == 0))
    return found


def _further_turns(program: PlacedProgram, sizes: Sequence[int]) -> dict[str, int]:
    """BatchNorm module -> how often more than once the first replica runs it in a step: once for each further turn."""
    found: dict[str, int] = {}
    calls = iter(norm_groups(program, sizes))
    for node in _norms(program):
        more = sum(group.counts for group in next(calls)) - 1
        if more > 0 and node.op == "call_module":
            found[str(node.target)] = found.get(str(node.target), 0) + more
    return found


def _count(module: nn.Module, batches: int) -> None:
    """Let a BatchNorm that counts its batches count some more."""
    counter = getattr(module, "num_batches_tracked", None)
    if isinstance(counter, Tensor) and module.training:
        counter += batches


def reference(
    program: PlacedProgram,
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Mapping[str, Tensor]],
    sizes: Sequence[int],
    states: Sequence[Mapping[str, Tensor]] = (),
) -> Trial:
    """The same steps in this process, on the whole global batch; step k + 1 starts from `states[k]` where given."""
    model, loss = copy.deepcopy(model), copy.deepcopy(loss)
    targets = [i.name for i in program.inputs if i.target]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    trial = Trial()
    replay = _Replay(norm_groups(program, sizes))
    turns = _further_turns(program, sizes)
    for step, batch in enumerate(batches):
        if step and states:
            model.load_state_dict(states[step - 1])
        optimizer.zero_grad()
        replay.start()
        with replay, under_autocast(model, program.autocast):
            value = _call(model, {k: v for k, v in batch.items() if k not in targets})
            if loss is not None:
                value = loss(value, *(batch[name] for name in targets))
        value.backward()
        trial.losses.append(float(value.detach()))
        trial.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        for path, more in turns.items():
            _count(model.get_submodule(path), more)
        trial.states.append({k: v.detach().clone() for k, v in model.state_dict().items()})
    return trial


def in_double(
    program: PlacedProgram,
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Mapping[str, Tensor]],
    sizes: Sequence[int],
    states: Sequence[Mapping[str, Tensor]] = (),
) -> Trial:
    """The reference in float64, without autocast: what it would be without rounding."""
    wide = [{k: v.double() if v.dtype.is_floating_point else v for k, v in batch.items()} for batch in batches]
    loss = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    return reference(replace(program, autocast=None), copy.deepcopy(model).double(), loss, wide, sizes, states)


def _call(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    parameters = inspect.signature(model.forward).parameters
    positional = [n for n in inputs if n in parameters and parameters[n].kind is inspect.Parameter.POSITIONAL_ONLY]
    return model(*(inputs[n] for n in positional), **{n: v for n, v in inputs.items() if n not in positional})
