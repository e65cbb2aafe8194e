"""The state of a whole model, out of its workers and into them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.runtime.weights import first_names
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.ranks import (
    assert_same,
    batch_of,
    on_workers,
    one_process,
    part_of,
    plain,
    train,
)

# -- the state ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One tensor under several keys: an embedding tied to the head, a layer registered twice; and unused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.alias = nn.Linear(6, 6)
        self.layers = nn.ModuleList([self.alias, nn.Linear(6, 6)])
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("shift", torch.ones(6), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale + self.shift
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x).mean(1)


def token_batch(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 10, (examples, 5)), torch.randint(0, 10, (examples,))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data_parallel", "single_device"])
def test_the_state_has_all_keys_of_the_model_tied_and_unused_ones_too(strategy: str) -> None:
    model = Tied()
    ids, target = token_batch(4)
    program = compiled(model, (ids,), target, F.cross_entropy, 2, strategy)
    batches = [token_batch(program.plan.global_batch) for _ in range(3)]
    results = on_workers(program, lambda worker: train(worker, batches))
    _, state = one_process(copy.deepcopy(model), batches)
    assert torch.equal(state["alias.weight"], state["layers.0.weight"])
    assert_same(results[0][1], state)
    got = results[0][1]
    assert got is not None
    assert got["embed.weight"] is got["head.weight"]  # as small on disk as the model's own
    model.load_state_dict(got)


def test_a_worker_keeps_no_second_copy_of_its_weights() -> None:
    model, program = plain("data_parallel")

    def run(worker: Worker) -> list[str]:
        return list(worker._state.unheld)

    assert on_workers(program, run) == [["unused.weight", "unused.bias"], []]
    assert first_names(model.state_dict()).keys() == model.state_dict().keys()


def test_a_worker_without_an_optimizer_evaluates() -> None:
    model, program = plain()
    batch = batch_of(8)

    def run(worker: Worker) -> float:
        assert worker.optimizer is None
        return float(worker.evaluate(*part_of(worker, batch, (4, 4))))

    expected = float(F.cross_entropy(model(batch[0]), batch[1]).detach())
    assert on_workers(program, run, optimizer=None) == [pytest.approx(expected, rel=1e-5)] * 3


def test_a_batch_on_another_device_is_moved_to_the_ranks() -> None:
    _, program = plain("single_device")

    class Elsewhere(Tensor):
        """A tensor that only `to` brings here."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.to:
                moved.append(args[1])
                return args[0].as_subclass(Tensor)
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    moved: list[torch.device] = []
    images, labels = batch_of(4)

    def run(worker: Worker) -> None:
        worker.step(*(() if worker.data_rank is None else (images.as_subclass(Elsewhere), labels)))

    on_workers(program, run)
    assert moved == [torch.device("cpu")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data_parallel", "parameter_server(servers=2, beside=True)"])
def test_the_gradient_of_a_tied_parameter_stands_under_each_of_its_names(strategy: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    x, y = torch.randn(4, 6), torch.randint(6, (4,))
    program = compiled(model, x, y, F.cross_entropy, 2, strategy)

    def run(worker: Worker) -> None:
        worker.step(*part_of(worker, (torch.cat([x, x]), torch.cat([y, y])), (4, 4)))
        gradients = worker.gradients()
        assert gradients.keys() >= {"0.weight", "2.weight"}
        assert torch.equal(gradients["0.weight"], gradients["2.weight"])

    on_workers(program, run)
