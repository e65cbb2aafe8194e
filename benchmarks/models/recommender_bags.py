"""Eight tables of 64 features, one of 1 M rows, that bags of 20 rows read: 76 M parameters of which a step reads a few.

Rows are as skewed as in click logs: of a table of n, row k is read as often as 1 / k, so bags have duplicates.
`recommender_bags.py:with_sparse_gradients` trains the same tables by sparse gradients (SGD, Adagrad), and
`recommender_bags.py:tied` reads the first table for two features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = (1_000_000, 100_000, 50_000, 20_000, 10_000, 5_000, 2_000, 1_000)
WIDTH, BAG, DENSE, HIDDEN = 64, 20, 13, 128

loss = F.binary_cross_entropy_with_logits


class Recommender(nn.Module):
    """Dense features (batch, 13) and a bag of rows for each table, (batch, 8, 20) -> the logit of a click, (batch,)."""

    def __init__(self, rows: tuple[int, ...] = ROWS, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        kinds = ("sum", "mean")
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(number, WIDTH, mode=kinds[k % 2], sparse=sparse) for k, number in enumerate(rows)
        )
        if tied:
            self.tables[1].weight = self.tables[0].weight
        self.bottom = nn.Sequential(nn.Linear(DENSE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
        self.top = nn.Sequential(nn.Linear((len(rows) + 1) * WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, dense: Tensor, bags: Tensor) -> Tensor:
        found = [table(bags[:, k]) for k, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(dense), *found], dim=1)).squeeze(1)


def model() -> nn.Module:
    """76 M parameters, all but 85,000 of them in the tables."""
    return Recommender()


def with_sparse_gradients() -> nn.Module:
    """The same with `sparse=True` tables."""
    return Recommender(sparse=True)


def tied() -> nn.Module:
    """The same, of which the first two features read one table."""
    return Recommender(tied=True)


def example(batch: int = 128, rows: tuple[int, ...] = ROWS) -> tuple[Tensor, Tensor]:
    """One rank's batch of dense features, and of bags for each table."""
    numbers = torch.tensor(rows, dtype=torch.float64).view(1, -1, 1)
    return torch.randn(batch, DENSE), (numbers ** torch.rand(batch, len(rows), BAG, dtype=torch.float64)).long() - 1


def target(batch: int = 128) -> Tensor:
    """Whether they were clicked."""
    return torch.randint(0, 2, (batch,)).float()
