"""Ranks for tests: made by hand from bounds, or of a compiled program, on threads; and what one process does.

Whatever a rank sends or sums here must stay as it is until its work is waited for: real transports read it meanwhile,
though simulated ones would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.ir.plan import Plan
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.rank import Rank
from splitc.runtime.role_comm import RoleComm
from splitc.runtime.spec import RankSpec, RoleSpec, Route, StepContext
from splitc.runtime.transport.base import Transport, Work
from splitc.runtime.transport.simulated import run_ranks
from splitc.runtime.weights import first_names
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled

Result = TypeVar("Result")


def on_ranks(world: int, function: Callable[[Transport], Result]) -> list[Result]:
    """`run_ranks` with transports that notice a tensor that changes while it is on its way."""

    def careful(transport: Transport) -> Result:
        watch(transport)
        return function(transport)

    return run_ranks(world, careful)


def watch(transport: Transport) -> None:
    """Let the works of sends, sums and gathers fail when what this rank gives to them has changed meanwhile."""
    given: dict[str, Callable[..., Sequence[Tensor]]] = {
        "_isend": lambda tensor, *_: [tensor],
        "_all_reduce": lambda tensor, *_: [tensor],
        "_all_gather": lambda outputs, tensor, *_: [tensor],
        "_reduce_scatter": lambda output, pieces, *_: pieces,
    }
    for name, tensors in given.items():
        start = getattr(transport, name)

        def started(*arguments: Any, start: Any = start, tensors: Any = tensors) -> Watched:
            return Watched(tuple(tensors(*arguments)), start(*arguments))

        setattr(transport, name, started)


@dataclass
class Watched:
    """The work of an operation to which this rank gives `tensors`."""

    tensors: tuple[Tensor, ...]
    work: Work
    waited: bool = False

    def __post_init__(self) -> None:
        self.versions = [tensor._version for tensor in self.tensors]

    def wait(self) -> None:
        now = [tensor._version for tensor in self.tensors]
        assert self.waited or now == self.versions, "a tensor changed while it was on its way"
        self.waited = True
        self.work.wait()


# -- ranks made by hand ------------------------------------------------------------------------------------------------


def plan_of(**bounds: tuple[int, ...]) -> Plan:
    """A plan whose roles have these bounds of examples and take the ranks in turn; the first one reads the data."""
    roles, first = {}, 0
    for role, cuts in bounds.items():
        roles[role] = tuple(range(first, first + len(cuts) - 1))
        first += len(cuts) - 1
    return Plan("by hand", first, roles, {}, bounds)


def rank_spec(plan: Plan, index: int, **options: Any) -> RankSpec:
    """The description of rank `index` that codegen would write for `plan`."""
    return RankSpec(
        index,
        plan.world,
        tuple(role_spec(plan, role, index) for role in plan.roles_of(index)) or (RoleSpec("idle", replicas=(index,)),),
        readers=plan.roles[plan.reader],
        batch_offsets=plan.batch_offsets[plan.reader],
        **options,
    )


def role_spec(plan: Plan, role: str, index: int) -> RoleSpec:
    """What rank `index` does in a role of `plan`."""
    grouping = plan.groups.get(role)
    others = [other for other in plan.roles if other != role]
    return RoleSpec(
        role,
        examples=plan.interval(role, index),
        replicas=plan.replicas(role, index),
        routes={other: tuple(Route(*route) for route in plan.routes(index, role, other)) for other in others},
        group=plan.group(role, index) if grouping else (),
        scheme=grouping.scheme if grouping else "BK",
        updated_every_microbatch=("weight",) if grouping and grouping.updates == "every" else (),
        all_reduce=plan.all_reduce,
    )


def rank_of(plan: Plan, transport: Transport, update: Callable[[str], None] = lambda role: None) -> Rank:
    """This transport's rank of `plan`."""
    return Rank(rank_spec(plan, transport.rank), transport, update)


def comm_of(rank: Rank, role: str) -> RoleComm:
    """The communicator of a role."""
    return next(comm for comm in rank.comms if comm.role == role)


def begin(rank: Rank, sizes: Sequence[int] | None = None, **options: Any) -> None:
    """Begin a step in which reader k has `sizes[k]` examples, on all communicators of a rank."""
    for comm in rank.comms:
        comm.shared.begin(context_of(rank, sizes, **options))


def context_of(rank: Rank, sizes: Sequence[int] | None = None, **options: Any) -> StepContext:
    """A step in which reader k has `sizes[k]` examples."""
    return StepContext(rank.spec.batch_offsets, rank.batch_offsets(sizes), **options)


