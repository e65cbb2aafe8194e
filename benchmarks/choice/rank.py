"""One rank of a place: a session's rank that trains DDP's scripts too, of any model file."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.by_hand import SCRIPTS
from benchmarks.session_rank import SessionRank, Training, serve, sgd
from splitc.cli.model_file import load_model
from splitc.runtime.launch.failures import guarded


class ChoiceRank(SessionRank):
    """What a rank has at hand between commands."""

    def script(self, name: str, script: str, model: str, sizes: str | None, momentum: float) -> dict[str, Any]:
        """Open a script on a model file, and take its example as this rank's batch."""
        torch.manual_seed(self._transport.rank)  # of the batch; DDP sends rank 0's weights
        file = load_model(model, sizes)
        one = SCRIPTS[script](file.model, partial(sgd, momentum=momentum), loss=file.example.loss)
        self._trainings[name] = Training(one.step, tuple(file.example.tensors.values()))
        return {}


if __name__ == "__main__":
    guarded(lambda: serve(ChoiceRank))
