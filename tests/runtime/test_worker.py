"""A worker trains its rank: together the workers are one process that trains on the concatenated batch."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.errors import LaunchError
from splitc.ir.wire import wire
from splitc.ir.wire_op import WireOp
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
from tests.support.sampling import sampled

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


@pytest.mark.slow
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
    """What `transport` starts from now on: kind, the other ranks, and the bytes, of all members where they differ."""
    log: list[Any] = []

    def watched(name: str, kind: str, given: Callable[..., tuple[Any, int]]) -> None:
        start = getattr(transport, name)

        def issue(*arguments: Any) -> Any:
            others, nbytes = given(*arguments)
            log.append((kind, others if isinstance(others, tuple) else (others,), nbytes))
            return start(*arguments)

        setattr(transport, name, issue)

    watched("_isend", "send", lambda tensor, dst, tag: (dst, tensor.nbytes))
    watched("_irecv", "recv", lambda tensor, src, tag: (src, tensor.nbytes))
    watched("_all_reduce", "all_reduce", lambda tensor, ranks, *_: (ranks, tensor.nbytes))
    watched("_broadcast", "broadcast", lambda tensor, src, ranks: (ranks, tensor.nbytes))
    watched("_all_gather", "all_gather", lambda outputs, tensor, ranks: (ranks, _nbytes(outputs)))
    watched("_reduce_scatter", "reduce_scatter", lambda output, pieces, ranks: (ranks, _nbytes(pieces)))
    transport._exchange = _exchanged(transport, log)  # type: ignore[method-assign]
    return log


def _exchanged(transport: Transport, log: list[Any]) -> Any:
    """Messages of an exchange are parts of it, and not logged themselves."""
    start = transport._exchange

    def issue(sends: Any, receives: Any, ranks: Any, tag: int) -> Any:
        place = len(log)
        work = start(sends, receives, ranks, tag)
        log[place:] = [("all_to_all", ranks, _nbytes(tensor for tensor, _ in sends))]
        return work

    return issue


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def said(op: WireOp) -> tuple[str, tuple[int, ...], int]:
    """What the wire says of an operation, as `on_the_wire` notes it."""
    if op.kind != "collective":
        return op.kind, op.ranks, op.nbytes
    return str(op.algorithm), op.ranks, int(op.sent) if op.algorithm == "all_to_all" else op.nbytes


def order_of(issued: list[Any], proved: Sequence[WireOp]) -> list[WireOp]:
    """The wire in the order in which it was issued: its own, but for buckets within a backward.

    These keep their order, and so do the others.
    """
    left, order = list(proved), []
    for each in issued:
        assert left, f"{each} was issued, and nothing is left"
        own = list(next(groupby(left, lambda op: op.within or op))[1])
        firsts = [own[0], *[op for op in own if op.payload.bucket is not None][:1]]
        found = next((op for op in firsts if said(op) == each), None)
        assert found is not None, f"{each} was issued where the wire has {' or '.join(map(str, firsts))}"
        left.remove(found)
        order.append(found)
    assert not left, f"never issued: {' '.join(map(str, left))}"
    return order


class Deep(nn.Module):
    """Two layers with a BatchNorm each, whose gradients fill a bucket each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 180), nn.Linear(180, 180), nn.Linear(180, 10)
        self.norm_a, self.norm_b = nn.BatchNorm1d(180), nn.BatchNorm1d(180)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm_a(self.a(x.flatten(1))))
        scores: Tensor = self.c(F.relu(self.norm_b(self.b(x))))
        return scores


DEEP = {
    "data_parallel(sync_batchnorm=True)": 3,
    "layer_separation(n_c=2, n_f=1, sync_batchnorm=True)": 3,
    "modulo_shard(mp=2,scheme=BK,sync_batchnorm=True)": 4,
    "late_multiply(sync_batchnorm=True)": 3,
    "modulo_shard(mp=2,scheme=BK)": 4,
    "parameter_server(sync_batchnorm=True)": 3,
}
"""Strategy -> ranks, for `Deep`."""

EARLY = list(DEEP)[:2]
"""Those in which a bucket begins before the last of what its backward communicates."""


@cache
def deep() -> nn.Module:
    torch.manual_seed(1)
    return Deep()


@sampled("strategy", [*STRATEGIES, *DEEP], ["auto", *list(DEEP)[:2]])
def test_what_a_step_puts_on_the_wire_is_what_the_checker_has_proved_in_that_order(strategy: str) -> None:
    """Where buckets begin within a backward they do so at the same place on all ranks of a role."""
    if strategy in DEEP:
        pins = {"a": "conv", "norm_a": "conv", "b": "conv", "norm_b": "conv", "c": "fc"}
        options: dict[str, Any] = {"pins": pins} if "separation" in strategy else {}
        program = compiled(deep(), *batch_of(4), F.cross_entropy, DEEP[strategy], strategy, **options)
    else:
        _, program = plain(strategy)
    batch = batch_of(program.plan.global_batch)

    def run(worker: Worker) -> tuple[list[Any], int]:
        log = on_the_wire(worker.rank.transport)
        worker.step(*part_of(worker, batch, program.plan.local_batches))
        return log, worker.rank.sent_bytes

    orders: dict[Any, set[tuple[str, ...]]] = defaultdict(set)
    early = False  # whether a bucket began before another operation of its backward
    for rank, (issued, sent) in enumerate(on_workers(program, run)):
        proved = wire(program.program, rank)
        order = order_of(issued, proved)
        assert sent == sum(int(op.sent) for op in proved), f"rank {rank}"
        early = early or order != list(proved)
        for within in {op.within for op in proved if op.within}:
            orders[within].add(tuple(str(op.payload) for op in order if op.within == within))
    assert all(len(own) == 1 for own in orders.values()), orders
    assert early == (strategy in EARLY)


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    ((torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int32)), "target is .* torch.int32, .* torch.int64; give it"),
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
