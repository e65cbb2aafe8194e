"""The multilayer perceptron of Stanza's table 7: layer separation without convolutions.

Every layer is linear, but the last hidden one holds half of the 8.4 M parameters and reads only
1024 activations an example.  Stanza cuts before it and trains the last two layers on one node.

    splitc inspect examples/mlp.py --world 4 --cluster v100-10gbe
    splitc compile examples/mlp.py --world 4 --cluster v100-10gbe -o build
    splitc verify examples/mlp.py --world 4
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with a ReLU between them, on flattened images."""

    def __init__(self, inputs: int, hidden: Sequence[int], num_classes: int) -> None:
        super().__init__()
        sizes = pairwise([inputs, *hidden])
        self.hidden = nn.ModuleList(nn.Linear(before, after) for before, after in sizes)
        self.output = nn.Linear(hidden[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.output(x)


def mlp(inputs: int = 3072, hidden: Sequence[int] = (1024, 1024, 4096), num_classes: int = 10) -> nn.Module:
    """The perceptron of table 7, or one of other sizes."""
    return MLP(inputs, hidden, num_classes)


model = mlp
loss = F.cross_entropy


def example(batch: int = 128) -> tuple[Tensor]:
    """One rank's batch of images of CIFAR-10's size."""
    return (torch.randn(batch, 3, 32, 32),)


def target(batch: int = 128, num_classes: int = 10) -> Tensor:
    """Their classes."""
    return torch.randint(num_classes, (batch,))
