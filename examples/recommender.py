"""A recommender like DLRM: embedding tables have the parameters, small perceptrons the FLOPs.

Four tables of very different sizes hold all but 23,000 of the 9.64 M parameters and have no FLOPs:
an example reads a few rows.  Data parallelism still all-reduces every table in every step; on a
separate rank the tables stay local, and only indices and dense features are sent.  `forward` reads
the dense features first, so that one cut has all tables above it.  `dataset` makes clicks that follow
from the features.

    splitc inspect examples/recommender.py --world 4 --cluster v100-10gbe
    splitc compile examples/recommender.py --world 4 --cluster v100-10gbe -o build
    splitc verify examples/recommender.py --world 4
    splitc run build --steps 500 --data examples.recommender:dataset
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Recommender(nn.Module):
    """Dense features, a user, an item, its category and the items seen before -> the logit of a click, (batch,)."""

    def __init__(self, dense: int, users: int, items: int, categories: int, width: int, hidden: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(dense, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)
        self.categories = nn.Embedding(categories, width)
        self.seen = nn.EmbeddingBag(items, width, mode="mean")
        pairs = 5 * 4 // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense: Tensor, user: Tensor, item: Tensor, category: Tensor, seen: Tensor) -> Tensor:
        features = self.bottom(dense)
        tables = self.users(user), self.items(item), self.categories(category), self.seen(seen)
        return self.top(torch.cat([features, interactions(features, *tables)], dim=1)).squeeze(1)


def interactions(*features: Tensor) -> Tensor:
    """The dot product of every two features, (batch, pairs)."""
    x = torch.stack(features, dim=1)
    first, second = torch.triu_indices(len(features), len(features), offset=1)
    return (x @ x.transpose(1, 2))[:, first, second]


def recommender(
    dense: int = 13,
    users: int = 200_000,
    items: int = 50_000,
    categories: int = 500,
    width: int = 32,
    hidden: int = 256,
) -> nn.Module:
    """A click model with tables of these many rows."""
    return Recommender(dense, users, items, categories, width, hidden)


model = recommender
loss = F.binary_cross_entropy_with_logits


def example(
    batch: int = 256, dense: int = 13, users: int = 200_000, items: int = 50_000, categories: int = 500, seen: int = 20
) -> dict[str, Tensor]:
    """One rank's batch: dense features, and rows of the tables."""
    return {
        "dense": torch.randn(batch, dense),
        "user": torch.randint(users, (batch,)),
        "item": torch.randint(items, (batch,)),
        "category": torch.randint(categories, (batch,)),
        "seen": torch.randint(items, (batch, seen)),
    }


def target(batch: int = 256) -> Tensor:
    """Whether the user clicked, 0 or 1."""
    return torch.randint(2, (batch,)).float()


def dataset(worker: object = None, clicks: int = 200_000) -> TensorDataset:
    """Dense features, categories that are liked or not, and the rest at random; and whether the user clicked."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(clicks, 13, generator=generator)
    user, item, category = (torch.randint(n, (clicks,), generator=generator) for n in (200_000, 50_000, 500))
    seen = torch.randint(50_000, (clicks, 20), generator=generator)
    liked = torch.randn(500, generator=generator)
    logits = 2 * dense[:, :4].sum(1) + 2 * liked[category]
    clicked = torch.rand(clicks, generator=generator) < logits.sigmoid()
    return TensorDataset(dense, user, item, category, seen, clicked.float())
