"""A worker trains its rank: together the workers are one process that trains on the concatenated batch."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.errors import LaunchError
from splitc.ir.wire import wire
from splitc.runtime.transport.base import Transport
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.ranks import (
    STRATEGIES,
    Net,
    assert_same,
    batch_of,
    batches_for,
    compile_net,
    decaying,
    on_ranks,
    on_workers,
    one_process,
    part_of,
    plain,
    sgd,
    train,
    worker_of,
)

# -- training ----------------------------------------------------------------------------------------------------------


class Aside(nn.Module):
    """Has a parameter whose gradient is cut off: an optimizer must not even decay it."""

    def __init__(self) -> None:
        super().__init__()
        self.way, self.aside = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x) + self.aside(x).detach()


def test_a_parameter_that_the_loss_does_not_reach_is_not_decayed() -> None:
    model, x, y = Aside(), torch.randn(4, 4), torch.randint(0, 3, (4,))
    program = compiled(model, (x,), y, F.cross_entropy, 2, "data_parallel")
    batches = [(torch.randn(8, 4), torch.randint(0, 3, (8,)))]
    results = on_workers(program, lambda worker: train(worker, batches), optimizer=decaying)
    _, state = one_process(copy.deepcopy(model), batches, decaying)
    assert torch.equal(state["aside.weight"], model.aside.weight)
    assert_same(results[0][1], state)


def test_dropout_is_repeated_with_its_seed_and_differs_between_steps_and_seeds() -> None:
    program = compile_net(Net(norm=False, drop=0.5))
    batch = batch_of(8)

    def losses(seed: int) -> list[float]:
        def run(worker: Worker) -> list[float]:
            for group in worker.optimizer.param_groups if worker.optimizer else []:
                group["lr"] = 0.0  # the masks alone differ
            return train(worker, [batch] * 3)[0]

        return on_workers(program, run, seed=seed)[0]

    first = losses(0)
    assert len(set(first)) == 3
    assert losses(0) == first
    assert not set(losses(1)) & set(first)


def on_the_wire(transport: Transport) -> list[Any]:
    """What `transport` starts from now on: kind, the other ranks, and the shape, of gathers that of the whole."""
    log: list[Any] = []

    def watched(name: str, kind: str, shape: Any) -> None:
        start = getattr(transport, name)

        def issue(*arguments: Any) -> Any:
            tensor, others, *_ = shape(*arguments)
            log.append((kind, others if isinstance(others, tuple) else (others,), tuple(tensor.shape)))
            return start(*arguments)

        setattr(transport, name, issue)

    watched("_isend", "send", lambda tensor, dst, tag: (tensor, dst))
    watched("_irecv", "recv", lambda tensor, src, tag: (tensor, src))
    watched("_all_reduce", "collective", lambda tensor, ranks, maximum: (tensor, ranks))
    return log


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_step_puts_on_the_wire_is_what_the_checker_has_proved_in_that_order(strategy: str) -> None:
    _, program = plain(strategy)
    batch = batch_of(program.plan.global_batch)

    def run(worker: Worker) -> tuple[list[Any], int]:
        log = on_the_wire(worker.rank.transport)
        worker.step(*part_of(worker, batch, program.plan.local_batches))
        return log, worker.rank.sent_bytes

    for rank, (issued, sent) in enumerate(on_workers(program, run)):
        proved = wire(program.program, rank)
        assert issued == [(op.kind, op.ranks, op.shape) for op in proved], f"rank {rank}"
        assert sent == sum(int(op.sent) for op in proved), f"rank {rank}"


# -- the optimizer -----------------------------------------------------------------------------------------------------


def test_the_factory_sees_the_whole_models_parameters_and_a_rank_that_trains_nothing_has_no_optimizer() -> None:
    model, program = plain("single_device")

    def run(worker: Worker) -> bool:
        return worker.optimizer is None

    seen: list[list[str]] = []

    def factory(params: Any) -> torch.optim.Optimizer:
        seen.append([name for name, _ in params])
        return sgd(params)

    assert on_workers(program, run, optimizer=factory) == [False, True]
    assert seen == [[name for name, _ in model.named_parameters()]] * 2


def test_frozen_parameters_are_handed_to_the_factory_but_a_rank_of_frozen_ones_has_no_optimizer() -> None:
    model = Net(norm=False)
    model.features.requires_grad_(False)
    model.head[0].bias.requires_grad_(False)
    program = compile_net(model)
    seen: dict[str, list[str]] = {}

    def run(transport: Transport) -> bool:
        def factory(params: Any) -> torch.optim.Optimizer:
            seen[program.plan.roles_of(transport.rank)[0]] = [name for name, _ in params]
            return decaying([(name, p) for name, p in params if p.requires_grad])

        worker = worker_of(program, transport, factory)
        state = train(worker, batches)[1]
        if state is not None:
            assert_same(state, expected)
        return worker.optimizer is None

    batches = batches_for(program)
    _, expected = one_process(copy.deepcopy(model), batches, decaying)
    assert torch.equal(expected["features.0.weight"], model.get_parameter("features.0.weight"))
    assert on_ranks(3, run) == [True, True, False]
    assert seen == {role: [name for name, _ in model.named_parameters()] for role in ("conv", "fc")}


# -- ranks that were started differently -------------------------------------------------------------------------------


def test_ranks_with_different_settings_are_refused_on_each_of_them() -> None:
    _, program = plain("data_parallel")
    settings: dict[str, tuple[Any, Any]] = {"seed": (0, 7), "accumulate": (1, 2), "clip_norm": (None, 1.0)}

    def run(transport: Transport) -> None:
        for name, (first, second) in settings.items():
            text = rf"the ranks must agree on {name}: rank 0 has {first!r}, rank 1 has {second!r}"
            with pytest.raises(LaunchError, match=text):
                worker_of(program, transport, **{name: (first, second)[transport.rank]})

    on_ranks(2, run)


def test_ranks_of_different_plans_are_refused() -> None:
    programs = [plain("data_parallel")[1], compile_net(Net(norm=False), "data_parallel", 2, batch=6)]

    def run(transport: Transport) -> None:
        with pytest.raises(LaunchError, match="the ranks must agree on the plan: rank 0 has '"):
            worker_of(programs[transport.rank], transport)

    on_ranks(2, run)


# -- wrong batches -----------------------------------------------------------------------------------------------------


WRONG: list[tuple[tuple[Any, ...], str]] = [
    ((), r"rank 0 \(conv\) takes 2 tensors \(images, target\), got 0"),
    (batch_of(3), r"images is \(3, 1, 8, 8\) torch.float32, this step needs \(4, 1, 8, 8\) torch.float32"),
    ((torch.zeros(4, 1, 8, 8).double(), torch.zeros(4).long()), "images is .* torch.float64, this step needs"),
    ((torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int32)), "target is .* torch.int32, this step needs"),
    ((torch.zeros(4, 1, 8, 8), [0, 1, 2, 3]), "the batch holds int; a batch is tensors"),
]


def test_a_batch_that_does_not_fit_is_refused_and_a_right_one_may_follow() -> None:
    _, program = plain()
    batch = batch_of(8)

    def run(worker: Worker) -> float:
        if worker.rank.index == 0:
            for (wrong, text), method in product(WRONG, (worker.step, worker.evaluate)):
                with pytest.raises(LaunchError, match=text):
                    method(*wrong)
        return float(worker.step(*part_of(worker, batch, (4, 4))))

    assert len(set(on_workers(program, run))) == 1


def test_a_rank_that_reads_no_data_refuses_a_batch() -> None:
    _, program = plain()

    def run(worker: Worker) -> None:
        if worker.data_rank is None:
            with pytest.raises(LaunchError, match=r"rank 2 \(fc\) takes 0 tensors \(it reads no data\), got 2"):
                worker.step(*batch_of(4))

    on_workers(program, run)


def test_a_step_that_breaks_off_leaves_a_rank_that_says_so_instead_of_training_on() -> None:
    _, program = plain("single_device")
    bad = torch.zeros(4, 1, 8, 8), torch.full((4,), 99)  # there is no class 99

    def run(worker: Worker) -> None:
        if worker.rank.index == 0:
            before = {name: p.detach().clone() for name, p in worker.stage.named_parameters()}
            with pytest.raises(IndexError):
                worker.step(*bad)
            for method in (worker.step, worker.evaluate):
                with pytest.raises(LaunchError, match="rank 0: its last step broke off in the middle"):
                    method(*batch_of(4))
            assert worker.stage.training
            assert all(torch.equal(p, before[name]) for name, p in worker.stage.named_parameters())

    on_workers(program, run)


def test_sizes_that_leave_a_rank_without_work_are_refused_on_every_rank() -> None:
    _, program = plain("layer_separation(n_c=1, n_f=2)")

    def run(worker: Worker) -> None:
        worker.use_sizes([1])
        with pytest.raises(LaunchError, match="a batch of 1 examples leaves rank 1 without any"):
            worker.step(*part_of(worker, batch_of(1), [1]))

    on_workers(program, run)
