"""Normalise the hidden layers of a model that has no normalisation, as independent subnets need it (IST 3.3).

The inputs of a neuron are normalised over examples, before its activation: f((x - mean) / deviation), with a scale and
a shift that are learned.  The last layer's outputs are normalised without these, since their sums have n times as many
terms at inference as in training.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from splitc.errors import PlacementError
from splitc.ir.graph import info
from splitc.ir.program import Program
from splitc.ir.subnets.neurons import find_neurons


def with_norms(model: nn.Module, program: Program, ranks: int) -> nn.Module:
    """A copy of `model` that shares its tensors, and normalises what `ranks` subnets need normalised.

    program: the model as captured.  The copy's state has the model's own keys, and those of the normalisations: `norm`
    in the module whose outputs they normalise.  Raises PlacementError where that is no module of a known kind.
    """
    dealing = find_neurons(program, program.graph, ranks)
    changed = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for node in (*dealing.bare, *dealing.final):
        module = changed.get_submodule(str(node.target) if node.op == "call_module" else info(node).module)
        if isinstance(module, _Normed):
            continue  # compiled again, in another precision
        normed = _NORMED.get(type(module))
        if normed is None:
            raise PlacementError(
                f"insert_norm: {info(node).layer} ({info(node).source}) is computed in a {type(module).__name__}, and "
                f"only outputs of {', '.join(kind.__name__ for kind in _NORMED)} can be normalised; add BatchNorm1d"
            )
        weight: Any = module.weight
        features = weight.shape[0 if isinstance(module, nn.Linear) else 1]
        norm = nn.BatchNorm1d(features, affine=node in dealing.bare, dtype=weight.dtype, device=weight.device)
        module.__class__ = normed
        module.add_module("norm", norm)
    return changed


class _Normed(nn.Module):
    """A module whose outputs, (..., features), are normalised over all dims but the last."""

    norm: nn.BatchNorm1d

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        values: Tensor = super().forward(*args, **kwargs)
        if values.dim() == 2:
            values = self.norm(values)
            return values
        normalised: Tensor = self.norm(values.flatten(0, -2))
        return normalised.view_as(values)


_KINDS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding, nn.EmbeddingBag)
_NORMED: dict[type[nn.Module], type[Any]] = {
    kind: type(f"Normed{kind.__name__}", (_Normed, kind), {"__module__": __name__}) for kind in _KINDS
}
