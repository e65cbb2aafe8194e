"""Parameter servers: the same training as in one process, on ranks of their own or beside workers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.example.example import Example
from splitc.checks.actions import actions_are_complete
from splitc.checks.deadlock import no_deadlock, sends_meet_receives
from splitc.checks.graph import every_layer_placed
from splitc.compiled import CompiledProgram
from splitc.errors import InternalError
from splitc.ir.comm_ops import pull
from splitc.ir.graph import copy_graph
from splitc.ir.layers import Layer
from splitc.ir.pass_manager import run_pass, run_passes
from splitc.ir.placements import LayerPlacement
from splitc.ir.plan import SERVER, Plan
from splitc.ir.servers.wire import pieces
from splitc.ir.shares import share_out
from splitc.ir.wire import wire
from splitc.passes.bucket_gradients import BucketGradients
from splitc.passes.rewriting import ON_THE_GRAPH, ON_THE_STAGES
from splitc.passes.servers.insert_pulls import served_parameters_are_pulled
from splitc.passes.split_ranks import SplitRanks
from splitc.passes.use_plan import UsePlan
from splitc.runtime.servers import parameter_server as machinery
from splitc.runtime.worker import Worker
from splitc.specialise import Settings
from tests.runtime.test_worker import on_the_wire, said
from tests.support.compiled import CLUSTER, actions_of, analyse, with_actions
from tests.support.ranks import adam, assert_same, on_workers, one_process, part_of, train
from tests.support.sampling import along, sampled

Where = tuple[tuple[int, ...], tuple[int, ...]]

PLACES: list[Where] = [  # workers, servers
    ((0,), (1,)),
    ((0, 1), (2,)),
    ((1, 2), (0,)),
    ((0, 1, 2), (3, 4)),
    ((0, 1), (2, 3, 4)),
    ((0, 1), (1,)),
    ((0, 1, 2), (0, 1, 2)),
    ((0, 1, 2, 3, 4), (1, 3)),
    ((0, 1, 2), (0, 3)),  # one beside a worker, one on its own
]


def place_name(place: Where) -> str:
    return "workers" + "".join(map(str, place[0])) + "-servers" + "".join(map(str, place[1]))


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of these small models travel alone and together, as those of large ones do."""
    monkeypatch.setattr(machinery, "COALESCED_BELOW", 400)


# -- models ------------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 17), nn.ReLU(), nn.Linear(17, 10))


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, then linear layers."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if norm else nn.Identity(), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(images).flatten(1))
        return scores


def frozen() -> nn.Module:
    model = ConvNet()
    model.features.requires_grad_(False)
    model.head[0].bias.requires_grad_(False)
    return model


