"""VGG-16 at an eighth of its width, on images of 32 x 32: many small convolutions, most parameters in one linear layer.

One of the models of `python -m benchmarks.accuracy`; `vgg_small.py:with_batch_norm` normalises after each convolution.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from examples import vgg16

loss = F.cross_entropy


def model() -> nn.Module:
    """An eighth of the channels and hidden units, 100 classes."""
    return vgg16.vgg16(width=0.125, num_classes=100)


def with_batch_norm() -> nn.Module:
    """The same with BatchNorm."""
    return vgg16.vgg16(width=0.125, num_classes=100, batch_norm=True)


def example(batch: int = 192) -> tuple[Tensor]:
    """One rank's batch of images of 32 x 32."""
    return vgg16.example(batch, image=32)


def target(batch: int = 192) -> Tensor:
    """Their classes."""
    return vgg16.target(batch, num_classes=100)
