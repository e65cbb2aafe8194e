"""Average the parameters that units of ranks have trained by themselves (local SGD; SplitBrain 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..transport.messages import Messages


def average(messages: Messages, buckets: Sequence[Sequence[Tensor]], ranks: tuple[int, ...], share: float) -> None:
    """Replace tensors by their mean over `ranks`, of which this one has the weight `share`.

    buckets: tensors that travel together, of one dtype.  The shares of all ranks sum to 1.
    """
    under_way = []
    for bucket in buckets:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]) * share
        messages.count(2 * (len(ranks) - 1) * flat.nbytes // len(ranks))
        under_way.append((bucket, flat, messages.transport.all_reduce(flat, ranks)))
    for bucket, flat, work in under_way:
        work.wait()
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))
