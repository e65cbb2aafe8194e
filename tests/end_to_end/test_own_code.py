"""Models with regions train as in one process, under every strategy, in memory and from files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from splitc.ir.program import Program
from splitc.runtime.worker import Worker
from tests.support import untraceable
from tests.support.compiled import CLUSTER, analyse, compiled
from tests.support.ranks import assert_same, on_workers, one_process, part_of, sgd, train
from tests.support.sampling import along, sampled
from tests.support.untraceable import CLASSES, FEATURES, Perceptron


@cache
def known(name: str) -> tuple[nn.Module, Any, Program]:
    """A model of MODELS, its example, and what is known of it."""
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(4, 3, 8, 8) if name == "custom function" else torch.randn(4, FEATURES)
    return model, x, analyse(model, x, torch.arange(4) % CLASSES, F.cross_entropy)


def program_of(model: Any, strategy: str = "data_parallel", loss: Any = F.cross_entropy) -> CompiledProgram:
    images = isinstance(model, untraceable.BinaryNet)
    x = torch.randn(4, 3, 8, 8) if images else torch.randn(4, FEATURES)
    program = splitc.compile(model, 3, x, torch.arange(4) % CLASSES, loss, cluster=CLUSTER, strategy=strategy)
    assert isinstance(program, CompiledProgram)
    return program


MODELS: dict[str, Callable[[], nn.Module]] = {
    "custom function": untraceable.BinaryNet,
    "two of a class": lambda: Perceptron(untraceable.Gated(), untraceable.Gated()),
    "loop over rows": lambda: Perceptron(untraceable.Rows()),
    "containers": lambda: Perceptron(untraceable.Outputs()),
    "dataclass": lambda: Perceptron(untraceable.Wrapped()),
    "script": lambda: Perceptron(untraceable.Scripted()),
    "vmap": lambda: Perceptron(untraceable.Vectorised()),
    "BatchNorm": lambda: Perceptron(untraceable.Normed()),
    "left out by chance": lambda: nn.Sequential(nn.Dropout(0.2), Perceptron(untraceable.Dropped()), nn.Dropout(0.1)),
    "noise and dropout": lambda: nn.Sequential(Perceptron(untraceable.Noisy()), nn.Dropout(0.1)),
    "sequence first": lambda: Perceptron(untraceable.SequenceFirst()),
    "frozen norm": lambda: Perceptron(untraceable.Frozen()),
    "counter": lambda: Perceptron(untraceable.Counted(), nn.Linear(FEATURES, FEATURES)),
    "called again": untraceable.Calling,
    "called with several shapes": untraceable.Shared,
    "backward hook": untraceable.hooked,
    "tied across the border": untraceable.Tied,
    "experts without examples": lambda: Perceptron(untraceable.Experts()),
    "gradient in forward": lambda: Perceptron(untraceable.Force()),
}


STRATEGIES = ["data_parallel", "layer_separation", "modulo_shard"]
CELLS = [(name, STRATEGIES[k % 3]) for k, name in enumerate(MODELS)]


@pytest.mark.slow
@sampled(("name", "strategy"), CELLS, one_in=17)
def test_a_model_with_regions_trains_as_in_one_process(name: str, strategy: str) -> None:
    model, x, program = known(name)
    target = torch.arange(4) % CLASSES
    done = compiled(model, x, target, F.cross_entropy, 3, strategy, analysed=program)
    assert done.verify(steps=2, dtype=torch.float64).holds


@pytest.mark.slow
def test_one_example_on_a_rank_is_left_out_by_chance_as_in_one_process() -> None:
    model, _, program = known("sequence first")
    done = compiled(
        model,
        torch.randn(1, FEATURES),
        torch.arange(1),
        F.cross_entropy,
        3,
        "data_parallel",
        global_batch=3,
        analysed=program,
    )
    assert done.plan.local_batches == (1, 1, 1)
    assert done.verify(steps=6, dtype=torch.float64).holds


@pytest.mark.slow
@along(1, strategy=["data_parallel", "layer_separation"], loss=[untraceable.finite_loss, untraceable.FiniteLoss()])
def test_a_loss_that_is_a_region_trains_as_in_one_process(loss: Any, strategy: str) -> None:
    assert program_of(Perceptron(), strategy, loss).verify(steps=2, dtype=torch.float64).holds


@pytest.mark.slow
@sampled("name", ["gradient in forward", "BatchNorm", "containers", "left out by chance"], one_in=4)
def test_evaluation_is_that_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    program = program_of(model)
    x, y = torch.randn(12, FEATURES), torch.arange(12) % CLASSES

    def evaluated(worker: Worker) -> float:
        train(worker, [(x, y)])
        return float(worker.evaluate(*part_of(worker, (x, y), program.plan.local_batches)))

    def state(worker: Worker) -> Any:
        return train(worker, [(x, y)])[1]

    trained = copy.deepcopy(model).eval()
    trained.load_state_dict(next(found for found in on_workers(program, state) if found is not None))
    expected = F.cross_entropy(trained(x), y).detach()
    torch.testing.assert_close(torch.tensor(on_workers(program, evaluated)), expected.expand(3))


@pytest.mark.slow
def test_the_report_names_regions_with_their_share_and_the_line() -> None:
    text = " ".join(program_of(MODELS["two of a class"]()).report().split())
    shares = "with 57.7% of the parameters and 63.2% of the FLOPs"
    assert f"The user's own code, since it cannot be traced: middle.0, middle.1, {shares}" in text
    assert "untraceable.py:" in text


@pytest.mark.slow
@sampled("strategy", ["data_parallel", "parameter_server"], one_in=2)
def test_a_model_that_is_one_region_trains_as_in_one_process(strategy: str) -> None:
    torch.manual_seed(0)
    assert program_of(untraceable.Whole(), strategy).verify(steps=2, dtype=torch.float64).holds


class ThreeNames(torch.nn.Module):
    """One region, since its forward branches on the whole batch; its embedding has three names."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = torch.nn.Module(), torch.nn.Linear(8, 3)
        self.model.shared = torch.nn.Embedding(20, 8)
        for name in ("encoder", "decoder"):
            setattr(self.model, name, torch.nn.ModuleDict({"tokens": self.model.shared, "fc": torch.nn.Linear(8, 8)}))

    def forward(self, ids: Tensor) -> Tensor:
        if len(torch.unique_consecutive(ids.eq(2).sum(1))) > 1:
            raise ValueError("all examples must have the same number of ends")
        parts: Any = (self.model.encoder, self.model.decoder)
        scores: Tensor = self.head(sum(part["fc"](part["tokens"](ids)).relu() for part in parts)[ids.eq(2)])
        return scores


