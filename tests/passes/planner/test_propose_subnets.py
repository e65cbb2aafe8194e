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
from splitc.ir.dealt import dealt_ops
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


def test_hidden_layers_without_a_normalisation_are_refused_with_their_lines() -> None:
    with pytest.raises(PlacementError, match=r"no normalisation follows 0 .*, 2 .*add BatchNorm1d there, or ask for"):
        subnets(mlp(norm=False), 2, torch.randn(B, 8, dtype=F64))


def test_a_model_without_hidden_neurons_is_refused() -> None:
    with pytest.raises(PlacementError, match="no linear layer has hidden neurons to deal to 2 ranks"):
        subnets(nn.Sequential(nn.Linear(8, 5)), 2, torch.randn(B, 8, dtype=F64))


def test_pins_are_refused() -> None:
    with pytest.raises(PlacementError, match="independent_subnets has only replicated"):
        subnets(mlp(), 2, torch.randn(B, 8, dtype=F64), pins={"0": Placement(holding="sharded")})


def test_it_is_never_chosen_by_auto_and_is_marked() -> None:
    x, y = torch.randn(B, 8, dtype=F64), torch.randint(0, 5, (B,))
    auto = compiled(mlp().double(), (x,), y, F.cross_entropy, 2, "auto")
    assert all(each.strategy not in ("independent_subnets", "local_sgd") for each in auto.plan.candidates)
    plan = subnets(mlp(), 2, x).plan
    assert not plan.exact and "approximate" in subnets(mlp(), 2, x).report()


def test_the_plan_is_read_back_from_its_file() -> None:
    plan = subnets(network(), 3, images()).plan
    assert type(plan).from_json(plan.to_json()) == plan


@pytest.mark.parametrize("world", [2, 3])
def test_convolutions_are_averaged_and_the_head_is_dealt(world: int) -> None:
    program = subnets(network(), world, images()).program
    conv, fc = program.stages
    assert (conv.role, fc.role) == ("conv", "fc") and not conv.dealt
    assert {name for bucket in conv.averaged for name in bucket} >= {"conv.weight", "bn.weight", "bn.running_mean"}
    assert {name for bucket in fc.averaged for name in bucket} == {"head.6.bias"}


@pytest.mark.parametrize("world", [1, 2, 4])
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


def test_statistics_are_those_of_the_whole_sample_layer_by_layer() -> None:
    torch.manual_seed(1)
    program, sample = subnets(mlp(), 2, torch.randn(B, 8, dtype=F64)), batches(2, 3)

    def run(worker: Any) -> dict[str, Tensor] | None:
        worker.step(*own(worker, sample[0]))
        worker.recompute_statistics([own(worker, batch) for batch in sample])
        state: dict[str, Tensor] | None = worker.state_dict()
        return state

    state = on_workers(program, run, optimizer=sgd)[0]
    assert state is not None
    model = mlp().double()
    model.load_state_dict(state)
    values = torch.cat([x for x, _ in sample])
    model.eval()
    for k, layer in enumerate(model):
        if isinstance(layer, nn.BatchNorm1d):
            torch.testing.assert_close(state[f"{k}.running_mean"], values.mean(0), rtol=0, atol=1e-9)
            torch.testing.assert_close(state[f"{k}.running_var"], values.var(0), rtol=0, atol=1e-9)
        values = layer(values).detach()


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


def test_a_functional_layer_cannot_be_normalised_from_outside() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(F.relu(F.linear(x, m.w)))

    model = made(run, w=nn.Parameter(torch.randn(12, 8)), out=nn.Linear(12, 5))
    with pytest.raises(PlacementError, match=r"insert_norm: .* only outputs of Linear, Embedding, EmbeddingBag can be"):
        subnets(model, 2, torch.randn(B, 8, dtype=F64), "insert_norm=True")


def test_ranks_send_what_the_plan_says_in_a_round() -> None:
    """The first round has nothing fetched ahead; from the second on both trips are as predicted, within 3 %."""
    torch.manual_seed(2)
    world, wide = 4, nn.Sequential(
        nn.Linear(40, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(),
        nn.Linear(256, 5),
    )  # fmt: skip
    program = subnets(wide, world, torch.randn(B, 40, dtype=F64), "local_steps=2")
    data = batches(world, 6, (40,))

    def run(worker: Any) -> float:
        sent = []
        for batch in data:
            worker.step(*own(worker, batch))
            sent.append(worker.rank.sent_bytes)
        return float(sent[5] - sent[3])

    measured = on_workers(program, run, optimizer=sgd)
    lowered = program.program
    (stage,), (part,) = [s for s in lowered.stages if s.dealt], lowered.rank_programs
    verbs = [action for action in part.actions if action.verb in ("deal", "fetch_ahead", "collect")]
    expected = [sum(op.sent for a in verbs for op in dealt_ops(lowered, stage, rank, a)) for rank in range(world)]
    assert measured == pytest.approx(expected, rel=0.1)  # which neurons a rank owns and is dealt differs
    assert sum(measured) == pytest.approx(sum(expected), rel=0.03)


def test_a_model_that_asks_for_its_mode_is_evaluated_as_it_evaluates() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.head(x)
        return h if m.training else 2 * h

    torch.manual_seed(3)
    program, data = subnets(made(run, head=mlp()), 2, torch.randn(B, 8, dtype=F64)), batches(2, 3)

    def run_rank(worker: Any) -> tuple[float, dict[str, Tensor] | None]:
        for batch in data:
            worker.step(*own(worker, batch))
        return float(worker.evaluate(*own(worker, data[0]))), worker.state_dict()

    (loss, state), _ = on_workers(program, run_rank, optimizer=sgd)
    assert state is not None
    model = made(run, head=mlp()).double()
    model.load_state_dict(state)
    assert loss == pytest.approx(float(F.cross_entropy(model.eval()(data[0][0]), data[0][1]).detach()), rel=1e-9)


def test_a_model_that_cannot_be_evaluated_divided_is_refused() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.head(x)
        return h if m.training else h[: int(h.sum().item() > 0) + 1]

    with pytest.raises(PlacementError, match="subnets need the whole model in evaluation mode, divided over ranks: "):
        subnets(made(run, head=mlp()), 2, torch.randn(B, 8, dtype=F64))
