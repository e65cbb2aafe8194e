"""Average the parameters that units of ranks have trained by themselves (local SGD; SplitBrain 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..transport.messages import Messages


def average(
    messages: Messages, stage: nn.Module, buckets: Sequence[Sequence[str]], ranks: tuple[int, ...], share: float
) -> None:
    """Replace tensors of `stage` by their mean over `ranks`, of which this one has the weight `share`.

    buckets: the names of those that travel together, of one dtype.  The shares of all ranks sum to 1.
    """
    tensors = {**dict(stage.named_parameters(remove_duplicate=False)), **dict(stage.named_buffers())}
    under_way = []
    for bucket in buckets:
        flat = torch.cat([tensors[name].detach().reshape(-1) for name in bucket]) * share
        messages.count(2 * (len(ranks) - 1) * flat.nbytes // len(ranks))
        under_way.append((bucket, flat, messages.transport.all_reduce(flat, ranks)))
    for bucket, flat, work in under_way:
        work.wait()
        with torch.no_grad():
            for name, part in zip(bucket, flat.split([tensors[name].numel() for name in bucket]), strict=True):
                tensors[name].copy_(part.view_as(tensors[name]))
