"""Losses and batches that models of `zoo/` share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CLASSES = 10


def classes(output: Any, target: Tensor) -> Tensor:
    """Cross entropy of logits; of the first output where the model returns several."""
    if isinstance(output, (tuple, list)):
        output = output[0]
    return F.cross_entropy(output, target)


def of_logits(output: Any, target: Tensor) -> Tensor:
    """Cross entropy of an output object's `logits`, of one example or of each token."""
    logits = output.logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


def tokens_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of each token's logits."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


def squared(output: Any, target: Tensor) -> Tensor:
    """Mean squared error against a target of the output's shape."""
    if isinstance(output, (tuple, list)):
        output = output[0]
    return F.mse_loss(output, target)


def energy(output: Any, target: Tensor) -> Tensor:
    """Mean of the squares of the first output, weighted with one number for each example."""
    if isinstance(output, (tuple, list)):
        output = output[0]
    weighted: Tensor = output.flatten(1).square().mean(1) * target
    return weighted.mean()


def clicks(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross entropy of probabilities."""
    return F.binary_cross_entropy(output.squeeze(-1).clamp(1e-6, 1 - 1e-6), target)


def images(n: int, size: int, channels: int = 3) -> Tensor:
    """Normal noise."""
    return torch.randn(n, channels, size, size)


def labels(n: int, classes: int = CLASSES) -> Tensor:
    """A class for each example."""
    return torch.randint(classes, (n,))


def tokens(n: int, length: int, vocabulary: int) -> Tensor:
    """Ids above 3: the lowest are padding and the like."""
    return torch.randint(4, vocabulary, (n, length))
