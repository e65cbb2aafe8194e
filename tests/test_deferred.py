"""Compiling on the first batch: rank 0 plans, all get its programs and weights, and errors reach every rank."""

from __future__ import annotations

import copy
import gc
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import splitc
from splitc.compiled import CompiledProgram
from splitc.cost_models.calibration import calibrate as calibration
from splitc.cost_models.calibration.calibrate import Calibration
from splitc.cost_models.clusters import named
from splitc.cost_models.clusters.named import load_cluster
from splitc.deferred import DeferredProgram, DeferredWorker
from splitc.errors import LaunchError
from splitc.ir.fake_mode import few_objects
from splitc.runtime.transport import meeting
from splitc.runtime.transport.base import Transport
from splitc.runtime.weights import first_names
from splitc.runtime.worker import Worker
from tests.support.compiled import CLUSTER
from tests.support.ranks import PINS, SEPARATION, Net, assert_same, batch_of, on_ranks, one_process, sgd


def deferred(
    model: nn.Module,
    world: int = 3,
    strategy: str = SEPARATION,
    loss: Any = F.cross_entropy,
    global_batch: int | None = None,
) -> DeferredProgram:
    pins = PINS if strategy.startswith("layer_separation") else {}
    options: dict[str, Any] = {"strategy": strategy, "cluster": CLUSTER, "pins": pins, "global_batch": global_batch}
    program = splitc.compile(model, world, loss=loss, **options)
    assert isinstance(program, DeferredProgram)
    return program


def on_deferred(
    model: nn.Module, function: Callable[[DeferredWorker], Any], world: int = 3, **options: Any
) -> list[Any]:
    """Call `function` with a deferred worker on every rank, each of which has its own model, as in processes."""

    def run(transport: Transport) -> Any:
        own = copy.deepcopy(model)
        if transport.rank:  # another seed there: rank 0's weights count
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter.zero_()
        program = deferred(own, world, **options)
        make = partial(Worker, keys=first_names(own.state_dict()), optimizer=sgd)
        return function(DeferredWorker(program, transport, make))

    return on_ranks(world, run)


def test_a_program_without_an_example_says_what_it_needs_one_for() -> None:
    program = deferred(Net())
    for name in ("plan", "verify", "report", "save", "rank"):
        with pytest.raises(
            LaunchError, match=rf"program\.{name} needs a compiled program: give compile\(\) an example"
        ):
            getattr(program, name)
    assert not hasattr(program, "no_such_name")


def test_training_by_shard_is_that_of_one_process() -> None:
    model, dataset = Net(norm=False), TensorDataset(*batch_of(20))

    def run(worker: DeferredWorker) -> Any:
        losses = []
        for epoch in (0, 1):
            losses += [float(worker.step(*batch)) for batch in worker.shard(dataset, 4, shuffle=False, epoch=epoch)]
        return losses, worker.state_dict(), worker.data_rank, worker.data_world

    (losses, state, *_), *others = on_deferred(model, run)
    expected = one_process(model, [dataset[k : k + 8] for k in (0, 8)] * 2)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert_same(state, expected[1])
    assert [(rank, readers) for _, _, rank, readers in others] == [(1, 2), (None, 2)]
    assert [got for got, *_ in others] == [losses, losses]


def test_the_first_step_without_shard_takes_a_batch_on_every_rank_and_uses_the_readers() -> None:
    model = Net(norm=False)
    images, labels = batch_of(12)

    def run(worker: DeferredWorker) -> Any:
        rank = worker._transport.rank
        losses = [float(worker.step(images[4 * rank : 4 * rank + 4], labels[4 * rank : 4 * rank + 4]))]
        own = () if worker.data_rank is None else (images[4 * rank : 4 * rank + 4], labels[4 * rank : 4 * rank + 4])
        return [*losses, float(worker.step(*own))], worker.state_dict()

    (losses, state), *_ = on_deferred(model, run)
    expected = one_process(model, [(images[:8], labels[:8])] * 2)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert_same(state, expected[1])


def test_a_loss_of_the_output_alone_takes_batches_without_a_target() -> None:
    model, dataset = Net(norm=False), TensorDataset(batch_of(20)[0])

    def energy(scores: Tensor) -> Tensor:
        return scores.logsumexp(1).mean()

    def run(worker: DeferredWorker) -> Any:
        return [float(worker.step(*batch)) for batch in worker.shard(dataset, 4, shuffle=False)]

    losses, *_ = on_deferred(model, run, loss=energy, strategy="data_parallel")
    assert losses[0] == pytest.approx(float(energy(model(dataset[:12][0])).detach()), rel=1e-5)


