"""Subnets are evaluated as one whole model, whose statistics are computed of a sample, layer by layer."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.errors import PlacementError
from splitc.runtime.spec import StepContext
from splitc.runtime.subnets.feature import Subnetworks
from tests.support.compiled import compiled
from tests.support.ranks import on_workers, part_of
from tests.support.sampling import along
from tests.support.subnet_networks import CLASSES, INPUTS, chain, joined, normed, residual, skipped
from tests.support.subnets import Network

F64 = torch.float64
NETWORKS = {
    "chain": lambda: chain(7, 9),
    "residual": lambda: residual(7),
    "joined": lambda: joined(7, 5, 8),
    "skipped": lambda: skipped(7),
    "normed": lambda: normed(7),
}


def with_statistics(model: nn.Module, sample: list[Tensor]) -> nn.Module:
    """A copy in evaluation mode whose normalisations, from first to last, have the statistics of all examples."""
    model = copy.deepcopy(model).eval()
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm1d)):
        seen: list[Tensor] = []
        hook = norm.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        with torch.no_grad():
            for x in sample:
                model(x)
        hook.remove()
        values = torch.cat(seen)
        norm.running_mean, norm.running_var = values.mean(0), values.var(0)
    return model


@pytest.mark.slow
@along(1, name=list(NETWORKS)[::-1], world=[3, 2, 1])
def test_the_whole_model_is_evaluated_and_saved_with_statistics_of_the_last_batches(name: str, world: int) -> None:
    torch.manual_seed(0)
    network: Network = NETWORKS[name]()
    model = network.model.double()
    sizes = [4, 6, 3][:world]
    batches = [(torch.randn(sum(sizes), INPUTS, dtype=F64), torch.randint(0, CLASSES, (sum(sizes),))) for _ in range(6)]
    x, y = (tensor[:4] for tensor in batches[0])
    made = compiled(model, (x,), y, F.cross_entropy, world, "independent_subnets(local_steps=2)")

    def run(worker: Any) -> tuple[float, dict[str, Tensor] | None, float]:
        worker.use_sizes(sizes)
        for batch in batches[:5]:  # the last round is short
            worker.step(*part_of(worker, batch, sizes))
        first = float(worker.evaluate(*part_of(worker, batches[5], sizes)))
        state = worker.state_dict()
        worker.step(*part_of(worker, batches[5], sizes))
        worker.recompute_statistics([part_of(worker, batch, sizes) for batch in batches[:2]])
        return first, state, float(worker.evaluate(*part_of(worker, batches[5], sizes)))

    results = on_workers(made, run)
    state = results[0][1]
    assert state is not None
    model.load_state_dict(state)
    whole = with_statistics(model, [x for x, _ in batches[:5]])
    x, y = batches[5]
    assert [first for first, _, _ in results] == pytest.approx(
        [float(F.cross_entropy(whole(x), y).detach())] * world, rel=1e-9
    )
    for key, tensor in whole.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-9, atol=1e-9)
    assert all(second != pytest.approx(first) for first, _, second in results)


@pytest.mark.slow
def test_a_normalisation_without_statistics_has_none_to_compute() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7, track_running_stats=False), nn.ReLU(), nn.Linear(7, 4))
    x, y = torch.randn(8, 5), torch.arange(8) % 4
    made = compiled(model, (x[:4],), y[:4], F.cross_entropy, 2, "independent_subnets(local_steps=2)")

    def run(worker: Any) -> float:
        worker.step(*part_of(worker, (x, y), [4, 4]))
        worker.end_round()
        return float(worker.evaluate(*part_of(worker, (x, y), [4, 4])))

    first, second = on_workers(made, run)
    assert first == second


def test_a_normalisation_that_is_there_in_training_alone_keeps_its_statistics() -> None:
    norm, spec, context = nn.BatchNorm1d(3), SimpleNamespace(recomputed=("0",)), StepContext((0, 2), (0, 2))
    training: Any = SimpleNamespace(stage=nn.Sequential(norm), spec=spec, loss=lambda batch, context: None)
    Subnetworks(training).settle([((torch.ones(2, 3),), context)])
    state = norm.state_dict()
    assert state["running_mean"].tolist() == [0, 0, 0] and state["running_var"].tolist() == [1, 1, 1]


def test_a_model_that_cannot_be_evaluated_as_a_whole_is_refused() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 4))

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.hidden(x)
            return scores if self.training else scores.view(6, 4)

    x, y = torch.randn(4, 5), torch.arange(4)
    with pytest.raises(PlacementError, match="subnets need the whole model in evaluation mode"):
        compiled(Grows(), (x,), y, F.cross_entropy, 2, "independent_subnets(local_steps=2)")


@pytest.mark.slow
def test_a_state_that_is_loaded_is_trained_from_and_evaluated() -> None:
    torch.manual_seed(0)
    network, other = chain(7, 9), chain(7, 9)
    x, y = torch.randn(12, INPUTS), torch.randint(0, CLASSES, (12,))
    made = compiled(network.model, (x[:4],), y[:4], F.cross_entropy, 3, "independent_subnets(local_steps=3)")
    wanted = {key: tensor.clone() for key, tensor in other.model.state_dict().items()}

    def run(worker: Any) -> tuple[float, dict[str, Tensor] | None]:
        batch = part_of(worker, (x, y), [4, 4, 4])
        worker.step(*batch)  # a round is running
        worker.load_state_dict(wanted)
        return float(worker.evaluate(*batch)), worker.state_dict()

    (loss, state), *_ = on_workers(made, run)
    assert state is not None
    for key, tensor in wanted.items():
        if "running" not in key and "tracked" not in key:
            assert torch.equal(state[key], tensor), key
    expected = with_statistics(other.model, [x])
    assert loss == pytest.approx(float(F.cross_entropy(expected(x), y).detach()), rel=1e-5)
