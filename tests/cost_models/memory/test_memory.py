"""Bytes of one rank: what is predicted, and what ranks really have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples import alexnet, mlp, resnet, transformer, vgg16
from splitc.compiled import CompiledProgram
from splitc.cost_models.memory.memory import RankMemory, gradient_nbytes, needed_nbytes
from splitc.cost_models.memory.memory_check import memory_of_all
from splitc.cost_models.memory.rank_memory import memory_of
from splitc.errors import PlacementError
from splitc.ir.layers import StateTensor
from splitc.ir.program import Program
from tests.support.compiled import analyse, class_batch, compiled
from tests.support.every_strategy import planned
from tests.support.measured_memory import Measured, allocator_peak, in_processes, measured
from tests.support.models import CASES
from tests.support.ranks import Net, compile_net, sgd
from tests.support.sampling import sampled, thinned
from tests.support.subnet_networks import CLASSES, INPUTS, Chain

WEIGHT = StateTensor("fc.weight", (10, 5), torch.float32, parameter=True, requires_grad=True)
FROZEN = StateTensor("embed.weight", (100,), torch.float32, parameter=True)
BUFFER = StateTensor("bn.running_mean", (5,), torch.float64, parameter=False)
BF16 = torch.bfloat16


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def plain_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


OPTIMIZERS: dict[int, Callable[[Any], torch.optim.Optimizer]] = {0: plain_sgd, 1: sgd, 2: plain_adam}
"""Copies of the parameters in the state -> an optimizer."""

MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any, Any]]] = {
    "alexnet": lambda: (alexnet.alexnet(0.25, 100), *class_batch((8, 3, 96, 96), 100), F.cross_entropy),
    "vgg with BatchNorm": lambda: (
        vgg16.vgg16(0.25, 100, batch_norm=True),
        *class_batch((4, 3, 64, 64), 100),
        F.cross_entropy,
    ),
    "mlp": lambda: (mlp.mlp(768, (256, 256, 1024)), *class_batch((32, 3, 16, 16)), F.cross_entropy),
    "resnet": lambda: (resnet.resnet18(width=16), *class_batch((4, 3, 64, 64)), F.cross_entropy),
    "transformer": lambda: (
        transformer.transformer(vocabulary=500, width=64, depth=2, time=32),
        transformer.example(8, 32, 500),
        transformer.target(8, 32, 500),
        transformer.loss,
    ),
}
"""The examples at a reduced size: model, example, target, loss."""

STRATEGIES = {
    "single_device": 1,
    "data_parallel": 2,
    "data_parallel(sync_batchnorm=True)": 2,
    "parameter_server": 3,
    "parameter_server(beside=True)": 2,
    "layer_separation(n_c=2, n_f=1)": 3,
    "layer_separation(n_c=1, n_f=2)": 3,
    "hybrid_single": 2,
    "late_multiply": 2,
    "modulo_shard(mp=2, scheme=BK)": 2,
    "modulo_shard(mp=2, scheme=B)": 2,
    "modulo_shard(mp=2, scheme=B/K)": 4,
}
"""Strategy -> ranks."""


@cache
def example(name: str, autocast: torch.dtype | None = None) -> tuple[tuple[nn.Module, Any, Any, Any], Program]:
    """One of MODELS, and what is known of it."""
    given = MODELS[name]()
    return given, analyse(*given, autocast=autocast)


def program(name: str, strategy: str, autocast: torch.dtype | None = None, **options: Any) -> CompiledProgram:
    (model, inputs, target, loss), known = example(name, autocast)
    world = STRATEGIES[strategy]
    return compiled(model, inputs, target, loss, world, strategy, analysed=known, autocast=autocast, **options)


def assert_as_measured(
    done: CompiledProgram, copies: int = 1, accumulate: int = 1, activations: float = 0.05
) -> list[tuple[RankMemory, Measured]]:
    """Compare every rank's prediction with what it really has; activations within this part."""
    found = measured(done, OPTIMIZERS[copies], accumulate)
    pairs = [(memory_of(done.program, rank, copies, accumulate), real) for rank, real in enumerate(found)]
    for rank, (memory, real) in enumerate(pairs):
        exact = (memory.parameters, memory.buffers, memory.gradients, memory.optimizer_state)
        assert exact == (real.parameters, real.buffers, real.gradients, real.optimizer_state), f"rank {rank}"
        assert memory.activations == pytest.approx(real.saved, rel=activations), f"rank {rank}"
    return pairs


