"""Independent subnets by masks on the whole model (IST 3, algorithms 1 and 2), apart from the runtime's slices.

    y = W x + b  ->  y = W (m x) + b      m: 1 for the unit's neurons of the layer before, else 0

Then no loss depends on other units' neurons, and what belongs to them has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.ir import comm_ops
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram
from splitc.ir.subnets.neurons import find_neurons
from splitc.runtime.seeded.draws import Label, Layout
from splitc.runtime.spec import Neurons
from splitc.runtime.subnets.deal import indices
from splitc.verify.replay import Replay, Unit
from splitc.verify.rounds.feature import Copies, State


class _Masked(Replay):
    """A step of a subnet.

    inputs: weight -> what the inputs of its linear layers are multiplied by.  drawn: dropout -> 1 for its features,
    for which it draws as for a tensor of its own.
    """

    def __init__(self, unit: Unit, step: int, inputs: Mapping[Tensor, Tensor], drawn: Mapping[Label, Tensor]) -> None:
        super().__init__(unit, step)
        self._inputs, self._drawn = inputs, drawn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            return func(**given | {"input": given["input"] * self._inputs.get(given["weight"], 1)})
        return super().__torch_function__(func, types, args, kwargs)

    def mask(self, value: Tensor, p: float, feature_dims: int, label: Label, layout: Layout | None = None) -> Tensor:
        """`value` after dropout; features that others have are zero."""
        if (own := self._drawn.get(label)) is None:
            return super().mask(value, p, feature_dims, label, layout)
        at = own.nonzero().flatten()
        return torch.zeros_like(value).index_copy(-1, at, super().mask(value[..., at], p, feature_dims, label, layout))


class MaskedCopies(Copies):
    """Copies of which each unit trains its neurons alone."""

    what = "masked subnets"
    has_gradients = False

    def __init__(self, program: LoweredProgram, model: nn.Module, units: Sequence[Unit]) -> None:
        super().__init__(program, model, units)
        self._dealt = {name: dims for stage in program.stages for name, dims in stage.dealt.items()}
        self._drawn, self._momenta = dict(_drawn(program)), dict[Tensor, Tensor]()

    @staticmethod
    def concerns(program: LoweredProgram) -> bool:
        return any(stage.dealt for stage in program.stages)

    @staticmethod
    def notes(plan: Plan) -> Iterator[str]:
        yield "gradients of subnets are compared by the parameters that they lead to"
        yield from Copies.notes(plan)

    def replay(self, number: int, unit: int, step: int) -> Replay:
        weights = [(p, self._dealt[name]) for name, p in self.model.named_parameters() if name in self._dealt]
        inputs: dict[Tensor, Tensor] = {
            p: self._neurons(number, dims[1], p.detach(), unit) for p, dims in weights if 1 in dims
        }
        drawn = {key: self._neurons(number, runs, torch.empty(0), unit) for key, runs in self._drawn.items()}
        return _Masked(self.units[unit], step, inputs, drawn)

    def has(self, number: int, name: str, tensor: Tensor, unit: int) -> Tensor:
        own = torch.ones_like(tensor)
        for dim, runs in self._dealt.get(name, {}).items():
            shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
            own *= self._neurons(number, runs, tensor, unit).view(shape)
        return own

    def end(self, number: int, before: State) -> None:
        super().end(number, before)
        optimizers = [unit.optimizer for unit in self.units]
        for name, p in self.model.named_parameters():
            if isinstance(optimizers[0].state[p].get("momentum_buffer"), Tensor):
                trained = [optimizer.state[p]["momentum_buffer"] for optimizer in optimizers]
                self._momenta[p] = self.join(number, name, self._momenta.get(p, torch.zeros_like(p)), trained)
                for optimizer in optimizers:
                    optimizer.state[p]["momentum_buffer"] = self._momenta[p].clone()

    def _neurons(self, number: int, runs: Sequence[Neurons], like: Tensor, unit: int) -> Tensor:
        """1 for the features along `runs` that `unit` has in a round, 0 for others."""
        own = like.new_zeros(sum(run.width for run in runs))
        own[indices(0, number, runs, unit, len(self.units))] = 1
        return own


JOINT = MaskedCopies


def _drawn(program: LoweredProgram) -> Iterator[tuple[Label, Sequence[Neurons]]]:
    """Dropouts of dealt features."""
    for stage in program.stages:
        values = find_neurons(program, stage.graph, program.plan.world).values if stage.dealt else {}
        nodes = [node for node in stage.graph.nodes if node.target is comm_ops.dropout and node.name in values]
        yield from (((node.kwargs["draw"],), values[node.name]) for node in nodes)
