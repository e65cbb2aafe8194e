"""One rank of a place: a session's rank that trains scripts written by hand too."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.by_hand import SCRIPTS, examples
from benchmarks.models import alexnet_quarter
from benchmarks.session_rank import SessionRank, Training, serve, sgd
from examples import alexnet
from splitc.runtime.launch.failures import guarded


class OverlapRank(SessionRank):
    """What a rank has at hand between commands."""

    def script(self, name: str, script: str, options: dict[str, int], total: int, image: int) -> dict[str, Any]:
        """Open a script, and draw this rank's part of a global batch of `total` images, `image` pixels a side."""
        torch.manual_seed(0)
        model = alexnet_quarter.model()
        shares = examples(script, total, self._transport.world)
        own = shares[self._transport.rank]
        batch = (*alexnet.example(own, image), alexnet.target(own))
        self._trainings[name] = Training(SCRIPTS[script](model, sgd, shares, **options).step, batch)
        return {}


if __name__ == "__main__":
    guarded(lambda: serve(OverlapRank))