# -- its parts ---------------------------------------------------------------------------------------------------------


def test_a_trainable_parameter_counts_with_its_gradient_and_optimizer_state_and_others_are_held() -> None:
    assert needed_nbytes([WEIGHT], saved=1000, communication=30) == 600 + 1000 + 30
    assert [needed_nbytes([WEIGHT], 0, optimizer_copies=copies) for copies in (2, 0)] == [800, 400]
    assert gradient_nbytes([FROZEN, BUFFER]) == 0
    assert needed_nbytes([FROZEN, BUFFER], saved=0) == 440


# -- what ranks really have --------------------------------------------------------------------------------------------


ROUNDS = [("local_sgd(period=1)", 1), ("independent_subnets(local_steps=1)", 2), ("local_sgd(period=1)", 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "copies"), ROUNDS)
def test_the_peak_is_there_when_a_round_ends_and_the_next_begins(strategy: str, copies: int) -> None:
    """Of subnets the slices, with gradients and state, beside the parameters and state that a rank owns."""
    x, y = class_batch((16, INPUTS), classes=CLASSES)
    done = compiled(Chain(125, 128), (x,), y, F.cross_entropy, 3, strategy)
    for rank, real in enumerate(measured(done, OPTIMIZERS[copies])):
        memory = memory_of(done.program, rank, copies)
        assert memory.gradients == real.gradients
        if "subnets" not in strategy:
            assert memory.peak == pytest.approx(real.peak, rel=0.002)
        else:  # between rounds a rank has what it owns
            dealt = memory.parameters - real.parameters
            assert real.peak <= memory.peak <= 1.12 * real.peak, "messages of a round are on their way together"
            assert memory.optimizer_state == real.optimizer_state + copies * dealt
            assert 0 <= real.gradients - dealt < 0.01 * dealt, "and the bias of the last layer"
            assert memory.activations < real.saved - 0.8 * dealt, "slices are parameters, not activations"


STATES = [("parameter_server(beside=True)", 2), ("data_parallel", 2), ("modulo_shard(mp=2, scheme=BK)", 0)]


@pytest.mark.slow
@sampled(("strategy", "copies"), STATES, one_in=3)
def test_the_state_of_an_optimizer_is_exact(strategy: str, copies: int) -> None:
    assert_as_measured(planned(2, strategy), copies)


KINDS = ["single_device", "modulo_shard(mp=2, scheme=B)", "layer_separation(n_c=2, n_f=1)", "data_parallel"]
OF_KINDS = [(name, KINDS[k % 4]) for k, name in enumerate(name for name in CASES if name != "recurrent")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), thinned(OF_KINDS))
def test_models_of_every_kind_have_the_bytes_that_were_predicted(name: str, strategy: str) -> None:
    given = CASES[name].make()
    try:
        done = compiled(*given, STRATEGIES[strategy], strategy)
    except PlacementError:
        pytest.skip("the model has no plan of this strategy")
    assert_as_measured(done)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"), thinned([*zip(cycle(MODELS), [*STRATEGIES][::2]), ("resnet", "data_parallel")])
)
def test_the_examples_have_the_bytes_that_were_predicted(name: str, strategy: str) -> None:
    assert_as_measured(program(name, strategy))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single_device", "modulo_shard(mp=2, scheme=BK)"])
def test_ranks_under_autocast_have_the_bytes_that_were_predicted(strategy: str) -> None:
    assert_as_measured(program("transformer", strategy, BF16))


@pytest.mark.slow
def test_autocast_narrows_activations_and_keeps_casts_of_weights() -> None:
    few, many = (memory_of(program("transformer", "single_device", dtype).program, 0) for dtype in (BF16, None))
    assert few.activations < 0.8 * many.activations
    few, many = (memory_of(program("mlp", "single_device", dtype).program, 0) for dtype in (BF16, None))
    first = 4 * 768 * 256  # whose input needs no gradient, so that its weight is not kept
    assert few.activations >= 0.5 * (few.parameters - first) + 0.4 * many.activations


