"""Draw the global batches that `verify` trains on, and divide them among the ranks that read data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def draw_batch(example: Mapping[str, Tensor], size: int, seed: int) -> dict[str, Tensor]:
    """`size` examples drawn from the rows of `example`; floats get noise, so that no two examples are the same."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, next(iter(example.values())).shape[0], (size,), generator=generator)

    def draw(tensor: Tensor) -> Tensor:
        chosen = tensor.detach().cpu()[rows]
        if not tensor.dtype.is_floating_point:
            return chosen
        noise = torch.randn(chosen.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
        return chosen + noise * chosen.std().nan_to_num(1.0)

    return {name: draw(tensor) for name, tensor in example.items()}


def split_batch(batch: Mapping[str, Tensor], local_batches: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """The part of each reader, which has `local_batches[reader]` examples."""
    return list(zip(*(tensor.split(list(local_batches)) for tensor in batch.values()), strict=True))