@pytest.mark.slow
def test_a_model_that_is_one_region_may_have_three_names_for_a_tensor() -> None:
    torch.manual_seed(0)
    model, batches = ThreeNames(), list[tuple[Tensor, Tensor]]()
    for _ in range(3):
        ids = torch.randint(3, 20, (8, 5))
        ids[:, -1] = 2
        batches.append((ids, torch.randint(3, (8,))))
    program = compiled(model, batches[0][0][:4], batches[0][1][:4], F.cross_entropy, 2, "data_parallel")
    losses, state = on_workers(program, lambda worker: train(worker, batches))[0]
    expected, own = one_process(copy.deepcopy(model), batches)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_same(state, own)


@pytest.mark.slow
def test_a_model_of_a_notebook_is_not_saved_and_the_reason_is_named(tmp_path: Path) -> None:
    program = program_of(lambda: Perceptron(untraceable.Gated()))
    with pytest.raises(
        LaunchError, match=r"save\(\) needs the user's own code .*\n.*middle.0: untraceable.py:\d+: item"
    ):
        program.save(tmp_path / "build")
    assert not (tmp_path / "build").exists()


@pytest.mark.slow
def test_a_build_says_whose_code_it_runs() -> None:
    text = next(text for text in program_of(untraceable.gated).files.values() if "class Stage" in text)
    assert 'def __init__(self, model="tests.support.untraceable:gated"):' in text
    assert "own code middle.0, since untraceable.py:" in text


@pytest.mark.slow
@pytest.mark.processes
def test_a_saved_build_imports_the_users_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    torch.manual_seed(0)
    assert program_of(untraceable.gated, "layer_separation").verify(steps=2, processes=True, dtype=torch.float64).holds