@pytest.mark.slow
def test_what_is_on_around_a_prediction_does_not_change_it() -> None:
    done = planned(2, "data_parallel", norm=True).program
    with torch.no_grad(), torch.autocast("cpu", BF16):
        inside = memory_of(done, 0)
    assert inside == memory_of(done, 0)


@pytest.mark.slow
def test_dropout_keeps_a_mask_for_backward() -> None:
    without, with_it = (compile_net(Net(drop=drop), "data_parallel", 2) for drop in (0.0, 0.5))
    masked = memory_of(with_it.program, 0).activations - memory_of(without.program, 0).activations
    assert masked >= 4 * 36  # (4, 36) bool
    assert_as_measured(with_it)


@pytest.mark.slow
def test_a_recurrent_layer_has_at_least_the_bytes_that_were_predicted() -> None:
    """OneDNN keeps a workspace of its own besides."""
    (real,) = measured(done := compiled(*CASES["recurrent"].make(), 1, "single_device"))
    memory = memory_of(done.program, 0)
    assert (memory.parameters, memory.gradients) == (real.parameters, real.gradients)
    assert 0 < memory.activations <= real.saved


@pytest.mark.slow
def test_turns_keep_the_activations_of_one_turn() -> None:
    at_once, in_turns = (memory_of(program("mlp", f"modulo_shard(mp=2, scheme={s})").program, 0) for s in ("BK", "B"))
    assert in_turns.activations < 0.7 * at_once.activations


@pytest.mark.slow
def test_gradients_of_earlier_batches_are_there_while_the_next_goes_forward() -> None:
    assert_as_measured(planned(2, "data_parallel"), accumulate=2)
    done = compiled(*CASES["resnet"].make(), 1, "single_device")  # its activations are larger than its parameters
    one, two = (memory_of(done.program, 0, accumulate=n) for n in (1, 2))
    assert two.gradients == one.gradients and one.peak < two.peak <= one.peak + one.gradients
    assert two.peak == pytest.approx(measured(done, accumulate=2)[0].peak, rel=0.01)


@pytest.mark.slow
def test_updates_in_every_turn_need_the_gradients_of_one() -> None:
    assert_as_measured(planned(2, "modulo_shard(mp=2, scheme=B, updates=every)"))


@pytest.mark.slow
def test_the_server_of_averages_needs_more_than_the_other_ranks() -> None:
    server, *others = memory_of_all(planned(3, "local_sgd(period=2, through=server)").program)
    assert server.peak > others[0].peak == others[1].peak


@pytest.mark.slow
def test_a_rank_without_work_needs_nothing() -> None:
    assert memory_of(planned(2, "single_device").program, 1) == RankMemory(0, 0, 0, 0, 0, 0, peak=0)


@pytest.mark.slow
def test_ranks_that_are_alike_are_followed_once_and_get_the_same_figures() -> None:
    for strategy in ("layer_separation(ranks=2+1+1)", "modulo_shard(mp=2)", "parameter_server(servers=2)"):
        done = planned(4, strategy, global_batch=13).program
        assert memory_of_all(done) == tuple(memory_of(done, rank) for rank in range(4))


# -- the peak ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "autocast"), [*((name, None) for name in MODELS), ("transformer", BF16)])
def test_the_peak_is_what_the_allocator_hands_out_at_once(name: str, autocast: torch.dtype | None) -> None:
    done = program(name, "single_device", autocast)
    assert memory_of(done.program, 0).peak == pytest.approx(allocator_peak(done), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("copies", [2, 0])
def test_the_peak_may_be_in_the_update(copies: int) -> None:
    done = program("mlp", "single_device")
    assert memory_of(done.program, 0, copies).peak == pytest.approx(allocator_peak(done, OPTIMIZERS[copies]), rel=0.05)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["modulo_shard(mp=2, scheme=B/K)"])
def test_processes_have_the_peak_that_was_predicted(strategy: str, tmp_path: Path) -> None:
    done = program("alexnet", strategy)
    for memory, real in zip(memory_of_all(done.program), in_processes(done, tmp_path), strict=True):
        assert memory.peak == pytest.approx(real.peak, rel=0.02)
        assert memory.gradients == real.gradients and memory.activations == real.saved
