"""Layers of which the ranks of a group have parts of the classes or of the vocabulary (Megatron-LM 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .layouts import Extents, State, Transition
from .model_parallel import Group, feature_widths


class DividedLayers:
    """Functions on the parts that a rank of a group has."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def cross_entropy(self, logits: Tensor, target: Tensor, *, features: int, **options: Any) -> Tensor:
        """`F.cross_entropy` of logits of which each rank of the group has a slice of the classes, `features` in all.

        logits: (N, features/k).  target: (N,) class numbers, and the options the same on all ranks.  They exchange the
        largest logit, and two sums: of exponentials and of the target's logit; a third for label smoothing.
        """
        return self._loss(lambda *own: _terms(logits, *own), logits.dtype, target, features, **options)

    def linear_cross_entropy(
        self,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        target: Tensor,
        features: int = 0,
        **how: Any,
    ) -> Tensor:
        """`chunked_cross_entropy`, of which each rank has a slice of the classes where `features` says how many.

        They exchange what `cross_entropy` does, of all rows at once.
        """
        if not features:
            return chunked_cross_entropy(value, weight, bias, target=target, **how)
        dtype, chunks = how.get("dtype", value.dtype), _chunks(value, weight, bias, how)

        def terms(place: Tensor, weights: Tensor | None) -> Tensor:
            return torch.cat(chunks(place, lambda logits, at: _terms(logits, at, weights)), 1)

        return self._loss(terms, dtype, target, features, **how)

    def _loss(
        self,
        terms_of: Callable[[Tensor, Tensor | None], Tensor],
        dtype: torch.dtype,
        target: Tensor,
        features: int,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """The loss of rows of logits in `dtype`.  terms_of: gives `_terms`."""
        first, width = self._part(features)
        counted = target != ignore_index
        label = target.where(counted, 0)
        _require_below(label, features, "target")
        weights = torch.ones(features, device=target.device) if weight is None else weight
        weights = weights.to(torch.float32 if dtype.itemsize < 4 else dtype)
        place, own_weights = label - first, weights[first : first + width]
        terms = terms_of(place, own_weights if label_smoothing else None)
        largest = self._group.all_reduce_scalar(terms[0], maximum=True)
        parts = [terms[1] * (terms[0] - largest).exp()]
        parts.append((terms[2] - largest).where((place >= 0) & (place < width), 0))
        if label_smoothing:
            parts.append(terms[3] - largest * own_weights.sum())
        sums = self._sums(torch.stack(parts))
        log, own = sums[0].log(), weights[label].where(counted, 0)
        loss = (log - sums[1]) * own
        if label_smoothing:
            smooth = (log * weights.sum() - sums[2]).where(counted, 0) / features
            loss = (1 - label_smoothing) * loss + label_smoothing * smooth
        if reduction != "none":
            loss = loss.sum() / (own.sum() if reduction == "mean" else 1)
        return loss if torch.is_autocast_enabled(loss.device.type) else loss.to(dtype)

    def logsumexp(self, value: Tensor, *, features: int, keepdim: bool = False) -> Tensor:
        """`value.logsumexp(-1)` of rows of `features` of which each rank of the group has a part, (..., features/k)."""
        largest = self._group.all_reduce_scalar(value.amax(-1, keepdim=True), maximum=True)
        found = largest + self._sums((value - largest).exp().sum(-1, keepdim=True)).log()
        return found if keepdim else found.squeeze(-1)

    def _sums(self, terms: Tensor) -> Tensor:
        """The sums of what the ranks have of each number, on all of them."""
        return self._group.transition(terms, Transition(State.PARTIAL, State.REPLICATE), Extents())

    def pick(self, value: Tensor, index: Tensor, *, features: int) -> Tensor:
        """One of `features` columns of each row, of which this rank has a part: a term of the sum, zeros elsewhere.

        value: (..., features/k).  index: (...,) or (..., 1), the same on all ranks.
        """
        place, own = self._place(index, features)
        if not value.size(-1):
            return value.sum(-1).view(index.shape)
        picked = value.gather(-1, place.view(*value.shape[:-1], 1))
        return picked.view(index.shape).where(own, 0)

    def put(self, value: Tensor, index: Tensor, source: Tensor | float, *, features: int) -> Tensor:
        """`value` with another number in one of `features` columns of each row, if this rank has it.

        value, index: as of `pick`.  source: a number, or as many as there are rows, the same on all ranks.
        """
        place, own = self._place(index, features)
        if not value.size(-1):  # its backward is part of the ranks' sum
            return value + source.sum() * 0 if isinstance(source, Tensor) else value
        column = (*value.shape[:-1], 1)
        before = value.gather(-1, place.view(column))
        given = torch.as_tensor(source, dtype=value.dtype, device=value.device).expand(index.shape)
        return value.scatter(-1, place.view(column), given.view(column).where(own.view(column), before))

    def scale_by_part(self, value: Tensor, *, features: int) -> Tensor:
        """A mean over this rank's part of `features`, as a term of the mean over all."""
        width = self._part(features)[1]
        return value * (width / features) if width else value.nan_to_num() * 0.0

    def _place(self, index: Tensor, features: int) -> tuple[Tensor, Tensor]:
        """The columns of this rank's part that stand for those of all, and which of them are those."""
        first, width = self._part(features)
        _require_below(index, features, "column")
        return (index - first).clamp(0, max(width - 1, 0)), (index >= first) & (index < first + width)

    def embedding(self, indices: Tensor, weight: Tensor, *, rows: int, padding_idx: int | None = None) -> Tensor:
        """Rows of a table of which this rank has a part: a term of the sum, zeros where the others have the row.

        weight: (rows/k, features).
        """
        first, height = self._part(rows)
        _require_below(indices, rows, "row number")
        place = indices - first
        own, padding = (place >= 0) & (place < height), None if padding_idx is None else padding_idx - first
        if not height:
            return weight.sum(0).expand(*indices.shape, -1)
        found = F.embedding(place.where(own, 0), weight, padding if padding in range(height) else None)
        return found.where(own.unsqueeze(-1), 0)

    def _part(self, size: int) -> tuple[int, int]:
        """The first of `size` that this rank has, and how many."""
        widths = feature_widths(size, self._group.size)
        return sum(widths[: self._group.index]), widths[self._group.index]


def chunked_cross_entropy(
    value: Tensor, weight: Tensor, bias: Tensor | None = None, *, target: Tensor, **how: Any
) -> Tensor:
    """`F.cross_entropy(F.linear(value, weight, bias), target)` in chunks, whose logits backward computes again.

    value: (..., D).  target: (N,), its rows.  how: chunks=, how many, or rows= of each; dtype= of logits; and
    options of the loss, whose reduction is "sum" or "none".
    """
    chunks = _chunks(value, weight, bias, how)
    found = chunks(target, lambda logits, t: F.cross_entropy(logits, t, **how))
    return torch.cat(found) if how["reduction"] == "none" else sum(found, found[0].new_zeros(()))


def _chunks(value: Tensor, weight: Tensor, bias: Tensor | None, how: dict[str, Any]) -> Callable[..., list[Tensor]]:
    """What applies a function to each chunk's logits and numbers of rows; takes from `how` what is not of the loss."""
    chunks, rows, dtype = (how.pop(name, None) for name in ("chunks", "rows", "dtype"))

    def each(of_rows: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        def made(x: Tensor, part: Tensor) -> Tensor:
            logits = F.linear(x, weight, bias)
            return function(logits if dtype is None else logits.to(dtype), part)

        pairs = zip(
            *(v.chunk(chunks) if chunks else v.split(rows) for v in (value.flatten(0, -2), of_rows)), strict=True
        )
        return [checkpoint(made, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]

    return each


def _terms(logits: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """What this rank's classes add to the cross entropy of each row, (3 or 4, N).

    The largest logit, the sum of exponentials less that, the logit at `place`, and with `weights` their weighted sum.
    """
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    width, least = logits.size(1), torch.finfo(logits.dtype).min
    padded = logits if width else F.pad(logits, (0, 1), value=least)  # a rank without a class
    largest = padded.detach().amax(1).clamp(min=least)
    picked = padded.gather(1, place.clamp(0, max(width - 1, 0)).unsqueeze(1)).squeeze(1)
    terms = [largest, (padded - largest.unsqueeze(1)).exp().sum(1), picked]
    return torch.stack(terms if weights is None else [*terms, logits @ weights])


def _require_below(numbers: Tensor, bound: int, what: str) -> None:
    torch._assert_async(((numbers >= 0) & (numbers < bound)).all(), f"a {what} is not below {bound}")
