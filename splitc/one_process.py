"""Train the user's own model in this process, as the reference that `verify` compares the ranks with.

Dropout is off, and each BatchNorm normalises over the groups of examples that the ranks form, replayed call by call.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from splitc.capture import Loss
from splitc.confirm import DROPOUTS
from splitc.program import Program, TensorSpec
from splitc.runtime.rank import Rank
from splitc.runtime.trial import Trial

LEARNING_RATE, MOMENTUM = 0.01, 0.9


class _Replay(TorchFunctionMode):
    """Runs the user's model with dropout off and each BatchNorm over the groups of examples that the ranks form."""

    def __init__(self, groups: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self._groups = groups
        self._call = 0

    def start(self) -> None:
        self._call = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return args[0]
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        bound = inspect.signature(F.batch_norm).bind(*args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        sizes = self._groups[self._call]
        self._call += 1
        if not options["training"] or len(sizes) == 1:
            return func(**options)
        parts = []
        for k, part in enumerate(options.pop("input").split(list(sizes))):
            statistics = {} if k == 0 else {"running_mean": None, "running_var": None}  # the first replica's are kept
            parts.append(func(part, **{**options, **statistics}))
        return torch.cat(parts)


def norm_groups(program: Program, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """For every batch_norm call of the model in order: the sizes of the groups it normalises over."""
    plan = program.required_plan
    groups = []
    for node in program.graph.nodes:
        module = program.root.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, nn.modules.batchnorm._NormBase) or node.target is F.batch_norm:
            role = plan.placements[node.meta["layer"]].role
            assert role is not None
            rank = Rank(0, 1, role, bounds=plan.examples[plan.reader])
            rank.begin(sizes)
            bounds = [rank._at(position) for position in plan.examples[role]]
            spec = node.meta["spec"]
            rows = spec.rows if isinstance(spec, TensorSpec) else 1
            groups.append(tuple((b - a) * rows for a, b in pairwise(bounds)))
    return groups


def reference(
    program: Program,
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
    for step, batch in enumerate(batches):
        if step and states:
            model.load_state_dict(states[step - 1])
        optimizer.zero_grad()
        replay.start()
        with replay:
            value = _call(model, {k: v for k, v in batch.items() if k not in targets})
            if loss is not None:
                value = loss(value, *(batch[name] for name in targets))
        value.backward()
        trial.losses.append(float(value.detach()))
        trial.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        trial.states.append({k: v.detach().clone() for k, v in model.state_dict().items()})
    return trial


def in_double(
    program: Program, model: nn.Module, loss: Loss, batches: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]
) -> Trial:
    """The reference in float64: what float32 would give without rounding."""
    wide = [{k: v.double() if v.dtype.is_floating_point else v for k, v in batch.items()} for batch in batches]
    loss = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    return reference(program, copy.deepcopy(model).double(), loss, wide, sizes)


def _call(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    parameters = inspect.signature(model.forward).parameters
    positional = [n for n in inputs if n in parameters and parameters[n].kind is inspect.Parameter.POSITIONAL_ONLY]
    return model(*(inputs[n] for n in positional), **{n: v for n, v in inputs.items() if n not in positional})