def test_before_the_first_batch_everything_else_says_that_it_is_not_compiled() -> None:
    def run(worker: DeferredWorker) -> None:
        for name in ("data_rank", "data_world", "optimizer", "state_dict", "load_state_dict", "evaluate"):
            with pytest.raises(LaunchError, match="the program is not compiled yet"):
                getattr(worker, name)
        assert not hasattr(worker, "_anything")

    on_deferred(Net(), run)


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (TensorDataset(torch.randn(8, 2, 8, 8), torch.zeros(8).long()), "expected input"),  # one channel too many
        (TensorDataset(torch.randn(8, 1, 8, 8)), "the first batch must be inputs and a target"),
        (TensorDataset(torch.zeros(0, 1, 8, 8), torch.zeros(0).long()), "the dataset is empty"),
    ],
)
def test_an_error_of_rank_0s_compiling_is_raised_on_every_rank(dataset: Any, reason: str) -> None:
    def run(worker: DeferredWorker) -> str:
        with pytest.raises(Exception, match=reason) as caught:
            worker.shard(dataset, 4)
        return type(caught.value).__name__ + str(caught.value)

    own, first, second = on_deferred(Net(), run)
    assert "could not compile" not in own  # rank 0 raises the error itself
    assert first == second
    kind = "LaunchError" if "empty" in reason else "CaptureError"
    assert first.startswith(f"{kind}rank 0 could not compile the program: {kind}: ")


@pytest.mark.slow
@pytest.mark.parametrize(("global_batch", "steps"), [(None, 2), (6, 3)])
def test_training_by_a_data_loader_has_its_batch_or_the_global_batch_that_was_asked_for(
    global_batch: int | None, steps: int
) -> None:
    dataset = TensorDataset(*batch_of(18))

    def run(worker: DeferredWorker) -> Any:
        loader = worker.loader(DataLoader(dataset, batch_size=4, drop_last=True))
        assert worker.loader(dataset, batch_size=1, drop_last=True).dropped == 0
        return [float(worker.step(*batch)) for batch in loader], len(loader)

    (losses, length), *others = on_deferred(Net(norm=False), run, global_batch=global_batch)
    assert len(losses) == length == steps
    assert all(other == (losses, length) for other in others)


def test_a_loader_without_a_batch_size_is_refused_before_there_is_a_program() -> None:
    def run(worker: DeferredWorker) -> None:
        with pytest.raises(LaunchError, match="the program compiles on the first batch; give batch_size="):
            worker.loader(TensorDataset(*batch_of(8)))

    on_deferred(Net(), run)


@pytest.mark.parametrize("as_arguments", [False, True])
def test_the_first_step_compiles_on_a_batch_by_name(as_arguments: bool) -> None:
    def run(worker: DeferredWorker) -> list[float]:
        batch = {name: getattr(dataset, name)[:4] for name in ("labels", "mask", "ids")}
        step = partial(worker.step, **batch) if as_arguments else partial(worker.step, batch)
        return [float(step()) for _ in range(2)]

    dataset = Dicts(paired=False)
    first, second = on_deferred(Named(), run, world=2, strategy="data_parallel", loss=None)
    assert first == second
    assert first[1] < first[0]


class Named(nn.Module):
    """Its inputs are of one shape and dtype: an order taken from elsewhere would go unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Tensor:
        scores: Tensor = self.head((self.embed(ids) * mask[..., None]).sum(1))
        return scores if labels is None else F.cross_entropy(scores, labels[:, 0])


class Dicts(Dataset[Any]):
    """Examples whose names come in another order than the model's; with or without the target inside."""

    def __init__(self, paired: bool) -> None:
        self.ids, self.mask, self.labels = (torch.randint(0, high, (8, 3)) for high in (10, 2, 10))
        self.paired = paired

    def __len__(self) -> int:
        return 8

    def __getitem__(self, k: int) -> Any:
        if self.paired:
            return {"mask": self.mask[k], "ids": self.ids[k]}, self.labels[k, 0]
        return {"labels": self.labels[k], "mask": self.mask[k], "ids": self.ids[k]}


