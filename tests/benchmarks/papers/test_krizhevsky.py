"""The schemes BK, B and B/K: their turns, memory and bytes, against what compiled programs put on the wire."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from benchmarks.papers.conv_fc_split import conv_fc_split
from benchmarks.papers.krizhevsky import SCHEMES, Exchange
from splitc.compiled import CompiledProgram
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import CostError
from splitc.ir.placements import Placement
from splitc.ir.wire import wire
from splitc.ir.wire_op import WireOp
from tests.support.compiled import compiled
from tests.support.paper_models import SplitBrainVGG, splitbrain_vgg
from tests.support.sampling import along

LINK = replace(load_cluster("v100-10gbe").link, latency=0.0)
EACH = 8


@cache
def program(scheme: str, K: int) -> CompiledProgram:
    """SplitBrain's VGG on one group of K ranks of 8 images, divided from its first fc layer on."""
    given = (torch.randn(EACH, 3, 32, 32),), torch.randint(10, (EACH,))
    return compiled(
        SplitBrainVGG(), *given, F.cross_entropy, K, f"modulo_shard(mp={K},scheme={scheme})", analysed=splitbrain_vgg(),
        pins={"fc*": Placement(holding="sharded", group=K)}, global_batch=EACH * K,
    )  # fmt: skip


def activations(scheme: str, K: int, kind: str) -> list[list[WireOp]]:
    """For each rank, the operations that gather the activations ("entry") or their gradients ("entry_grad")."""
    (cut,) = {
        cut.name for stage in program(scheme, K).program.stages for cut in stage.receives if cut.spec.shape == (1, 4096)
    }
    ops = [wire(program(scheme, K).program, rank) for rank in range(K)]
    return [[op for op in each if (op.payload.what, op.payload.name) == (kind, cut)] for each in ops]


def exchange(scheme: str, K: int) -> Exchange:
    return Exchange(scheme, EACH, K, 4 * conv_fc_split(splitbrain_vgg()).A)


@pytest.mark.slow
@along(1, scheme=SCHEMES[::-1], K=[2, 4])
def test_compiled_programs_send_the_bytes_of_a_scheme_in_its_turns(scheme: str, K: int) -> None:
    expected = exchange(scheme, K)
    for kind in ("entry", "entry_grad"):
        by_rank = activations(scheme, K, kind)
        assert {len(ops) for ops in by_rank} == {expected.num_microbatches}
        assert sum(op.sent for ops in by_rank for op in ops) == expected.nbytes
    for turn in range(expected.num_microbatches):
        sent = [ops[turn].sent for ops in activations(scheme, K, "entry")]
        assert sum(s > 0 for s in sent) == expected.senders
        assert max(sent) == expected.sent_in_microbatch
        assert {op.shape[0] for op in (ops[turn] for ops in activations(scheme, K, "entry"))} == {expected.examples}


def test_all_schemes_move_the_same_bytes_and_work_on_all_examples() -> None:
    schemes = [Exchange(scheme, 128, 8, 9216 * 4) for scheme in SCHEMES]
    assert len({each.nbytes for each in schemes}) == 1
    assert {each.num_microbatches * each.examples for each in schemes} == {128 * 8}


def test_only_scheme_bk_needs_memory_that_grows_with_the_workers() -> None:
    few, many = ({scheme: Exchange(scheme, 128, K, 4.0).held for scheme in SCHEMES} for K in (2, 16))
    assert many["BK"] == 8 * few["BK"]
    assert many["B"] == few["B"] == many["B/K"] == few["B/K"] == 128 * 4


def test_taking_turns_as_the_only_sender_takes_k_times_as_long() -> None:
    for K in (2, 4, 8):
        seconds = {scheme: Exchange(scheme, 128, K, 9216 * 4).seconds(LINK) for scheme in SCHEMES}
        assert seconds["BK"] == pytest.approx(seconds["B/K"]) == pytest.approx((K - 1) * 128 * 9216 * 4 / 1.25e9)
        assert seconds["B"] == pytest.approx(K * seconds["B/K"])


def test_turns_cost_latency_and_half_duplex_links_time_where_workers_send_at_once() -> None:
    slow, half = replace(LINK, latency=1e-3), replace(LINK, duplex=False)
    for scheme in SCHEMES:
        each = Exchange(scheme, 64, 4, 1000.0)
        assert each.seconds(slow) - each.seconds(LINK) == pytest.approx(each.num_microbatches * 3 * 1e-3)
        assert each.seconds(half) == pytest.approx(each.seconds(LINK) * (1 if scheme == "B" else 2))


def test_one_worker_exchanges_nothing() -> None:
    for scheme in SCHEMES:
        alone = Exchange(scheme, 64, 1, 1000.0)
        assert alone.nbytes == alone.seconds(LINK) == 0 and alone.num_microbatches == 1


def test_what_is_no_scheme_and_parts_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(CostError, match="scheme 'K' is none of BK, B, B/K"):
        Exchange("K", 64, 4, 1.0)
    with pytest.raises(CostError, match="3 does not divide 64"):
        Exchange("B/K", 64, 3, 1.0)
    assert Exchange("B", 64, 3, 1.0).examples == 64
