"""Groups of ranks that train by themselves and average: SplitBrain's averaging period between model-parallel groups."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.cost_models.network.alpha_beta import through_server
from splitc.errors import LaunchError, PlacementError
from splitc.ir.device import Link
from splitc.ir.program import Program
from splitc.ir.wire import wire
from splitc.ir.wire_op import What
from splitc.runtime.worker import Worker
from splitc.specialise import Settings, specialise
from splitc.strategies.modulo_shard import ModuloShard
from tests.end_to_end.test_in_batch import TwoTowers
from tests.runtime.rounds.test_local_sgd import EXACT, Pair
from tests.runtime.rounds.test_outer_optimizer import stream
from tests.support.compiled import CLUSTER, analyse, compiled
from tests.support.ranks import adam, assert_same, on_workers, sgd, train
from tests.support.sampling import along
from tests.support.units import train_units

WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=torch.double)


class Split(nn.Module):
    """Convolutions, and linear layers to divide; with `tied`, a weight on both sides of the cut."""

    def __init__(self, norm: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.first = nn.Linear(48, 24)
        self.second = nn.Linear(24, 24)
        self.third = nn.Linear(24, 4)
        self.gain = nn.Parameter(torch.randn(24))
        self.tied = tied

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.conv(images)).relu().flatten(1)
        hidden = torch.cat([hidden[:, :24] * self.gain, hidden[:, 24:]], 1) if self.tied else hidden
        hidden = self.second(self.first(hidden).relu()).relu()
        scores: Tensor = self.third(hidden * self.gain if self.tied else hidden)
        return scores


def weighted(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target, weight=WEIGHTS)


def batch_of(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 1, 6, 6, dtype=torch.double), torch.randint(4, (examples,))


@cache
def known(kind: str = "", loss: Any = F.cross_entropy) -> tuple[nn.Module, Program]:
    torch.manual_seed(4)
    model = Split(norm=kind == "norm", tied=kind == "tied").double()
    return model, analyse(model, *batch_of(4), loss)


def planned(
    strategy: str, world: int = 4, kind: str = "", loss: Any = F.cross_entropy, **options: Any
) -> CompiledProgram:
    model, program = known(kind, loss)
    return compiled(model, *batch_of(4), loss, world, strategy, analysed=program, **options)


@pytest.mark.slow
@along(1, scheme=["B/K", "BK", "B"], loss=[weighted, F.cross_entropy], optimizer=[adam, sgd])
def test_groups_are_exact_trainings_averaged_by_hand(scheme: str, loss: Any, optimizer: Any) -> None:
    sizes = [3, 4, 5, 2]
    batches = [batch_of(sum(sizes)) for _ in range(5)]
    program = planned(f"modulo_shard(mp=2, scheme={scheme}, period=2)", loss=loss)
    assert any(place.holding == "sharded" for place in program.plan.placements.values())
    results = on_workers(program, lambda worker: train(worker, batches, sizes), optimizer=optimizer)
    model = known(loss=loss)[0]
    losses, state = train_units(model, batches, [[7, 7]] * 5, 2, optimizer, loss)
    assert_same(results[0][1], state, EXACT)
    for rank, (found, _) in enumerate(results):
        for k in (0, 2, 4):
            assert found[k] == pytest.approx(losses[rank // 2][k], rel=EXACT)
        assert found[1] == pytest.approx((losses[0][1] + losses[1][1]) / 2, rel=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "mp"), [(6, 3), (8, 4)])
def test_groups_of_any_size_count_by_their_examples(world: int, mp: int) -> None:
    sizes = [2 + rank % 3 + rank // mp for rank in range(world)]
    of_units = [sum(sizes[k : k + mp]) for k in range(0, world, mp)]
    batches = [batch_of(sum(sizes)) for _ in range(4)]
    results = on_workers(
        planned(f"modulo_shard(mp={mp}, period=3)", world), lambda worker: train(worker, batches, sizes), clip_norm=0.5
    )
    _, state = train_units(known()[0], batches, [of_units] * 4, 3, clip_norm=0.5)
    assert_same(results[0][1], state, EXACT)


@pytest.mark.slow
def test_layers_that_share_a_parameter_stay_in_one_role() -> None:
    sizes = [3, 3, 3, 3]
    batches = [batch_of(12) for _ in range(5)]
    program = planned("modulo_shard(mp=2, period=2)", kind="tied")
    got = on_workers(program, lambda worker: train(worker, batches, sizes))[0][1]
    assert_same(got, train_units(known("tied")[0], batches, [[6, 6]] * 5, 2)[1], EXACT)
    plan = program.plan
    apart = replace(plan, placements={**plan.placements, "gain#2": replace(plan.placements["gain#2"], role="fc")})
    with pytest.raises(LaunchError, match="rounds: gain is used in several roles"):
        specialise(known("tied")[1], Settings(4, cluster=CLUSTER), apart)


@pytest.mark.slow
def test_groups_have_an_outer_optimizer_and_fragments_too() -> None:
    sizes = [3, 4, 5, 2]
    batches = [batch_of(14) for _ in range(6)]
    options = ModuloShard(2, period=3, outer_lr=0.7, outer_momentum=0.9, fragments=2, delay=1)
    program = planned(str(options))
    own: list[list[str]] = [[], []]
    for stage in program.program.stages:
        for bucket, fragment in zip(stage.averaged, stage.fragments, strict=True):
            own[fragment] += bucket
    got = on_workers(program, lambda worker: train(worker, batches, sizes))[0][1]
    assert_same(got, stream(known()[0], batches, [7, 7], 3, own, 1, None), EXACT)


@pytest.mark.slow
def test_batchnorm_is_synchronised_within_a_group() -> None:
    sizes = [3, 4, 5, 2]
    batches = [batch_of(14) for _ in range(4)]
    program = planned("modulo_shard(mp=2, period=2, sync_batchnorm=True)", kind="norm")
    got = on_workers(program, lambda worker: train(worker, batches, sizes))[0][1]
    assert_same(got, train_units(known("norm")[0], batches, [[7, 7]] * 4, 2)[1], EXACT)


@pytest.mark.slow
def test_a_group_has_an_in_batch_loss_of_its_own_examples() -> None:
    torch.manual_seed(3)
    model = TwoTowers().double()
    example = (torch.randn(4, 8).double(), torch.randn(4, 6).double())
    program = compiled(model, example, None, None, 4, "modulo_shard(mp=2, period=2)")
    batches = [(torch.randn(16, 8).double(), torch.randn(16, 6).double()) for _ in range(4)]
    got = on_workers(program, lambda worker: train(worker, batches))[0][1]
    units = train_units(Pair(model), [(torch.cat(batch, 1),) for batch in batches], [[8, 8]] * 4, 2)[1]
    assert_same(got, {key.removeprefix("model."): tensor for key, tensor in units.items()}, EXACT)


@pytest.mark.slow
def test_what_groups_cannot_do_is_refused() -> None:
    for options, why in (
        ("mp=4, period=2", "groups of mp = 4 do not divide 4 ranks into several"),
        ("mp=2, outer_lr=0.7", "outer_lr needs a period"),
        ("mp=2, period=0", "period is 0"),
    ):
        with pytest.raises(PlacementError, match=re.escape(why)):
            planned(f"modulo_shard({options})")


# -- through a server --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world", "units"),
    [
        ("local_sgd(period=3, through=server, fragments=2, delay=1, mixing=0.25)", 3, [[2], [3], [4]]),
        ("modulo_shard(mp=2, period=2, through=server)", 4, [[3, 4], [5, 2]]),
    ],
)
def test_a_server_averages_as_peers_do(strategy: str, world: int, units: list[list[int]]) -> None:
    sizes = [size for unit in units for size in unit]
    batches = [batch_of(sum(sizes)) for _ in range(5)]
    states = [
        on_workers(planned(text, world), lambda worker: train(worker, batches, sizes))[0][1]
        for text in (strategy, strategy.replace("through=server", "through=peers"))
    ]
    assert states[1] is not None
    assert_same(states[0], states[1], EXACT)


@pytest.mark.slow
def test_a_server_sends_and_receives_what_all_others_have() -> None:
    program = planned("local_sgd(period=2, through=server)", 3)
    parameters = sum(p.nbytes for name, p in known()[0].named_parameters() if name != "gain")

    def sent(worker: Worker) -> int:
        before = worker.rank.sent_bytes
        for _ in range(2):
            worker.step(*batch_of(4))
        return worker.rank.sent_bytes - before - 2 * 2 * 8 // 3  # of the loss at the round's end

    expected = [2 * parameters, parameters, parameters]
    assert on_workers(program, sent) == expected
    of_wire = [
        sum(op.sent for op in wire(program.program, rank) if op.payload.what is What.AVERAGE) for rank in range(3)
    ]
    assert of_wire == expected
    assert "through the first one" in program.files["all.py"]
    assert through_server(1e9, 4, Link(1e9, 1e-3)) == pytest.approx(2 * (1e-3 + 3))
    assert [phases.rank for phases in program.plan.prediction.phases] == [0, 1, 2]
