"""A worker trains its rank: together the workers are one process that trains on the concatenated batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from splitc.api import CompiledProgram
from splitc.errors import LaunchError
from splitc.runtime.transport import Transport
from splitc.runtime.weights import first_names
from splitc.runtime.worker import Worker
from splitc.wire import wire
from tests.compiled import compiled
from tests.ranks import (
    SEPARATION,
    Net,
    assert_same,
    batch_of,
    compile_net,
    on_ranks,
    on_workers,
    one_process,
    part_of,
    sgd,
    train,
    worker_of,
)

STRATEGIES = {"auto": 1, "data_parallel": 2, SEPARATION: 3, "single_device": 2, "layer_separation(n_c=1, n_f=2)": 3}


@cache
def plain(strategy: str = SEPARATION) -> tuple[Net, CompiledProgram]:
    """A net without BatchNorm, whose groups differ between ranks and one process, and its program."""
    torch.manual_seed(1)
    model = Net(norm=False)
    return model, compile_net(model, strategy, STRATEGIES[strategy])


def batches_for(program: CompiledProgram, steps: int = 3) -> list[tuple[Tensor, ...]]:
    return [batch_of(program.plan.global_batch) for _ in range(steps)]


def adam(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, weight_decay=0.1)


def decaying(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.3)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", [sgd, decaying, adam])
def test_training_is_that_of_one_process(strategy: str, optimizer: Any) -> None:
    model, program = plain(strategy)
    batches = batches_for(program)
    results = on_workers(program, lambda worker: train(worker, batches), optimizer=optimizer)
    losses, state = one_process(copy.deepcopy(model), batches, optimizer)
    for got, _ in results:
        assert got == pytest.approx(losses, rel=1e-5)
    assert_same(results[0][1], state)
    assert [state for _, state in results[1:]] == [None] * (program.plan.world - 1)


@pytest.mark.parametrize("strategy", ["data_parallel", SEPARATION])
@pytest.mark.parametrize("share", [1, 3, 7])
def test_a_smaller_or_larger_batch_is_that_of_one_process_too(strategy: str, share: int) -> None:
    model, program = plain(strategy)
    sizes = [share, share + 1]
    batches = [batch_of(sum(sizes)) for _ in range(3)]
    results = on_workers(program, lambda worker: train(worker, batches, sizes))
    losses, state = one_process(copy.deepcopy(model), batches)
    assert results[-1][0] == pytest.approx(losses, rel=1e-5)
    assert_same(results[0][1], state)


@pytest.mark.parametrize("limit", [0.05, 1e3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_is_that_of_one_process_whatever_the_ranks_hold(strategy: str, limit: float) -> None:
    model, program = plain(strategy)
    batches = batches_for(program)
    results = on_workers(program, lambda worker: train(worker, batches), clip_norm=limit)
    _, state = one_process(copy.deepcopy(model), batches, clip_norm=limit)
    assert_same(results[0][1], state)


def test_in_double_precision_training_agrees_to_the_last_digits() -> None:
    model = Net(norm=False).double()
    program = compile_net(model)
    batches = [batch_of(8, torch.float64) for _ in range(3)]

    def run(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        loss = worker.step(*part_of(worker, batches[0], (4, 4)))
        assert loss.dtype == torch.float64
        assert all(p.dtype == torch.float64 for p in worker.stage.parameters())
        losses, state = train(worker, batches[1:])
        return [float(loss), *losses], state

    results = on_workers(program, run)
    losses, state = one_process(copy.deepcopy(model), batches)
    for got, _ in results:
        assert got == pytest.approx(losses, rel=1e-13)
    assert_same(results[0][1], state, tolerance=1e-12)


class Aside(nn.Module):
    """Has a parameter whose gradient is cut off: an optimizer must not even decay it."""

    def __init__(self) -> None:
        super().__init__()
        self.way, self.aside = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x) + self.aside(x).detach()  # type: ignore[no-any-return]


def test_a_parameter_that_the_loss_does_not_reach_is_not_decayed() -> None:
    model, x, y = Aside(), torch.randn(4, 4), torch.randint(0, 3, (4,))
    program = compiled(model, (x,), y, F.cross_entropy, 2, "data_parallel")
    batches = [(torch.randn(8, 4), torch.randint(0, 3, (8,)))]
    results = on_workers(program, lambda worker: train(worker, batches), optimizer=decaying)
    _, state = one_process(copy.deepcopy(model), batches, decaying)
    assert torch.equal(state["aside.weight"], model.aside.weight)
    assert_same(results[0][1], state)


def test_the_loss_of_a_step_is_a_scalar_without_gradient_on_every_rank() -> None:
    _, program = plain()
    batch = batch_of(8)
    for loss in on_workers(program, lambda worker: worker.step(*part_of(worker, batch, (4, 4)))):
        assert loss.dim() == 0
        assert not loss.requires_grad


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


def test_drops_turns_dropout_off_in_training() -> None:
    model = Net(norm=False, drop=0.5)
    program, batches = compile_net(model), [batch_of(8)]

    def run(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        worker.drops = False
        return train(worker, batches)

    model.drop.p = 0.0
    assert on_workers(program, run)[0][0] == pytest.approx(one_process(model, batches)[0], rel=1e-5)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single_device"])  # it has an idle rank
def test_what_a_step_puts_on_the_wire_is_what_the_checker_has_proved_in_that_order(strategy: str) -> None:
    _, program = plain(strategy)
    batch = batch_of(program.plan.global_batch)

    def run(worker: Worker) -> list[Any]:
        log: list[Any] = []
        transport = worker.rank.transport

        def logged(kind: str, start: Any) -> Any:
            def issue(tensor: Tensor, other: Any, *rest: Any) -> Any:
                others = other if isinstance(other, tuple) else (other,)
                if len(others) > 1 or kind != "collective":
                    log.append((kind, others, tuple(tensor.shape)))
                return start(tensor, other, *rest)

            return issue

        for kind, name in {"send": "isend", "recv": "irecv", "collective": "all_reduce"}.items():
            setattr(transport, name, logged(kind, getattr(transport, name)))
        worker.step(*part_of(worker, batch, program.plan.sizes))
        return log

    for rank, issued in enumerate(on_workers(program, run)):
        proved = [(op.kind, op.ranks, op.shape) for op in wire(program.program, rank)]
        assert issued == proved, f"rank {rank}"


# -- the optimizer -----------------------------------------------------------------------------------------------------


def test_the_optimizer_is_made_of_this_ranks_named_parameters_and_not_where_nothing_trains() -> None:
    model, program = plain("single_device")

    def run(worker: Worker) -> bool:
        return worker.optimizer is None

    seen: list[list[str]] = []

    def factory(params: Any) -> torch.optim.Optimizer:
        seen.append([name for name, _ in params])
        return sgd(params)

    assert on_workers(program, run, optimizer=factory) == [False, True]
    assert seen == [[name for name, _ in model.named_parameters() if not name.startswith("unused")]]


def test_frozen_parameters_are_handed_to_the_factory_but_a_rank_of_frozen_ones_has_no_optimizer() -> None:
    model = Net(norm=False)
    model.features.requires_grad_(False)
    model.head[0].bias.requires_grad_(False)
    program = compile_net(model)
    seen: dict[str, list[str]] = {}

    def run(transport: Transport) -> bool:
        def factory(params: Any) -> torch.optim.Optimizer:
            seen[program.plan.role_of(transport.rank)] = [name for name, _ in params]
            return decaying([(name, p) for name, p in params if p.requires_grad])

        worker = worker_of(program, transport, factory)
        state = train(worker, batches)[1]
        if state is not None:
            assert_same(state, expected)
        return worker.optimizer is None

    batches = batches_for(program)
    _, expected = one_process(copy.deepcopy(model), batches, decaying)
    assert torch.equal(expected["features.0.weight"], model.features[0].weight)
    assert on_ranks(3, run) == [True, True, False]
    assert seen == {"fc": [name for name, _ in model.named_parameters() if name.startswith("head")]}


def test_an_optimizer_that_needs_the_whole_model_at_once_is_refused() -> None:
    _, program = plain("data_parallel")
    with pytest.raises(LaunchError, match="LBFGS"):
        on_workers(program, lambda worker: None, optimizer=lambda params: torch.optim.LBFGS([p for _, p in params]))


def test_gradient_accumulation_is_refused_clearly() -> None:
    _, program = plain()
    with pytest.raises(LaunchError, match="accumulate=2: gradient accumulation is not there yet"):
        on_workers(program, lambda worker: None, accumulate=2)


# -- wrong batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ((), r"rank 0 \(conv\) takes 2 tensors \(images, target\), got 0"),
        (batch_of(3), r"images is \(3, 1, 8, 8\) torch.float32, this step needs \(4, 1, 8, 8\) torch.float32"),
        ((torch.zeros(4, 1, 8, 8).double(), torch.zeros(4).long()), "images is .* torch.float64, this step needs"),
        ((torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int32)), "target is .* torch.int32, this step needs"),
        ((torch.zeros(4, 1, 8, 8), [0, 1, 2, 3]), "target is a list, this step needs"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_and_a_right_one_may_follow(wrong: tuple[Any, ...], text: str) -> None:
    _, program = plain()
    batch = batch_of(8)

    def run(worker: Worker) -> float:
        if worker.rank.index == 0:
            for method in (worker.step, worker.evaluate):
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


# -- shard -------------------------------------------------------------------------------------------------------------


def test_an_epoch_of_shard_is_that_of_one_process_with_its_tail() -> None:
    model, program = plain()
    dataset = TensorDataset(*batch_of(21))
    batches = [dataset[k : k + 8] for k in (0, 8, 16)]

    def run(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        losses = [float(worker.step(*batch)) for batch in worker.shard(dataset, shuffle=False, drop_last=False)]
        return losses, worker.state_dict()

    results = on_workers(program, run)
    losses, state = one_process(copy.deepcopy(model), batches)
    for got, _ in results:
        assert got == pytest.approx(losses, rel=1e-5)
    assert_same(results[0][1], state)


def test_an_evaluation_inside_a_training_loop_leaves_its_batch_sizes_alone() -> None:
    _, program = plain()
    training, held_out = TensorDataset(*batch_of(20)), TensorDataset(*batch_of(9))

    def run(worker: Worker) -> int:
        steps = 0
        for batch in worker.shard(training, batch_size=2):
            for other in worker.shard(held_out, batch_size=3, drop_last=False):
                worker.evaluate(*other)
            worker.step(*batch)
            steps += 1
        worker.step(*part_of(worker, batch_of(8), (4, 4)))  # after the loops: as compiled again
        return steps

    assert on_workers(program, run) == [5, 5, 5]


def test_a_loop_that_is_left_early_leaves_the_sizes_as_compiled() -> None:
    _, program = plain()
    dataset = TensorDataset(*batch_of(8))

    def run(worker: Worker) -> None:
        for batch in worker.shard(dataset, batch_size=2):
            worker.step(*batch)
            break
        worker.step(*part_of(worker, batch_of(8), (4, 4)))

    on_workers(program, run)


def test_a_batch_size_below_one_is_refused_at_once() -> None:
    _, program = plain()

    def run(worker: Worker) -> None:
        with pytest.raises(LaunchError, match="batch_size=0"):
            worker.shard(TensorDataset(*batch_of(8)), batch_size=0)

    on_workers(program, run)


def test_a_tail_that_leaves_a_rank_without_work_is_left_out_on_every_rank() -> None:
    _, program = plain("layer_separation(n_c=1, n_f=2)")
    dataset = TensorDataset(*batch_of(9))  # 4 + 4 + 1, and two ranks to share the 1

    def run(worker: Worker) -> int:
        return sum(bool(worker.step(*batch)) for batch in worker.shard(dataset, drop_last=False))

    assert on_workers(program, run) == [2, 2, 2]


# -- evaluation --------------------------------------------------------------------------------------------------------


def test_evaluation_uses_the_first_replicas_buffers_and_one_process_agrees() -> None:
    model = Net(drop=0.5)
    program = compile_net(model, "data_parallel", 2)
    batches, held_out = batches_for(program), batch_of(8)

    def run(worker: Worker) -> tuple[float, dict[str, Tensor] | None, Tensor, bool]:
        train(worker, batches)
        before = worker.stage.get_buffer("features.1.running_mean").clone()
        loss = worker.evaluate(*part_of(worker, held_out, (4, 4)))
        assert not loss.requires_grad
        return float(loss), worker.state_dict(), before, worker.stage.training

    (loss, state, mean, training), (other_loss, _, other_mean, _) = on_workers(program, run)
    assert not torch.equal(mean, other_mean)
    assert state is not None
    assert torch.equal(state["features.1.running_mean"], mean)
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        assert loss == other_loss == pytest.approx(float(F.cross_entropy(model(held_out[0]), held_out[1])), rel=1e-5)
    assert training


def test_evaluation_changes_no_training() -> None:
    program = compile_net(Net(drop=0.5))
    batches, held_out = batches_for(program), batch_of(8)

    def with_evaluation(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        losses = []
        for batch in batches:
            losses += train(worker, [batch])[0]
            worker.evaluate(*part_of(worker, held_out, (4, 4)))
        return losses, worker.state_dict()

    (losses, state), *_ = on_workers(program, with_evaluation)
    (plain_losses, plain_state), *_ = on_workers(program, lambda worker: train(worker, batches))
    assert losses == plain_losses
    assert plain_state is not None
    assert_same(state, plain_state, tolerance=0.0)


def test_evaluation_keeps_no_graph() -> None:
    _, program = plain()

    def run(worker: Worker) -> list[bool]:
        modes: list[bool] = []
        worker.stage.register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
        worker.evaluate(*part_of(worker, batch_of(8), (4, 4)))
        worker.step(*part_of(worker, batch_of(8), (4, 4)))
        return modes

    assert on_workers(program, run) == [[False, True]] * 3


# -- the state ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One tensor under several keys: an embedding tied to the head, a layer registered twice; and unused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.alias = nn.Linear(6, 6)
        self.layers = nn.ModuleList([self.alias, nn.Linear(6, 6)])
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("shift", torch.ones(6), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale + self.shift
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x).mean(1)  # type: ignore[no-any-return]


def token_batch(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 10, (examples, 5)), torch.randint(0, 10, (examples,))


@pytest.mark.parametrize("strategy", ["data_parallel", "single_device"])
def test_the_state_has_all_keys_of_the_model_tied_and_unused_ones_too(strategy: str) -> None:
    model = Tied()
    ids, target = token_batch(4)
    program = compiled(model, (ids,), target, F.cross_entropy, 2, strategy)
    batches = [token_batch(program.plan.global_batch) for _ in range(3)]
    results = on_workers(program, lambda worker: train(worker, batches))
    _, state = one_process(copy.deepcopy(model), batches)
    assert torch.equal(state["alias.weight"], state["layers.0.weight"])
    assert_same(results[0][1], state)
    got = results[0][1]
    assert got is not None
    assert got["embed.weight"] is got["head.weight"]  # as small on disk as the model's own
    model.load_state_dict(got)


def test_the_state_is_the_whole_model_before_any_step_and_does_not_move_with_later_ones() -> None:
    model, program = plain()
    batch = batch_of(8)

    def run(worker: Worker) -> dict[str, Tensor] | None:
        state = worker.state_dict()
        train(worker, [batch])
        return state

    assert_same(on_workers(program, run)[0], model.state_dict(), tolerance=0.0)


@pytest.mark.parametrize(("source", "target"), [(SEPARATION, "data_parallel"), ("data_parallel", SEPARATION)])
def test_a_state_loads_into_another_plan_and_training_goes_on_as_in_one_process(source: str, target: str) -> None:
    model, program = plain(source)
    other = plain(target)[1]
    first, second = batches_for(program), batches_for(other)

    def sgd_without_memory(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    (_, saved), *_ = on_workers(program, lambda worker: train(worker, first), optimizer=sgd_without_memory)
    assert saved is not None
    saved["unused.weight"] = torch.full((2, 2), 3.0)

    def run(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        worker.load_state_dict(saved if worker.rank.index == 0 else None)
        return train(worker, second)

    (losses, state), *_ = on_workers(other, run, optimizer=sgd_without_memory)
    copied = copy.deepcopy(model)
    one_process(copied, first, sgd_without_memory)
    with torch.no_grad():
        copied.unused.weight.fill_(3.0)
    expected_losses, expected = one_process(copied, second, sgd_without_memory)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_same(state, expected)


def test_a_loaded_state_keeps_the_optimizers_parameters() -> None:
    model, program = plain()

    def run(worker: Worker) -> dict[str, Tensor] | None:
        zeros = {key: torch.zeros_like(tensor) for key, tensor in model.state_dict().items()}
        worker.load_state_dict(zeros)
        for tensor in zeros.values():
            tensor.fill_(9.0)  # the worker has copies
        train(worker, [batch_of(8)])
        return worker.state_dict()

    state = on_workers(program, run)[0]
    assert state is not None
    assert bool(state["head.2.bias"].any())  # it trained
    assert float(state["head.2.bias"].abs().max()) < 1.0
    assert not bool(state["unused.weight"].any())


def test_a_worker_keeps_no_second_copy_of_its_weights() -> None:
    model, program = plain("data_parallel")

    def run(worker: Worker) -> list[str]:
        return list(worker._others)

    assert on_workers(program, run) == [["unused.weight", "unused.bias"], []]
    assert first_names(model.state_dict()).keys() == model.state_dict().keys()


def test_a_worker_without_an_optimizer_evaluates() -> None:
    model, program = plain()
    batch = batch_of(8)

    def run(worker: Worker) -> float:
        assert worker.optimizer is None
        return float(worker.evaluate(*part_of(worker, batch, (4, 4))))

    expected = float(F.cross_entropy(model(batch[0]), batch[1]).detach())
    assert on_workers(program, run, optimizer=None) == [pytest.approx(expected, rel=1e-5)] * 3


def test_a_batch_on_another_device_is_moved_to_the_ranks() -> None:
    _, program = plain("single_device")

    class Elsewhere(Tensor):
        """A tensor that only `to` brings here."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.to:
                moved.append(args[1])
                return args[0].as_subclass(Tensor)
            return super().__torch_function__(func, types, args, kwargs or {})

    moved: list[torch.device] = []
    images, labels = batch_of(4)

    def run(worker: Worker) -> None:
        worker.step(*(() if worker.data_rank is None else (images.as_subclass(Elsewhere), labels)))

    on_workers(program, run)
    assert moved == [torch.device("cpu")]