def on_comms(
    plan: Plan, function: Callable[[RoleComm], Result], sizes: Sequence[int] | None = None, **options: Any
) -> list[Result]:
    """Call `function` with the first communicator of every rank, in a step of these sizes."""

    def run(transport: Transport) -> Result:
        rank = rank_of(plan, transport)
        begin(rank, sizes, **options)
        return function(rank.comms[0])

    return on_ranks(plan.world, run)


# -- ranks of a compiled program ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """Something to separate: convolutions with BatchNorm, then linear layers; and a layer that nothing uses."""

    def __init__(self, norm: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if norm else nn.Identity(), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.drop = nn.Dropout(drop)
        self.head = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 10))
        self.unused = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.drop(self.features(images).flatten(1)))
        return scores


PINS = {"features.*": "conv", "head.*": "fc"}
SEPARATION = "layer_separation(n_c=2, n_f=1)"


def batch_of(examples: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 1, 8, 8, dtype=dtype), torch.randint(0, 10, (examples,))


def compile_net(model: nn.Module, strategy: str = SEPARATION, world: int = 3, batch: int = 4) -> CompiledProgram:
    """Compile `Net` or its like for batches of `batch` examples a reader."""
    images, labels = batch_of(batch, next(model.parameters()).dtype)
    options: dict[str, Any] = {"pins": PINS} if strategy.startswith("layer_separation") else {}
    return compiled(model, (images,), labels, F.cross_entropy, world, strategy, **options)


STRATEGIES = {"auto": 1, "data_parallel": 2, SEPARATION: 3, "single_device": 2, "layer_separation(n_c=1, n_f=2)": 3}
"""Strategy -> ranks."""


@cache
def plain(strategy: str = SEPARATION) -> tuple[Net, CompiledProgram]:
    """A net without BatchNorm, whose groups differ between ranks and one process, and its program."""
    torch.manual_seed(1)
    model = Net(norm=False)
    return model, compile_net(model, strategy, STRATEGIES[strategy])


def batches_for(program: CompiledProgram, steps: int = 3) -> list[tuple[Tensor, ...]]:
    return [batch_of(program.plan.global_batch) for _ in range(steps)]


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, weight_decay=0.1)


def decaying(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.3)


def worker_of(program: CompiledProgram, transport: Transport, optimizer: Any = sgd, **options: Any) -> Worker:
    """The worker that `open_worker` makes of a saved build."""
    weights = program.weights()
    everything = {**weights["state"], **weights["extra"]}
    part = load_rank(program.files, transport.rank, program.request.own)
    return Worker(part, transport, everything, first_names(weights["state"]), optimizer, **options)


def on_workers(program: CompiledProgram, function: Callable[[Worker], Result], **options: Any) -> list[Result]:
    """Call `function` with the worker of every rank."""
    return on_ranks(program.plan.world, lambda transport: function(worker_of(program, transport, **options)))


def part_of(worker: Worker, batch: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """This worker's part of a global batch of which reader k reads `sizes[k]` examples."""
    if worker.data_rank is None:
        return ()
    ends = list(accumulate(sizes))
    return tuple(tensor[ends[worker.data_rank] - sizes[worker.data_rank] : ends[worker.data_rank]] for tensor in batch)


def train(
    worker: Worker, batches: Iterable[Sequence[Tensor]], sizes: Sequence[int] | None = None
) -> tuple[list[float], dict[str, Tensor] | None]:
    """The losses of these global batches, and on rank 0 the state after them."""
    worker.use_sizes(sizes)
    shares = sizes or [b - a for a, b in pairwise(worker.rank.spec.batch_offsets)]
    losses = [float(worker.step(*part_of(worker, batch, shares))) for batch in batches]
    return losses, worker.state_dict()


def one_process(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    optimizer: Any = sgd,
    loss: Callable[..., Tensor] = F.cross_entropy,
    clip_norm: float | None = None,
    accumulate: int = 1,
) -> tuple[list[float], dict[str, Tensor]]:
    """What `train` is to be equal to."""
    updates = optimizer(list(model.named_parameters()))
    losses = []
    for k, (*inputs, target) in enumerate(batches):
        if k % accumulate == 0:
            updates.zero_grad()
        value = loss(model(*inputs), target)
        (value / accumulate).backward()
        losses.append(float(value.detach()))
        if (k + 1) % accumulate:
            continue
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm, foreach=False)
        updates.step()
    return losses, {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


def assert_same(got: Mapping[str, Tensor] | None, expected: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    """The same keys in the same order, shapes, dtypes, and values within `tolerance`."""
    assert got is not None
    assert list(got) == list(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(got[key], tensor, rtol=tolerance, atol=tolerance, msg=partial("{}: {}".format, key))
