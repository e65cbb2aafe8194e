"""One rank of a session in which scripts written by hand train a few steps, in float64 and without dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.by_hand import SCRIPTS, examples
from benchmarks.models import alexnet_quarter
from benchmarks.session_rank import SessionRank, serve, sgd
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


if __name__ == "__main__":
    guarded(lambda: serve(ByHandRank))
