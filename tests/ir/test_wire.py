"""What a rank counts in a step is what its program is defined to send, and what its transport sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.ir.placements import Placement
from splitc.ir.program import LoweredProgram, Program
from splitc.ir.transitions import transition_of
from splitc.ir.wire import wire
from splitc.ir.wire_op import What, WireOp
from splitc.runtime.collectives.layouts import Transition
from splitc.runtime.spec import Rounds
from tests.support.compiled import compiled
from tests.support.every_strategy import Asked, Small, images, planned
from tests.support.models import Made
from tests.support.sampling import sampled
from tests.support.transitions import TRANSITIONS
from tests.support.wire_bytes import assert_defined

LOSS = 8  # bytes of the loss, which is summed in float64


@sampled("strategy", ["modulo_shard(mp=3,scheme=BK)", "layer_separation(n_c=2, n_f=1)", "data_parallel"], one_in=3)
def test_so_it_does_with_norms_that_are_synchronised(strategy: str) -> None:
    text = f"{strategy[:-1]},sync_batchnorm=True)" if strategy.endswith(")") else f"{strategy}(sync_batchnorm=True)"
    pins = {"conv": "conv", "fc8": "fc"} if strategy.startswith("layer") else {}
    program = planned(3, text, norm=True, pins=pins)
    (ops,) = {tuple(op.payload for op in ops_of(program.program, rank, "norm")) for rank in (0, 1)}
    assert len(ops) == 2, "one sum in forward and one in backward"
    assert_defined(program, images(program.plan.global_batch))


def over_time() -> nn.Module:
    """Linear layers on (batch, time, features), after an embedding."""
    parts = {"embed": nn.Embedding(11, 6), "up": nn.Linear(6, 9), "down": nn.Linear(9, 7, bias=False)}
    return Made(lambda m, x: m.down(torch.tanh(m.up(m.embed(x)))), **parts)


def token_loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=3)


def tokens(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (examples, 5)), torch.randint(7, (examples, 5))


def branches() -> nn.Module:
    """Linear layers on (batch, time, features), of which two read one value."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.last(torch.tanh(m.left(h)) * torch.sigmoid(m.right(h))).mean(1)

    sizes = {"first": (5, 7, False), "left": (7, 6, True), "right": (7, 6, False), "last": (6, 4, False)}
    return Made(run, **{name: nn.Linear(*size) for name, size in sizes.items()})


COLUMNS, ROWS = Placement(holding="sharded", split="columns"), Placement(holding="sharded", split="rows")
BATCH, WHOLE = Placement(state="batch"), Placement(state="replicate")
OF_STATES = {  # of first, left, right and last
    "batch then features then batch": (BATCH, COLUMNS, COLUMNS, replace(ROWS, state="batch")),
    "rows of own examples": (BATCH, replace(ROWS, state="batch"), replace(ROWS, state="batch"), BATCH),
    "a whole value in parts of both kinds": (replace(ROWS, state="replicate"), COLUMNS, ROWS, ROWS),
    "features that are own examples": (replace(COLUMNS, state="batch"), BATCH, COLUMNS, WHOLE),
    "sums of features": (replace(ROWS, state="features"), replace(ROWS, state="features"), COLUMNS, COLUMNS),
    "gathered and read in parts": (COLUMNS, COLUMNS, ROWS, WHOLE),
    "a sum in parts and own": (replace(ROWS, state="replicate"), COLUMNS, BATCH, BATCH),
    "divided and own": (BATCH, COLUMNS, BATCH, BATCH),
    "whole, then own": (WHOLE, replace(COLUMNS, state="replicate"), WHOLE, BATCH),
    "own, then whole": (BATCH, WHOLE, BATCH, WHOLE),
}


def of_states(name: str, size: int, **options: Any) -> CompiledProgram:
    pins = dict(zip(("first", "left", "right", "last"), OF_STATES[name], strict=True))
    pins = {layer: replace(pin, holding=pin.holding or "replicated", group=size) for layer, pin in pins.items()}
    x, y = timed(4)
    return compiled(branches(), (x,), y, F.cross_entropy, 2 * size, "mixed", pins=pins, **options)


def timed(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 3, 5), torch.randint(4, (examples,))


