"""What generated code calls for late-multiplied layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.role import Part
from ..moments import Feature
from .layers import LateMultiply


class LateMultiplyComm(Part):
    """The late-multiplied layers of a role."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._late = LateMultiply(self.role.transport, self.role.spec.replicas)

    def late_multiply(self, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer whose weight gradient is computed from all replicas' inputs and output errors."""
        (first, last), replicas = self.examples.own, self.role.replicas
        rows = self.examples.rows_of(replicas.ranks, own := value[..., 0].numel() // max(last - first, 1))
        if not all(examples := self.examples.rows_of(replicas.ranks)):  # then one without knows no rows of an example
            each = replicas.all_reduce_scalar(torch.tensor(own, device=value.device))
            rows = [number * (int(each) // (len(rows) - examples.count(0))) for number in examples]
        return self._late.linear(value, weight, bias, rows=rows, is_last=self.examples.is_last)

    def multiply(self) -> None:
        """Compute the gradients of late-multiplied layers, after the last microbatch: W' = E^T X."""
        if self.examples.is_last:
            self._late.finish()


class LateMultiplied(Feature):
    """Layers of which the replicas exchange the factors of the weight's gradient."""

    comm = LateMultiplyComm
