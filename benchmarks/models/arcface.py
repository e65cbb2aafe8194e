"""A face recogniser in small: a network of two layers, and an ArcFace head of 20,000 persons.

`splitc inspect benchmarks/models/arcface.py --world 4 --pin 'head=group:4,split:columns,holding:sharded'` divides the
head by persons, so that no rank holds all cosines.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PERSONS, WIDTH, MARGIN, SCALE = 20_000, 128, 0.5, 64.0


class ArcFace(nn.Module):
    """Cosines between faces and persons; those of the targets are of an angle that is larger by the margin."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(PERSONS, WIDTH))

    def forward(self, x: Tensor, person: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        own = cosine.gather(1, person.view(-1, 1)).clamp(-1 + 1e-7, 1 - 1e-7)
        moved = own * math.cos(MARGIN) - torch.sqrt(1 - own * own) * math.sin(MARGIN)
        return SCALE * cosine.scatter(1, person.view(-1, 1), moved)


class Recogniser(nn.Module):
    """The loss of faces as vectors of 512 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, WIDTH))
        self.head = ArcFace()

    def forward(self, x: Tensor, person: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.trunk(x), person), person)


def model() -> nn.Module:
    """2.9 M parameters, 2.6 M of them in the head."""
    return Recogniser()


def example(batch: int = 32) -> tuple[Tensor, Tensor]:
    """One rank's batch of faces, and whose they are."""
    return torch.randn(batch, 512), torch.randint(PERSONS, (batch,))
