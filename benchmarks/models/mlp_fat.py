"""A perceptron of three fat layers on large batches: little but matrix products, and all parameters in them.

One of the models of `python -m benchmarks.accuracy`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import mlp

loss = F.cross_entropy


def model() -> nn.Module:
    """2.9 M parameters."""
    return mlp.mlp(inputs=768, hidden=(1024, 1024, 1024), num_classes=10)


def example(batch: int = 512) -> tuple[Tensor]:
    """One rank's batch of images of 3 x 16 x 16."""
    return (torch.randn(batch, 3, 16, 16),)


def target(batch: int = 512) -> Tensor:
    """Their classes."""
    return mlp.target(batch)