class Deciding(torch.nn.Module):
    """Branches on a number of the whole batch, which few batches fall on both sides of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3 if float(x.mean()) > self.above else x

    above = 0.3


@pytest.mark.slow
@sampled("strategy", ["hybrid_single", "layer_separation"], one_in=2)
def test_a_branch_on_the_whole_batch_is_that_of_one_process(strategy: str) -> None:
    torch.manual_seed(0)
    model = Perceptron(Deciding())
    program = program_of(model, strategy)
    assert program.verify(steps=2, dtype=torch.float64).holds
    assert "test_own_code.py:" in program.report() and "computed from several examples" in " ".join(
        program.report().split()
    )


@pytest.mark.slow
def test_the_report_says_that_a_model_of_one_part_with_its_loss_gains_nothing() -> None:
    class Masked(Perceptron):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            out = super().forward(x)
            return F.cross_entropy(out[y > 0], y[y > 0])

    program = splitc.compile(
        Masked(), 2, (torch.randn(4, FEATURES), torch.arange(4) % CLASSES), cluster=CLUSTER, strategy="data_parallel"
    )
    assert "several ranks gain nothing over one" in " ".join(program.report().split())


class Merged(untraceable.Noisy):
    """Draws for rows of which an example has two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = super().forward(x)
        return F.dropout(rows.unflatten(1, (2, -1)).flatten(0, 1), 0.1, self.training).view_as(rows)


@pytest.mark.slow
def test_the_report_says_how_draws_of_several_rows_for_an_example_are_taken() -> None:
    said = "take the rows of an example to lie together"
    assert said in " ".join(program_of(Perceptron(Merged())).report().split())
    assert said not in " ".join(program_of(Perceptron(untraceable.Noisy())).report().split())


class Chosen(nn.Module):
    """A layer for the examples that begin with a number above 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.inner(row) if float(row.detach()[0]) > 0 else row * 0.5 for row in x])


@pytest.mark.slow
@sampled(
    "strategy", ["data_parallel", "late_multiply", "hybrid_single", "modulo_shard(mp=2)", "parameter_server"], one_in=2
)
def test_a_layer_that_examples_of_some_ranks_or_of_none_reach_trains_as_in_one_process(strategy: str) -> None:
    first = nn.Linear(FEATURES, FEATURES)
    nn.init.eye_(first.weight)
    model = nn.Sequential(first, Chosen(), nn.Linear(FEATURES, CLASSES)).double()
    x, y = torch.randn(4, FEATURES, dtype=torch.float64), torch.arange(4) % CLASSES
    program = compiled(copy.deepcopy(model), x, y, F.cross_entropy, 2, strategy)
    sizes = program.plan.local_batches
    one, total = sizes[0], sum(sizes)
    chosen = [[1] * total, [1] * one + [0] * (total - one), [0] * total, [0] * (total - 1) + [1], [0] * total]
    batches = []
    for each in map(torch.tensor, chosen):
        x = torch.randn(total, FEATURES, dtype=torch.float64)
        x[:, 0] = x[:, 0].abs() * (2 * each - 1)
        batches.append((x, torch.arange(total) % CLASSES))

    def run(worker: Worker) -> Any:
        losses = [float(worker.step(*part_of(worker, batch, sizes))) for batch in batches]
        return losses, worker.state_dict()

    ranks = on_workers(program, run)
    losses, optimizer = [], sgd(model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for own, _ in ranks:
        assert own == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(ranks[0][1], dict(model.state_dict()), rtol=1e-12, atol=1e-12)


class Either(nn.Module):
    """One of two layers for each example, by its first number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.a(row) if float(row.detach()[0]) > 0 else self.b(row) for row in x])


@pytest.mark.slow
def test_gradients_that_some_ranks_do_not_reach_wait_for_the_collectives_of_backward() -> None:
    """Their buckets, one for each layer, are full at other times on other ranks; the norm below is synchronised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 120), nn.BatchNorm1d(120), Either(120), nn.Linear(120, CLASSES)).double()
    batches = [(torch.randn(4, FEATURES, dtype=torch.float64), torch.arange(4) % CLASSES) for _ in range(4)]
    x, y = (tensor[:2] for tensor in batches[0])
    program = compiled(copy.deepcopy(model), x, y, F.cross_entropy, 2, "data_parallel(sync_batchnorm=True)")
    assert len(program.program.stages[0].buckets) == 3
    (found, state), _ = on_workers(program, lambda worker: train(worker, batches))
    losses, expected = one_process(model, batches)
    assert found == pytest.approx(losses, rel=1e-9)
    assert_same(state, expected, 1e-9)
