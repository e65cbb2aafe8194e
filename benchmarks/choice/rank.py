"""One rank of a place: a session's rank that tunes, and trains DDP's scripts too, of any model file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.by_hand import SCRIPTS
from benchmarks.session_rank import SessionRank, Training, serve, sgd
from splitc.cli.model_file import load_model
from splitc.runtime.launch.failures import guarded
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.launch.main import load_weights
from splitc.runtime.launch.tuning import BATCH, FINALISTS
from splitc.runtime.transport.base import Transport
from splitc.runtime.tuning import Finalist, fastest, outcome, rows_of, tune
from splitc.runtime.worker import Worker


class ChoiceRank(SessionRank):
    """What a rank has at hand between commands."""

    def script(self, name: str, script: str, model: str, sizes: str | None, momentum: float) -> dict[str, Any]:
        """Open a script on a model file, and take its example as this rank's batch."""
        torch.manual_seed(self._transport.rank)  # of the batch; DDP sends rank 0's weights
        file = load_model(model, sizes)
        one = SCRIPTS[script](file.model, partial(sgd, momentum=momentum), loss=file.example.loss)
        self._trainings[name] = Training(one.step, tuple(file.example.tensors.values()))
        return {}

    def tune(self, folder: str, budget: float, momentum: float) -> dict[str, Any]:
        """Run the finalists in a folder, as `splitc tune` does: which is the fastest, and what came of each."""
        listed = json.loads((Path(folder) / FINALISTS).read_text(encoding="utf-8"))
        files = [each.pop("files") for each in listed]
        finalists = [Finalist(**each) for each in listed]
        tensors = torch.load(Path(folder) / BATCH, weights_only=True)
        weights, keys = load_weights(Path(folder))

        def make(k: int, trial: Transport) -> tuple[Worker, tuple[Tensor, ...]]:
            module = load_rank(files[k], trial.rank)
            return Worker(module, trial, weights, keys, partial(sgd, momentum=momentum)), rows_of(module.rank, tensors)

        tune(self._transport, finalists, make, budget)
        tried = [{"name": each.name, **outcome(each)} for each in finalists]
        return {"fastest": fastest(finalists), "tried": tried}


if __name__ == "__main__":
    guarded(lambda: serve(ChoiceRank))