@pytest.mark.slow
@sampled(("k", "name"), list(enumerate(OF_STATES)), one_in=10)
def test_every_rank_counts_the_bytes_of_every_transition(k: int, name: str) -> None:
    program = of_states(name, (3, 2)[k % 2], global_batch=(None, 11, 12)[k % 3])
    assert_defined(program, timed(program.plan.global_batch))


@pytest.mark.slow
def test_those_are_all_transitions() -> None:
    found: set[Transition] = set()
    for name in OF_STATES:
        for stage in of_states(name, 2).program.stages:
            found |= {each for node in stage.graph.nodes if (each := transition_of(node)) is not None}
    assert found == set(TRANSITIONS), set(TRANSITIONS) - found


TIMED = ["late_multiply", "modulo_shard(mp=2,scheme=B/K)", "hybrid_single"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", TIMED)
def test_so_it_does_with_values_that_have_a_time_dimension(strategy: str) -> None:
    x, y = tokens(4)
    assert_defined(compiled(over_time(), (x,), y, token_loss, 4, strategy), tokens(16))


# -- the closed forms of the papers ------------------------------------------------------------------------------------


def ops_of(program: LoweredProgram, rank: int, *words: str) -> list[WireOp]:
    """The operations of a rank whose payload has one of `words` in its text."""
    return [op for op in wire(program, rank) if any(word in str(op.payload) for word in words)]


def nbytes(program: Program, *layers: str) -> int:
    return sum(program.tensors[h].nbytes for layer in layers for h in program.layer(layer).tensors)


@pytest.mark.parametrize("world", [3, 4])
def test_data_parallelism_sends_the_gradients_as_a_ring_does(world: int) -> None:
    program = planned(world, "data_parallel").program
    gradients = sum(h.nbytes for h in program.tensors.values())
    for rank in range(world):
        (bucket,) = ops_of(program, rank, "bucket")
        assert bucket.sent == pytest.approx(2 * (world - 1) / world * gradients)


@pytest.mark.parametrize("period", [1, 2, 10])
def test_local_sgd_sends_every_parameter_once_a_round(period: int) -> None:
    program = planned(4, f"local_sgd(period={period})").program
    parameters = sum(h.nbytes for h in program.tensors.values())
    for rank in range(4):
        (average,), (loss,) = ops_of(program, rank, "average"), ops_of(program, rank, "loss")
        assert average.sent == pytest.approx(2 * 3 / 4 * parameters)
        assert average.per_step == pytest.approx(average.sent / period)
        assert loss.per_step == pytest.approx(loss.sent / period), "a rank that trains alone has its own loss"


def test_units_of_ranks_sum_their_own_loss_within_a_round() -> None:
    program = planned(4, "local_sgd(period=5)").program
    program = replace(program, plan=replace(program.plan, rounds=Rounds(5, unit=2)))
    losses = ops_of(program, 3, "loss")
    assert [(op.ranks, op.times) for op in losses] == [((2, 3), pytest.approx(0.8)), ((0, 1, 2, 3), 0.2)]


@pytest.mark.parametrize(("world", "beside"), [(4, True), (3, False)])
def test_workers_push_and_pull_the_model_and_servers_sum_for_all_of_them(world: int, beside: bool) -> None:
    """Stanza equation (6): a worker pushes P bytes; servers send P to every worker, but what one serves itself."""
    program = planned(world, f"parameter_server(beside={beside})").program
    P = sum(h.nbytes for h in program.tensors.values())
    sent = [sum(op.sent for op in ops_of(program, rank, "push", "pull")) for rank in range(world)]
    if beside:
        assert sum(sent) == 2 * (world - 1) * P
        assert max(sent) - min(sent) <= 0.25 * P, "each server has its part"
    else:
        assert sent == [P] * (world - 1) + [(world - 1) * P]


@pytest.mark.parametrize("world", [3, 4])
def test_a_separation_sends_activations_there_gradients_back_and_sums_what_convolutions_hold(world: int) -> None:
    """Stanza 4.1: a conv rank sends its activations and sums P_c, the fc rank returns as many bytes of gradients."""
    strategy = f"layer_separation(n_c={world - 1}, n_f=1)"
    program = planned(world, strategy, pins={"conv": "conv", "fc*": "fc"}).program
    n_c, batch, activations, target = world - 1, 4, 27 * 4, 8
    ring = 2 * (world - 1) / world * LOSS
    for rank in range(n_c):
        conv = 2 * (n_c - 1) / n_c * nbytes(program, "conv")
        assert sum(op.sent for op in wire(program, rank)) == pytest.approx(batch * (activations + target) + conv + ring)
    assert sum(op.sent for op in wire(program, n_c)) == pytest.approx(n_c * batch * activations + ring)


@pytest.mark.parametrize("world", [3, 4])
def test_hybrid_parallelism_sends_neurons_and_sums_convolutions_only(world: int) -> None:
    """Practical Lessons 2.2: O(|N|), not O(|W|); the fc rank has its own part of every value already."""
    program = planned(world, "hybrid_single", pins={"conv": "conv", "fc*": "fc"}).program
    batch, activations, target = 4, 27 * 4, 8
    sums = 2 * (world - 1) / world * (nbytes(program, "conv") + LOSS)
    assert sum(op.sent for op in wire(program, 0)) == pytest.approx((world - 1) * batch * activations + sums)
    for rank in range(1, world):
        assert sum(op.sent for op in wire(program, rank)) == pytest.approx(batch * (activations + target) + sums)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "scheme", "turns"), [(2, "BK", 1), (4, "B", None), (3, "B/K", None)])
