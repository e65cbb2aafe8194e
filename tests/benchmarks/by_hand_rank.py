"""One rank of a session in which scripts written by hand train a few steps, in float64 and without dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.by_hand import SCRIPTS, examples
from benchmarks.models import alexnet_quarter
from benchmarks.session_rank import SessionRank, serve, sgd
from examples import recommender
from examples.alexnet import AlexNet
from splitc.runtime.launch.failures import guarded


def undropped() -> AlexNet:
    torch.manual_seed(0)
    model = alexnet_quarter.model().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert isinstance(model, AlexNet)
    return model


def batches(total: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(alexnet_quarter.example(total)[0].double(), alexnet_quarter.target(total)) for _ in range(steps)]


def tables() -> nn.Module:
    """A recommender with few rows, in float64."""
    torch.manual_seed(0)
    return recommender.recommender(users=30, items=20, categories=5, width=4, hidden=8).double()


def clicks(total: int, steps: int) -> list[tuple[torch.Tensor, ...]]:
    """Batches of `tables`: rows of its tables that few, or several, examples read."""
    torch.manual_seed(1)
    batches = []
    for _ in range(steps):
        inputs = recommender.example(total, users=30, items=20, categories=5, seen=3)
        batches.append((inputs["dense"].double(), *[*inputs.values()][1:], recommender.target(total).double()))
    return batches


class ByHandRank(SessionRank):
    """Trains, and hands over the whole weights."""

    def train(
        self, script: str, options: dict[str, int], total: int, steps: int, rate: float, file: str
    ) -> dict[str, Any]:
        shares = examples(script, total, self._transport.world)
        one = SCRIPTS[script](undropped(), lambda params: sgd(params, rate), shares, **options)
        rank = self._transport.rank
        for images, labels in batches(total, steps):
            one.step(images.split(shares)[rank], labels.split(shares)[rank])
        state = one.state()
        if rank == 0:
            torch.save(state, file)
        return {}

    def train_tables(self, script: str, total: int, steps: int, rate: float, file: str) -> dict[str, Any]:
        """The same of a recommender, without momentum."""
        shares, rank = examples(script, total, self._transport.world), self._transport.rank
        one = SCRIPTS[script](tables(), lambda params: sgd(params, rate, 0.0), shares, loss=recommender.loss)
        for batch in clicks(total, steps):
            one.step(*(each.split(shares)[rank] for each in batch))
        if rank == 0:
            torch.save(one.state(), file)
        return {}


if __name__ == "__main__":
    guarded(lambda: serve(ByHandRank))
