"""Ranks that hold the same tensor compare it: what differs is named with its rank, and nothing else alarms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from splitc.errors import LaunchError, ReplicaError
from splitc.ir.placements import Placement
from splitc.runtime.replicas import fingerprint
from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_resume import batches_of, steps
from tests.runtime.rounds.test_resume import STRATEGIES as ROUNDS
from tests.runtime.rounds.test_resume import batch
from tests.runtime.rounds.test_resume import planned as in_rounds
from tests.support.every_strategy import Asked, everywhere, planned
from tests.support.ranks import adam, on_workers
from tests.support.sampling import along

Damage = Callable[[Worker], Any]


@pytest.mark.parametrize(("world", "asked"), everywhere(3, one_in=12)[::2] + everywhere(slow=(4,))[1::4])
def test_no_strategy_alarms_while_replicas_are_alike(world: int, asked: Asked) -> None:
    """Also where statistics of normalisations are of each rank's examples."""
    program = planned(world, asked, norm=True)
    batches = batches_of(program, 3)

    def run(worker: Worker) -> None:
        steps(worker, batches)
        worker.evaluate(*(batch[:4] for batch in batches[0]) if worker.data_rank is not None else ())
        steps(worker, batches)

    on_workers(program, run, optimizer=adam, check_replicas=1)


@pytest.mark.slow
@along(1, strategy=[*reversed(ROUNDS)], every=[1, 3])
def test_rounds_do_not_alarm(strategy: str, every: int) -> None:
    program = in_rounds(strategy)
    batches = [batch(program.plan.global_batch) for _ in range(5)]

    def run(worker: Worker) -> None:
        steps(worker, batches)
        worker.state_dict()  # ends a round

    on_workers(program, run, optimizer=adam, check_replicas=every)


def weight(name: str) -> Damage:
    """The last bit of one number."""

    def damage(worker: Worker) -> None:
        value = worker.stage.get_parameter(name).data.reshape(-1)[-1:].view(torch.int32)
        value ^= 1

    return damage


def momentum(name: str) -> Damage:
    def damage(worker: Worker) -> None:
        assert worker.optimizer is not None
        worker.optimizer.state[worker.stage.get_parameter(name)]["momentum_buffer"].add_(1e-3)

    return damage


def statistics(worker: Worker) -> None:
    worker.stage.get_buffer("norm.running_var").add_(1e-3)


SHARDED = {"fc*": Placement(holding="sharded", group=2, split="columns")}


@pytest.mark.parametrize(
    ("world", "strategy", "rank", "damage", "what", "others"),
    [
        (3, "data_parallel", 2, weight("fc7.weight"), "fc7.weight", "0, 1"),
        (3, "data_parallel", 0, momentum("conv.bias"), "the optimizer's state of conv.bias", "1, 2"),
        (2, "late_multiply", 1, weight("fc6.weight"), "fc6.weight", "0"),
        (3, "layer_separation(n_c=2,n_f=1)", 1, weight("conv.weight"), "conv.weight", "0"),
        (4, "modulo_shard(mp=2)", 3, weight("fc6.weight"), "fc6.weight", "1"),
        (2, "data_parallel(sync_batchnorm=True)", 1, statistics, "norm.running_var", "0"),
    ],
)
def test_a_damaged_replica_is_named_on_every_rank(
    world: int, strategy: str, rank: int, damage: Damage, what: str, others: str
) -> None:
    pins = SHARDED if "modulo" in strategy else {}
    program = planned(world, strategy, norm=True, pins=pins)
    batches = batches_of(program, 4)

    def run(worker: Worker) -> str:
        steps(worker, batches[:1])
        if worker.rank.index == rank:
            damage(worker)
        steps(worker, batches[1:2])  # not yet compared
        with pytest.raises(ReplicaError) as error:
            steps(worker, batches[2:])
        return str(error.value)

    told = on_workers(program, run, optimizer=lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9), check_replicas=3)
    assert told[0].startswith(f"step 3: {what} has other values on rank {rank} than on rank {others}")
    assert len(set(told)) == 1


def test_units_of_rounds_are_compared_when_their_round_has_ended() -> None:
    program = planned(2, "local_sgd(period=2)", norm=True)
    batches = batches_of(program, 4)

    def run(worker: Worker) -> str:
        steps(worker, batches[:3])  # of which the check after the third waits for the round's end
        names = dict(worker.stage.named_parameters())
        frozen = names["fc8.bias"].requires_grad_(False)
        if worker.rank.index:
            after, end = worker._features[0], worker._features[0].end
            after.end = lambda *given: (end(*given), frozen.data.add_(1.0))  # type: ignore[assignment]
        with pytest.raises(ReplicaError, match=r"step 4: fc8\.bias has other values on rank 1 than on rank 0\. "):
            steps(worker, batches[3:])
        return ""

    on_workers(program, run, check_replicas=3)


def test_a_fingerprint_changes_with_every_bit_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.replicas._PART", 16)

    def of(*tensors: Tensor) -> int:
        return int(fingerprint(tensors, torch.device("cpu")))

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool):
        tensor = (torch.arange(50).reshape(5, 10) % 7).to(dtype)
        others = tensor.flip(0), tensor.flip(1), tensor.roll(16)
        assert of(tensor) not in [of(tensor, tensor), *map(of, others)]
        for k in range(0, 50 * tensor.element_size(), 3):
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[k] ^= 1
            assert of(changed) != of(tensor)
        assert of(tensor.t().contiguous().t()) == of(tensor)
    assert of(torch.empty(0)) == of() == 0 == of(torch.zeros(()))
    assert 0 <= of(torch.full((100,), -1, dtype=torch.int64)) < 2**62


def test_a_fingerprint_is_made_on_its_device_without_a_read() -> None:
    with FakeTensorMode():  # where a read raises
        on_gpu = [torch.empty(shape, device="meta") for shape in [(3 << 20,), (5, 4), ()]]
        assert fingerprint([*on_gpu, torch.empty(())], on_gpu[0].device).device.type == "meta"
        with pytest.raises(DataDependentOutputException):
            bool(fingerprint(on_gpu, on_gpu[0].device))


@pytest.mark.parametrize("every", [0, True, 1.5])
def test_a_number_of_steps_is_asked_for(every: Any) -> None:
    with pytest.raises(LaunchError, match=f"check_replicas={every}: give a whole number of steps"):
        on_workers(planned(2, "data_parallel", norm=True), lambda worker: None, check_replicas=every)


def test_the_host_reads_once_however_many_tensors_there_are() -> None:
    reads: Any = []

    def run(worker: Worker) -> None:
        transport: Any = worker.rank.transport
        decided, reduced = transport.decided, transport.all_reduce
        calls: Any = []
        transport.decided = lambda numbers: (reads.append(len(numbers)), decided(numbers))[1]
        replicas: Any = worker._replicas
        transport.all_reduce = lambda tensor, *to, **how: (calls.append(tensor), reduced(tensor, *to, **how))[1]
        replicas.after(1)
        assert len(calls) == 2  # for the one group of ranks, and whether any differs

    on_workers(planned(2, "data_parallel", norm=True), run, check_replicas=1)
    assert reads == [1, 1]