@pytest.mark.parametrize("paired", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_dataset_of_dicts_goes_by_names_on_the_first_batch_and_later(paired: bool) -> None:
    model, dataset = Named(), Dicts(paired)

    def run(worker: DeferredWorker) -> Any:
        losses = [float(worker.step(*batch)) for batch in worker.shard(dataset, 2, shuffle=False)]
        return losses, worker.state_dict()

    loss = F.cross_entropy if paired else None
    (losses, state), _ = on_deferred(model, run, world=2, strategy="data_parallel", loss=loss)
    alone = copy.deepcopy(model)
    optimizer, expected = sgd(alone.named_parameters()), []
    for k in (0, 4):
        optimizer.zero_grad()
        value = alone(dataset.ids[k : k + 4], dataset.mask[k : k + 4], dataset.labels[k : k + 4])
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_same(state, alone.state_dict())


def test_only_rank_0_reads_data_to_compile() -> None:
    class Watching(TensorDataset):
        def __getitem__(self, k: Any) -> Any:
            read.append(k)
            return super().__getitem__(k)  # type: ignore[no-untyped-call]

    read: list[Any] = []
    dataset = Watching(*batch_of(8))
    on_deferred(Net(norm=False), lambda worker: worker.shard(dataset, 4))
    assert sorted(read) == [0, 1, 2, 3]


def test_on_several_hosts_the_network_is_measured_and_the_plan_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two hosts of two ranks: what is planned on is what was measured among them, and never this machine."""
    places = threading.local()
    monkeypatch.setattr(calibration, "host", lambda: places.name)
    monkeypatch.setattr(named, "measure_this_machine", lambda: pytest.fail("loopback is no network"))

    def calibrate(transport: Transport, budget: float, name: str) -> Calibration:
        assert all(transport.all_gather_objects(budget < 10))
        return Calibration(replace(load_cluster(CLUSTER), name=name), ())

    monkeypatch.setattr(calibration, "calibrate", calibrate)

    def run(of: list[str], transport: Transport) -> Any:
        places.name = of[transport.rank]
        model = Net()
        program = splitc.compile(model, transport.world, loss=F.cross_entropy, strategy="data_parallel")
        assert isinstance(program, DeferredProgram)
        make = partial(Worker, keys=first_names(model.state_dict()), optimizer=sgd)
        return DeferredWorker(program, transport, make).loader(TensorDataset(*batch_of(32)), batch_size=4)

    on_ranks(4, partial(run, ["a", "a", "b", "b"]))
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(
        "splitc: measuring 2 hosts and the network between them for about 8 s; to leave it out, give"
    )
    assert re.fullmatch(
        r"splitc: data_parallel on 4 ranks \(all x 4\), plan \w+, .* a step predicted on these-hosts", second
    )
    for of in (["a", "b", "b", "b"], ["a", "b", "a", "b"]):
        with pytest.raises(LaunchError, match=r"unequal hosts do not show \(\d on a, \d on b\); give cluster="):
            on_ranks(4, partial(run, of))


def test_one_process_of_several_hosts_asks_for_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "_meetings", lambda world: [])
    deferred = splitc.compile(Net(), 2, loss=F.cross_entropy)
    assert isinstance(deferred, DeferredProgram)
    given = (Net(), 2, *batch_of(4), F.cross_entropy)
    with pytest.raises(LaunchError, match="one process cannot measure it; give cluster="):
        splitc.compile(*given)
    with pytest.raises(LaunchError, match="one process cannot measure it; give cluster="):
        deferred.compile(batch_of(4))
    described = splitc.compile(*given, cluster=CLUSTER, strategy="data_parallel")
    assert isinstance(described, CompiledProgram) and described.plan.world == 2


@pytest.mark.slow
def test_what_was_made_before_compiling_is_not_walked_meanwhile_and_collection_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: Any = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", counted.__wrapped__)
    gc.unfreeze()
    often = gc.get_threshold()
    with few_objects():
        assert not gc.get_freeze_count() and gc.get_threshold() == often  # garbage is looked for seldom already
    gc.set_threshold(700, *often[1:])
    assert gc.isenabled() and not gc.get_freeze_count()
    with pytest.raises(LaunchError), few_objects():
        frozen = gc.get_freeze_count()
        with few_objects():
            pass
        assert gc.isenabled() and gc.get_freeze_count() > 0.99 * frozen > 100_000  # what is released leaves the count
        raise LaunchError("what compiling raises")
    assert gc.isenabled() and not gc.get_freeze_count() and gc.get_threshold() == (700, *often[1:])
    gc.disable()
    try:
        with few_objects():
            assert not gc.isenabled() and not gc.get_freeze_count()
        assert not gc.isenabled()
    finally:
        gc.set_threshold(*often)
        gc.enable()
        gc.freeze()