class Odd(nn.Module):
    """A scalar parameter, a tied one, and one that is used but that the loss never reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.again = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.again.weight
        self.watched = nn.Linear(6, 6)
        self.last = nn.Linear(6, 10)

    def forward(self, images: Tensor) -> Tensor:
        h = torch.relu(self.first(images.flatten(1))) * self.scale
        h = self.tied(torch.relu(self.again(h)))
        scores: Tensor = self.last(h + self.watched(h).detach())
        return scores


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "conv": ConvNet, "frozen": frozen, "odd": Odd}


def batch_of(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 1, 8, 8, dtype=torch.float64), torch.randint(0, 10, (examples,))


def served(
    model: nn.Module,
    workers: tuple[int, ...] = (0, 1, 2),
    servers: tuple[int, ...] = (3,),
    bounds: tuple[int, ...] | None = None,
    overlap: bool = True,
    summed: Callable[[Layer], bool] = lambda layer: False,
    roles: Callable[[Layer], str] | None = None,
    synchronised: bool = False,
) -> CompiledProgram:
    """Compile `model` for parameter servers.  summed: which layers are all-reduced instead."""
    model = model.double()
    x, y = batch_of(4)
    known = analyse(model, (x,), y, F.cross_entropy)
    role_of = roles or (lambda layer: "worker")
    bounds = bounds or share_out(4 * len(workers), len(workers))

    def place(layer: Layer) -> LayerPlacement:
        trains = any(known.tensors[name].trainable for name in layer.tensors)
        sync = "all_reduce" if summed(layer) else "parameter_server"
        return LayerPlacement(role_of(layer), "replicated", sync if trains else "none")

    names = tuple(dict.fromkeys(map(role_of, known.layers)))
    plan = Plan(
        "by hand",
        max(*workers, *servers) + 1,
        dict.fromkeys(names, workers),
        {layer.name: place(layer) for layer in known.layers},
        dict.fromkeys(names, bounds),
        servers=servers,
        overlap=overlap,
        synchronised=synchronised,
    )
    return with_plan(model, plan, known, x, y)


def with_plan(model: nn.Module, plan: Plan, known: Any, x: Tensor, y: Tensor, nbytes: int = 900) -> CompiledProgram:
    """Buckets of `nbytes`, so that a small model has several."""
    placed = run_passes(run_pass(UsePlan(plan, ""), known), ON_THE_GRAPH)
    passes = [BucketGradients(nbytes) if isinstance(each, BucketGradients) else each for each in ON_THE_STAGES]
    program = run_passes(run_pass(SplitRanks(), placed), passes)
    example = Example.bind(model, (x,), y, F.cross_entropy)
    return CompiledProgram(program, model, example, Settings(plan.world, cluster=CLUSTER))


# -- exactness ---------------------------------------------------------------------------------------------------------


def in_two_roles(
    model: nn.Module, servers: tuple[int, ...], served: tuple[str, ...] = ("conv", "fc")
) -> CompiledProgram:
    """Convolutions on ranks 0 and 1, linear layers on 2 and 3; the layers of a role are served or all-reduced."""
    model = model.double()
    x, y = batch_of(4)
    known = analyse(model, (x,), y, F.cross_entropy)
    syncs = {role: "parameter_server" if role in served else "all_reduce" for role in ("conv", "fc")}
    role_of = {layer.name: "conv" if layer.name.startswith("features") else "fc" for layer in known.layers}
    placements = {name: LayerPlacement(role, "replicated", syncs[role]) for name, role in role_of.items()}
    roles, examples = {"conv": (0, 1), "fc": (2, 3)}, {"conv": (0, 4, 8), "fc": (0, 4, 8)}
    plan = Plan("by hand", max(3, *servers) + 1, roles, placements, examples, servers=servers)
    return with_plan(model, plan, known, x, y)


def is_convolution(layer: Layer) -> bool:
    return layer.name.startswith("features")


def role_of_two(layer: Layer) -> str:
    return "conv" if is_convolution(layer) else "fc"


PROGRAMS: dict[str, Callable[[], CompiledProgram]] = {
    "unequal shares of a tied and a scalar parameter": lambda: served(Odd(), servers=(0, 2), bounds=(0, 2, 7, 8)),
    "frozen layers": lambda: served(frozen(), bounds=(0, 2, 7, 8)),
    "some all-reduced": lambda: served(ConvNet(), summed=is_convolution),
    "some all-reduced beside": lambda: served(ConvNet(), servers=(0, 1, 2), overlap=False, summed=is_convolution),
    "ranks in two roles": lambda: served(ConvNet(), servers=(2, 3), roles=role_of_two),
    "one of two roles": lambda: served(ConvNet(), servers=(0, 1, 2), roles=role_of_two, summed=is_convolution),
    "roles on ranks of their own": lambda: in_two_roles(ConvNet(), (4,)),
    "one role on ranks of its own": lambda: in_two_roles(ConvNet(), (4,), ("fc",)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("small_messages")
@along(1, place=[PLACES[-1], *PLACES[:-1]], overlap=[True, False], name=["conv", "mlp"])
def test_servers_are_the_same_training_as_one_process(name: str, place: Where, overlap: bool) -> None:
    program = served(MODELS[name](), *place, overlap=overlap)
    assert all(len(stage.served) > 2 for stage in program.program.stages)
    assert_holds(program.verify())


@pytest.mark.slow
@sampled("name", PROGRAMS, one_in=8)
def test_whatever_is_served_it_is_the_same_training(name: str) -> None:
    program = PROGRAMS[name]()
    if name.startswith("some"):
        (stage,) = program.program.stages
        assert {name.split(".")[0] for bucket in stage.buckets for name in bucket} == {"features"}
        assert {name.split(".")[0] for bucket in stage.served for name in bucket} == {"head"}
    assert_holds(program.verify())


def assert_holds(result: Any) -> None:
    assert result.holds and result.tolerance == 1e-9, str(result)


@pytest.mark.slow
@sampled("place", [((0, 1), (0, 1)), ((0, 1), (2,))], one_in=2, ids=place_name)
def test_batch_norm_over_all_workers_is_that_of_one_process(place: Where) -> None:
    result = served(ConvNet(), *place, synchronised=True).verify()
    assert result.holds and not any("groups of" in note for note in result.notes), str(result)


@pytest.mark.slow
@pytest.mark.processes
def test_real_processes_are_the_same_training() -> None:
    """One server beside a worker, one on its own."""
    result = served(ConvNet(), (0, 1), (1, 2)).verify(steps=2, processes=True)
    assert result.holds and result.processes, str(result)


# -- a worker's life ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_messages")
@along(1, place=[((0, 1, 2), (3, 4)), ((0, 1), (0, 1)), ((0, 1, 2), (3,))], overlap=[True, False])
def test_adam_clipping_and_accumulation_are_those_of_one_process(place: Where, overlap: bool) -> None:
    model = ConvNet(norm=False).double()
    program = served(copy.deepcopy(model), *place, overlap=overlap)
    batches = [batch_of(program.plan.global_batch) for _ in range(6)]
    results = on_workers(program, lambda w: train(w, batches), optimizer=adam, clip_norm=0.3, accumulate=2)
    twos = zip(batches[::2], batches[1::2], strict=True)
    pairs = [tuple(torch.cat(both) for both in zip(*two, strict=True)) for two in twos]
    _, state = one_process(model, pairs, adam, clip_norm=0.3)  # a mean over both batches is the mean of their means
    assert_same(results[0][1], state, 1e-9)


@pytest.mark.slow
def test_a_server_trains_its_rows_and_a_worker_what_it_alone_holds() -> None:
    def run(worker: Worker) -> dict[str, torch.Size]:
        worker.step(*part_of(worker, batch_of(8), (4, 4)))
        return {name: parameter.shape for name, parameter in trained(worker).items()}

    first, second, *servers = on_workers(served(mlp(), (0, 1), (2, 3)), run)
    assert first == second == {}
    for name, rows in [("1.weight", 24), ("1.bias", 24), ("3.weight", 17), ("5.weight", 10)]:
        assert sum(held[name][0] for held in servers if name in held) == rows
    assert all(0 not in shape for held in servers for shape in held.values())


def trained(worker: Worker) -> dict[str, nn.Parameter]:
    """What the optimizer of a rank has."""
    groups = worker.optimizer.param_groups if worker.optimizer is not None else []
    return {n: p for group in groups for n, p in zip(group["param_names"], group["params"], strict=True)}


def test_a_server_beside_a_worker_updates_the_workers_own_tensors() -> None:
    def run(worker: Worker) -> list[bool]:
        worker.step(*part_of(worker, batch_of(8), (4, 4)))
        stage, rows = dict(worker.stage.named_parameters()), trained(worker)
        return [
            rows[name].untyped_storage().data_ptr() == stage[name].untyped_storage().data_ptr()
            and stage[name].grad is None
            and rows[name].grad is not None
            for name in rows
        ]

    for alike in on_workers(served(mlp(), (0, 1), (0, 1)), run, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)):
        assert alike and all(alike)


# -- on the wire -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_messages")
@along(1, place=[PLACES[8], *PLACES[:8]], overlap=[True, False])
def test_a_step_issues_what_the_checker_has_proved_in_that_order(place: Where, overlap: bool) -> None:
    program = served(ConvNet(norm=False), *place, overlap=overlap)
    batch = batch_of(program.plan.global_batch)

    def run(worker: Worker) -> tuple[list[Any], list[int]]:
        log, sent = on_the_wire(worker.rank.transport), [worker.rank.sent_bytes]
        for _ in range(2):
            worker.step(*part_of(worker, batch, program.plan.local_batches))
            sent.append(worker.rank.sent_bytes)
        return log, [b - a for a, b in pairwise(sent)]

    for rank, (issued, sent) in enumerate(on_workers(program, run)):
        proved = wire(program.program, rank)
        assert issued == 2 * [said(op) for op in proved], f"rank {rank}"
        assert sent == 2 * [sum(int(op.sent) for op in proved)], f"rank {rank}"


@pytest.mark.slow
def test_between_the_batches_of_an_update_nothing_is_pulled_or_pushed() -> None:
    program = served(ConvNet(), (0, 1), (2,))
    batch = batch_of(8)

    def run(worker: Worker) -> list[int]:
        log, counts = on_the_wire(worker.rank.transport), []
        for _ in range(3):
            worker.step(*part_of(worker, batch, (4, 4)))
            counts.append(sum(kind in ("send", "recv") for kind, _, _ in log))
            log.clear()
        return counts

    for counts in on_workers(program, run, accumulate=3):
        pulls, nothing, pushes = counts
        assert pulls > 0 and nothing == 0 and pushes == pulls


@along(1, name=["odd", "mlp", "conv"], servers=[(2, 3, 4), (2, 3), (2,)])
def test_every_bucket_is_spread_evenly_and_whole(name: str, servers: tuple[int, ...]) -> None:
    program = served(MODELS[name](), (0, 1), servers).program
    for bucket in program.stage("worker").served:
        found = pieces(program, bucket, servers)
        holdings = [program.tensors[name] for name in bucket]
        assert sum(piece.nbytes for piece in found) == sum(holding.nbytes for holding in holdings)
        row = max(h.nbytes // (h.shape[0] if h.shape else 1) for h in holdings)
        for server in servers:
            held = sum(piece.nbytes for piece in found if piece.server == server)
            assert held <= sum(h.nbytes for h in holdings) / len(servers) + row
        for holding in holdings:
            rows = [(p.first, p.last) for p in found if p.name == holding.name]
            assert rows[0][0] == 0 and rows[-1][1] == (holding.shape[0] if holding.shape else 1)
            assert all(before[1] == after[0] for before, after in pairwise(rows))


# -- the generated programs --------------------------------------------------------------------------------------------


def test_in_the_plain_form_everything_is_pulled_before_and_pushed_after() -> None:
    worker = served(mlp(), (0, 1), (2,), overlap=False).files["worker.py"]
    assert "comm.pull(" not in worker and "with comm.push(" not in worker
    step = worker[worker.index("def step") : worker.index("def evaluate")]
    calls = ["pull_all", "stage(comm", "loss.backward()", "push_all"]
    assert [step.index(call) for call in calls] == sorted(step.index(call) for call in calls)


@cache
def on_ranks_0_and_1(servers: tuple[int, ...] = (2,)) -> CompiledProgram:
    """The convolutions on two workers; for tests that change nothing in it."""
    return served(ConvNet(), (0, 1), servers)


# -- broken on purpose -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "verb"), [((2,), "pull"), ((0, 1), "push"), ((2,), "push")])
def test_a_dropped_pull_or_push_is_named(servers: tuple[int, ...], verb: str) -> None:
    program = on_ranks_0_and_1(servers).program
    name = "worker" if servers == (2,) else "worker_server"
    actions = actions_of(program, name)
    dropped = next(action for action in actions if action.verb == verb)
    broken = with_actions(program, **{name: [action for action in actions if action is not dropped]})
    (problem,) = actions_are_complete(broken)
    assert problem == f"{name}: {dropped} is done 0 times, not once"
    if servers == (2,):
        problems = sends_meet_receives(broken)
        assert problems and all(verb in problem and "rank 2" in problem for problem in problems)


def test_a_server_that_forgets_its_part_is_named() -> None:
    program = on_ranks_0_and_1().program
    for verb in ("send_parameters", "reduce_gradients"):
        actions = [action for action in actions_of(program, SERVER) if action.verb != verb]
        broken = with_actions(program, server=actions)
        assert actions_are_complete(broken) == [f"server: server: {verb} is done 0 times, not once"]
        assert any("rank 2 never" in problem for problem in sends_meet_receives(broken))


def test_pulling_after_the_forward_and_collecting_before_it_are_named() -> None:
    program = on_ranks_0_and_1().program
    actions = actions_of(program, "worker")
    late = [*(a for a in actions if a.verb != "pull"), *(a for a in actions if a.verb == "pull")]
    problems = actions_are_complete(with_actions(program, worker=late))
    assert problems == ["worker: worker: pull comes after worker: forward"]
    actions = actions_of(program, SERVER)
    (problem,) = no_deadlock(with_actions(program, server=[actions[-1], *actions[:-1]]))
    assert "deadlock in a cycle" in problem and "push" in problem


def test_a_bucket_that_nobody_waits_for_is_named() -> None:
    program = on_ranks_0_and_1().program
    (stage,) = program.stages
    graph, _ = copy_graph(stage.graph)
    node = next(node for node in graph.nodes if node.target is pull)
    graph.erase_node(node)
    problems = served_parameters_are_pulled(replace(program, stages=(replace(stage, graph=graph),)))
    assert any("reads features.0" in problem and "before it is pulled" in problem for problem in problems)
    assert any("is pulled 0 times" in problem for problem in problems)


def test_a_plan_whose_servers_cannot_serve_is_refused() -> None:
    program = on_ranks_0_and_1().program
    for servers, words in (((), "servers is empty"), ((2, 2), "a rank is there twice"), ((5,), "there is no rank 5")):
        broken = replace(program, plan=replace(program.plan, servers=servers))
        assert any(words in problem for problem in every_layer_placed(broken))
    with pytest.raises(InternalError, match="rank 0 is a server and in role conv, but not in role fc"):
        in_two_roles(ConvNet(), (0,))
