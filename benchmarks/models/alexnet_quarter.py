"""AlexNet at a quarter of its width, on small images and large batches: quick on two cores, and megabytes on the wire.

The default model of `python -m benchmarks.wire_bytes`.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from examples import alexnet

loss = F.cross_entropy


def model() -> nn.Module:
    """A quarter of the channels and hidden units."""
    return alexnet.alexnet(width=0.25)


def example(batch: int = 512) -> tuple[Tensor]:
    """One rank's batch of images of 64 x 64."""
    return alexnet.example(batch, image=64)


def target(batch: int = 512) -> Tensor:
    """Their classes."""
    return alexnet.target(batch)
