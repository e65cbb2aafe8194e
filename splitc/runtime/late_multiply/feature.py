"""What generated code calls for late-multiplied layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.role import FACTORS, Part
from ..moments import Feature
from .layers import LateMultiply


class LateMultiplyComm(Part):
    """The late-multiplied layers of a role."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._late = LateMultiply(self.role.carrying(FACTORS), self.role.spec.replicas)

    def late_multiply(self, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer whose weight gradient is computed from all replicas' inputs and output errors."""
        rows = self._rows(value[..., 0].numel())
        return self._late.linear(value, weight, bias, rows=rows, is_last=self.examples.is_last)

    def gather_indices(self, indices: Sequence[Tensor]) -> None:
        """In the last microbatch, begin to gather the indices of tables, those of the microbatches before too."""
        rows = [self._rows(each.numel()) for each in indices]
        self._late.gather_indices(indices, rows, is_last=self.examples.is_last)

    def late_embedding(
        self, indices: Tensor, weight: Tensor, *, pool: str = "", gathered: int | None = None, **options: Any
    ) -> Tensor:
        """`F.embedding` with its options, whose gradient is computed from all replicas' indices and output errors.

        pool: sum or mean, of the rows of each example: then the errors of these travel.
        gathered: which of `gather_indices` these are.
        """

        def look_up(rows: Tensor, table: Tensor) -> Tensor:
            found = F.embedding(rows, table, **options)
            return getattr(found, pool)(1) if pool else found

        rows = self._rows(len(indices) if pool else indices.numel())
        return self._late.table(look_up, weight, indices, rows=rows, is_last=self.examples.is_last, gathered=gathered)

    def late_embedding_bag(
        self,
        indices: Tensor,
        weight: Tensor,
        *,
        per_sample_weights: Tensor | None = None,
        gathered: int | None = None,
        **options: Any,
    ) -> Tensor:
        """`F.embedding_bag` of bags of one size likewise; the errors of bags travel, not those of their rows."""

        def look_up(rows: Tensor, table: Tensor, weights: Tensor | None = None) -> Tensor:
            return F.embedding_bag(rows, table, per_sample_weights=weights, **options)

        values = (indices,) if per_sample_weights is None else (indices, per_sample_weights)
        rows = self._rows(len(indices))
        return self._late.table(look_up, weight, *values, rows=rows, is_last=self.examples.is_last, gathered=gathered)

    def _rows(self, own: int) -> list[int]:
        """How many rows each replica has of a value of which this one has `own`."""
        (first, last), replicas = self.examples.own, self.role.replicas
        rows = self.examples.rows_of(replicas.ranks, own := own // max(last - first, 1))
        if not all(examples := self.examples.rows_of(replicas.ranks)):  # then one without knows no rows of an example
            each = replicas.all_reduce_scalar(torch.tensor(own, device=self.role.transport.device))
            rows = [number * (int(each) // (len(rows) - examples.count(0))) for number in examples]
        return rows

    def multiply(self) -> None:
        """Compute the gradients of late-multiplied layers, after the last microbatch: W' = E^T X, rows of E."""
        if self.examples.is_last:
            self._late.finish()


class LateMultiplied(Feature):
    """Layers of which the replicas exchange the factors of the weight's gradient."""

    comm = LateMultiplyComm
