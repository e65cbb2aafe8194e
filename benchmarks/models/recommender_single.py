"""The recommender of `recommender_bags.py` with sparse gradients, of whose tables an example reads one row each."""

from torch import Tensor

from benchmarks.models import recommender_bags
from benchmarks.models.recommender_bags import loss, target
from benchmarks.models.recommender_bags import with_sparse_gradients as model

__all__ = ["example", "loss", "model", "target"]


def example(batch: int = 128) -> tuple[Tensor, Tensor]:
    """One rank's batch of dense features, and of bags of one row."""
    dense, bags = recommender_bags.example(batch)
    return dense, bags[..., :1].contiguous()