def test_a_modulo_layer_sends_its_ranks_examples_to_the_others_and_takes_their_gradients(
    world: int, scheme: str, turns: int | None
) -> None:
    """SplitBrain 3.1: in a turn of B/K a rank gives B/K examples to each of K - 1 others, and returns B - B/K."""
    pins = {"fc6": Placement(holding="sharded", group=world, split="columns")}
    program = planned(world, f"modulo_shard(mp={world},scheme={scheme})", pins=pins, global_batch=12 * world).program
    K, batch, example = world, 12, 27 * 4
    for rank in range(world):
        there, back = ops_of(program, rank, "entry cut0"), ops_of(program, rank, "entry_grad cut0")
        assert len(there) == len(back) == (turns or K)
        assert sum(op.sent for op in there) == sum(op.sent for op in back) == (K - 1) * batch * example
        if scheme == "B/K":
            assert {op.sent for op in (*there, *back)} == {(K - 1) / K * batch * example}


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_a_shard_layer_sends_its_features_and_returns_the_others(world: int) -> None:
    """SplitBrain 3.2: of B examples 1/K of the features go to K - 1 others, gradients of (K-1)/K come back."""
    every = {"fc*": Placement(holding="sharded", group=world, split="columns")}
    model = Small()
    model.fc6, model.fc7, model.fc8 = nn.Linear(27, 12 * world), nn.Linear(12 * world, 24), nn.Linear(24, 12)
    x, y = images(4)
    program = compiled(model, (x,), y, F.cross_entropy, world, f"modulo_shard(mp={world},scheme=B/K)", pins=every)
    K, batch, features = world, 4, 12 * world
    for rank in range(world):
        ops = ops_of(program.program, rank, "relu_1_whole")
        forward = [op for op in ops if op.payload.what is What.NODE]
        backward = [op for op in ops if op.payload.what is What.NODE_GRADIENT]
        assert len(forward) == len(backward) == K
        # B/K does not divide the batch for K = 3: over all turns it does
        assert sum(op.sent for op in forward) == K * (K - 1) * batch * features // K * 4
        assert sum(op.sent for op in backward) == K * (K - 1) * batch * features // K * 4


@pytest.mark.parametrize("world", [3, 4])
def test_late_multiply_gathers_inputs_and_errors_and_sums_no_gradient_of_the_layer(world: int) -> None:
    """Practical Lessons 2.1: an all-gather of X, M x N, and of E, M x K."""
    program = planned(world, Asked("", "late_multiply", {"fc*": Placement(sync="late_multiply")})).program
    for rank in range(world):
        (gather,) = ops_of(program, rank, "X, E")
        M, features = 4 * world, {"fc8": 13 + 5, "fc7": 14 + 13, "fc6": 27 + 14}
        assert gather.payload.name == "fc6"  # whose error is the last
        assert gather.shape == (M * sum(features.values()),)
        assert gather.sent == (world - 1) * 4 * 4 * sum(features.values())
        for layer, width in features.items():
            assert gather.sent_for(layer) == pytest.approx((world - 1) * 4 * 4 * width)
        (bucket,) = ops_of(program, rank, "bucket")
        assert bucket.shape == (sum(p.numel() for p in Small().conv.parameters()),)
