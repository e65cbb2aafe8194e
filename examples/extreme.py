"""An extreme classifier: the words of a text -> one of 100,000 classes.

The output layer has 12.9 M of the 15.5 M parameters and nearly all FLOPs, and reads 128 numbers of an
example.  Data parallelism all-reduces all of it in every step; divided by classes its gradients stay
where they are, and ranks exchange these numbers and the sums of a cross entropy.  `dataset` makes
texts: a class is told by words of its own, and few classes are frequent.

    splitc inspect examples/extreme.py --world 4 --cluster v100-10gbe
    splitc compile examples/extreme.py --world 4 --cluster v100-10gbe -o build
    splitc run build --steps 200 --data examples.extreme:dataset
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Extreme(nn.Module):
    """Words (batch, words) -> logits (batch, classes)."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(words, width, mode="mean")
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.classes = nn.Linear(width, classes)

    def forward(self, text: Tensor) -> Tensor:
        return self.classes(self.norm(F.relu(self.hidden(self.words(text)))))


def extreme(words: int = 20_000, width: int = 128, classes: int = 100_000) -> nn.Module:
    """A classifier of texts."""
    return Extreme(words, width, classes)


model = extreme
loss = F.cross_entropy


def example(batch: int = 64, words: int = 20_000, length: int = 32) -> tuple[Tensor]:
    """One rank's batch of texts, of so many words each."""
    return (torch.randint(words, (batch, length)),)


def target(batch: int = 64, classes: int = 100_000) -> Tensor:
    """Their classes."""
    return torch.randint(classes, (batch,))


def dataset(worker: object = None, texts: int = 100_000) -> TensorDataset:
    """Texts of 24 words that tell the class, each of eight that it has, and 8 words of any kind."""
    generator = torch.Generator().manual_seed(0)
    rarely = torch.rand(texts, generator=generator)
    labels = (100_000**rarely).long() - 1  # Zipf's law: class n is n times as rare as the first
    own = torch.randint(20_000, (100_000, 8), generator=generator)
    which = torch.randint(8, (texts, 24), generator=generator)
    noise = torch.randint(20_000, (texts, 8), generator=generator)
    return TensorDataset(torch.cat([own[labels].gather(1, which), noise], dim=1), labels)
