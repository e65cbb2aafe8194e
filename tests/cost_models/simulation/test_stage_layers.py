"""What a rank's optimizer updates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from splitc.cost_models.simulation.stage_layers import trainable
from tests.support.compiled import compiled

ROWS, WIDTH, BATCH, BAG = 50_000, 8, 4, 5


class Bags(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, bags: Tensor) -> Tensor:
        return self.head(self.table(bags)).squeeze(1)


@pytest.mark.parametrize("strategy", ["single_device", "late_multiply"])
def test_of_a_sparse_table_the_rows_are_updated_that_all_ranks_read(strategy: str) -> None:
    bags, target = torch.zeros(BATCH, BAG, dtype=torch.int64), torch.zeros(BATCH)
    updated, examples = list[float](), 0
    for sparse in (True, False):
        made = compiled(Bags(sparse), bags, target, nn.MSELoss(), 2, strategy)
        (stage,) = made.program.stages
        examples = made.program.plan.global_batch
        updated.append(trainable(made.program, stage, 0) - 4 * (WIDTH + 1))
    assert updated == [4 * examples * BAG * WIDTH, 4 * ROWS * WIDTH]
