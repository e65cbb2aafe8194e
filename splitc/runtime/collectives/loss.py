"""The loss over all ranks: its all-reduce, the denominator of a weighted mean, and cross entropy on divided classes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..transport.base import Work
from ..transport.messages import Messages
from .layouts import Extents, State, Transition
from .model_parallel import Group, feature_widths


class Total:
    """A 0-d sum over ranks, the loss or its denominator, whose all-reduce may still be under way."""

    def __init__(self, total: Tensor, work: Work, dtype: torch.dtype) -> None:
        self._total, self._work, self._dtype = total, work, dtype

    def wait(self) -> Tensor:
        """The sum."""
        self._work.wait()
        return self._total.to(self._dtype)


def start_sum(
    messages: Messages, contribution: Tensor, ranks: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float64
) -> Total:
    """Start to sum the contributions of `ranks`, by default all, in `dtype`; the total has their own."""
    transport = messages.transport
    ranks = tuple(range(transport.world)) if ranks is None else ranks
    total = contribution.detach().to(transport.device, dtype, copy=True)
    messages.count(2 * (len(ranks) - 1) * total.nbytes // len(ranks))
    return Total(total, transport.all_reduce(total, ranks), contribution.dtype)


def target_weight(target: Tensor, weight: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """The sum of the weights of `target`'s classes, 0-d: what `reduction="mean"` of a cross entropy divides by.

    target: class numbers of any shape.  weight: (classes,), or None for 1 each; the sum then is an integer, so that a
    loss divided by it keeps its dtype.  Targets of `ignore_index` have weight 0.
    """
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return weight[target.where(counted, torch.zeros_like(target))].where(counted, weight.new_zeros(())).sum()


def cross_entropy(
    group: Group,
    logits: Tensor,
    target: Tensor,
    classes: int,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of logits of which each member of a group has a slice of the classes (Megatron-LM 3).

    logits: (N, classes/k).  target: (N,) class numbers, weight: (classes,), both the same on all members.  The members
    exchange the largest logit, and two sums: of exponentials and of the target's logit; a third for label smoothing.
    """
    dtype = logits.dtype
    logits = logits.float() if dtype.itemsize < 4 else logits
    widths = feature_widths(classes, group.size)
    first, width = sum(widths[: group.index]), widths[group.index]
    counted = target != ignore_index
    label = target.where(counted, 0)
    torch._assert_async(((label >= 0) & (label < classes)).all(), f"a target is not one of {classes} classes")
    shifted = logits - group.maximum(logits.amax(1)).unsqueeze(1)
    place = label - first
    picked = shifted.gather(1, place.clamp(0, width - 1).unsqueeze(1)).squeeze(1)
    terms = [shifted.exp().sum(1), picked.where((place >= 0) & (place < width), 0)]
    weights = logits.new_ones(classes) if weight is None else weight.to(logits.dtype)
    if label_smoothing:
        terms.append(shifted @ weights[first : first + width])
    sums = group.transition(torch.stack(terms), Transition(State.PARTIAL, State.REPLICATE), Extents())
    log, own = sums[0].log(), weights[label].where(counted, 0)
    loss = (log - sums[1]) * own
    if label_smoothing:
        smooth = (log * weights.sum() - sums[2]).where(counted, 0) / classes
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    if reduction != "none":
        loss = loss.sum() / (own.sum() if reduction == "mean" else 1)
    return loss if torch.is_autocast_enabled(loss.device.type) else loss.to(dtype)
