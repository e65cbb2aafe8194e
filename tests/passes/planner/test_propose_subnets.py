"""Plans of independent subnets: what is refused before anything starts, and what insert_norm changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError
from splitc.ir.placements import Placement
from tests.support.compiled import CLUSTER, compiled
from tests.support.models import made
from tests.support.ranks import on_workers, sgd

F64 = torch.float64
B = 6


def mlp(norm: bool = True) -> nn.Sequential:
    parts: list[nn.Module] = []
    for features, neurons in ((8, 12), (12, 9)):
        parts += [nn.Linear(features, neurons), *([nn.BatchNorm1d(neurons)] if norm else []), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(9, 5))


def network(norm: bool = True) -> nn.Module:
    """Convolutions, and a head of fully connected layers."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(F.relu(m.bn(m.conv(x))).flatten(1)[:, :8])

    return made(run, conv=nn.Conv2d(1, 2, 3), bn=nn.BatchNorm2d(2), head=mlp(norm))


def images(n: int = B) -> Tensor:
    return torch.randn(n, 1, 5, 4, dtype=F64)


def subnets(model: nn.Module, world: int, x: Tensor, options: str = "local_steps=2", **more: Any) -> CompiledProgram:
    y = torch.randint(0, 5, (len(x),))
    strategy = f"independent_subnets({options})"
    made = splitc.compile(
        model.double(), world, example=(x,), target=y, loss=F.cross_entropy, strategy=strategy, cluster=CLUSTER, **more
    )
    assert isinstance(made, CompiledProgram)
    return made


def batches(world: int, steps: int, shape: tuple[int, ...] = (8,)) -> list[tuple[Tensor, Tensor]]:
    x = [torch.randn(B * world, *shape, dtype=F64) for _ in range(steps)]
    return [(each, torch.randint(0, 5, (B * world,))) for each in x]


def own(worker: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    first = worker.data_rank * B
    return tuple(tensor[first : first + B] for tensor in batch)


@pytest.mark.slow
def test_what_subnets_cannot_train_is_refused() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(F.relu(F.linear(x, m.w)))

    functional = made(run, w=nn.Parameter(torch.randn(12, 8)), out=nn.Linear(12, 5))
    cases: list[tuple[nn.Module, dict[str, Any], str]] = [
        (mlp(norm=False), {}, r"no normalisation follows 0 .*, 2 .*add BatchNorm1d there, or ask for"),
        (nn.Sequential(nn.Linear(8, 5)), {}, "no linear layer has hidden neurons to deal to 2 ranks"),
        (mlp(), {"pins": {"0": Placement(holding="sharded")}}, "independent_subnets has only replicated"),
        (
            functional,
            {"options": "insert_norm=True"},
            r"insert_norm: .* only outputs of Linear, Embedding, EmbeddingBag",
        ),
    ]
    for model, options, words in cases:
        with pytest.raises(PlacementError, match=words):
            subnets(model, 2, torch.randn(B, 8, dtype=F64), **options)


@pytest.mark.slow
def test_it_is_never_chosen_by_auto_and_is_marked() -> None:
    x, y = torch.randn(B, 8, dtype=F64), torch.randint(0, 5, (B,))
    auto = compiled(mlp().double(), (x,), y, F.cross_entropy, 2, "auto")
    assert all(each.strategy not in ("independent_subnets", "local_sgd") for each in auto.plan.candidates)
    program = subnets(mlp(), 2, x)
    assert not program.plan.exact and "approximate" in program.report()


@pytest.mark.slow
def test_convolutions_are_averaged_and_the_head_is_dealt() -> None:
    made = subnets(network(), 3, images())
    assert type(made.plan).from_json(made.plan.to_json()) == made.plan
    conv, fc = made.program.stages
    assert (conv.role, fc.role) == ("conv", "fc") and not conv.dealt
    assert {name for bucket in conv.averaged for name in bucket} >= {"conv.weight", "bn.weight", "bn.running_mean"}
    assert {name for bucket in fc.averaged for name in bucket} == {"head.6.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 1])
def test_the_divided_network_computes_what_the_exported_model_does(world: int) -> None:
    torch.manual_seed(world)
    program = subnets(network(norm=False), world, images(), "local_steps=2,insert_norm=True")
    data = batches(world, 5, (1, 5, 4))

    def run(worker: Any) -> tuple[float, dict[str, Tensor] | None]:
        for batch in data:
            worker.step(*own(worker, batch))
        return float(worker.evaluate(*own(worker, data[0]))), worker.state_dict()

    results = on_workers(program, run, optimizer=sgd)
    state = results[0][1]
    assert state is not None
    model = copy.deepcopy(program._model)
    model.load_state_dict(state)
    model.eval()
    expected = float(F.cross_entropy(model(data[0][0]), data[0][1]).detach())
    assert [loss for loss, _ in results] == pytest.approx([expected] * world, rel=1e-9)


@pytest.mark.slow
def test_the_users_model_stays_as_it_was_and_keeps_its_keys() -> None:
    model = mlp(norm=False)
    before = {key: value.clone() for key, value in model.double().state_dict().items()}
    program = subnets(model, 2, torch.randn(B, 8, dtype=F64), "local_steps=1,insert_norm=True")
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert program.weights()["state"].keys() - before.keys() == {
        *(f"{k}.norm.{name}" for k in (0, 2) for name in ("weight", "bias")),
        *(f"{k}.norm.{name}" for k in (0, 2, 4) for name in ("running_mean", "running_var", "num_batches_tracked")),
    }
    assert program._model.get_parameter("0.weight").data_ptr() == model.get_parameter("0.weight").data_ptr()


@pytest.mark.slow
def test_a_model_that_cannot_be_evaluated_divided_is_refused() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.head(x)
        return h if m.training else h[: int(h.sum().item() > 0) + 1]

    with pytest.raises(PlacementError, match="subnets need the whole model in evaluation mode, divided over ranks: "):
        subnets(made(run, head=mlp()), 2, torch.randn(B, 8, dtype=F64))
