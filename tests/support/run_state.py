"""All that the next steps of a worker depend on, to compare two runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from splitc.runtime.optimizers import state_by_name
from splitc.runtime.weights import named_tensors
from splitc.runtime.worker import Worker


def run_state(worker: Worker) -> dict[str, Any]:
    """Copies of a worker's tensors, gradients that wait, optimizer states, rounds and counts."""
    tensors, waiting = named_tensors(worker.stage), worker.steps % worker._accumulate > 0
    return {
        "tensors": copied({**worker._state.unheld, **tensors}),
        "gradients": copied({name: t.grad for name, t in tensors.items() if waiting and t.grad is not None}),
        "optimizers": {r: copied(state_by_name(each, worker._state.trained)) for r, each in worker._optimizers.items()},
        "features": [copied(feature.state_dict()) for feature in worker._features],
        "counts": [worker._steps, worker._examples],
    }


def copied(value: Any) -> Any:
    match value:
        case Tensor():
            return value.detach().clone()
        case dict():
            return {key: copied(each) for key, each in value.items()}
        case list() | tuple():
            return [copied(each) for each in value]
    return value
