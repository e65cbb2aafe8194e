"""Pins of fully connected layers: what they mix, and what is said of those that cannot be followed."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitc.errors import PlacementError
from splitc.ir.placements import Placement
from splitc.ir.plan import Plan
from tests.support.compiled import compiled
from tests.support.every_strategy import planned
from tests.support.models import Made


def pinned(world: int, strategy: str = "mixed", **pins: str | Placement) -> Plan:
    return planned(world, strategy, pins=pins).plan


def of_tokens(tied: bool, strategy: str = "auto", **pins: str | Placement) -> Plan:
    """Of an embedding and a linear layer, whose weight may be the same."""
    embed, head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
    head.weight = embed.weight if tied else head.weight
    model = Made(lambda m, x: m.head(torch.tanh(m.embed(x).sum(1))), embed=embed, head=head)
    x, y = torch.randint(9, (4, 3)), torch.randint(9, (4,))
    return compiled(model, (x,), y, F.cross_entropy, 2, strategy, pins=pins).plan


def test_pins_mix_what_strategies_do_layer_by_layer() -> None:
    late = Placement(sync="late_multiply")
    plan = pinned(4, fc6=Placement(holding="sharded", group=2), fc7=late, fc8="fc")
    assert plan.strategy == "mixed" and plan.exact
    got = {layer: (p.role, p.holding, p.sync, p.group) for layer, p in plan.placements.items()}
    assert got == {
        "conv": ("stage0", "replicated", "all_reduce", None),
        "fc6": ("stage1", "sharded", "all_reduce", 2),
        "fc7": ("stage2", "replicated", "late_multiply", None),
        "fc8": ("stage3", "replicated", "none", None),
    }


def test_without_pins_for_holdings_and_syncs_nothing_is_mixed() -> None:
    with pytest.raises(PlacementError, match="mixed is not possible: no pin asks for a holding or a sync"):
        pinned(4)
    with pytest.raises(PlacementError, match="asks for a holding or a sync; use layer_separation for the role of fc8"):
        pinned(4, fc8="fc")


def test_a_layer_pinned_to_be_whole_is_not_late_multiplied_or_divided() -> None:
    plan = pinned(4, "late_multiply", fc7=Placement(sync="all_reduce"))
    assert plan.placements["fc7"].sync == "all_reduce"
    plan = pinned(4, "modulo_shard(mp=2)", fc7=Placement(holding="replicated"))
    assert plan.placements["fc7"].holding == "replicated"


REFUSED: dict[str, tuple[str, dict[str, str | Placement], str]] = {
    "late_multiply of what one rank has": ("hybrid_single", {"fc6": Placement(sync="late_multiply")}, "pin 'fc6' asks"),
    "late_multiply in groups": (
        "modulo_shard", {"fc6": Placement(sync="late_multiply")}, "sync 'late_multiply' of fc6"),
    "groups and late multiply": (
        "mixed", {"fc6": Placement(sync="late_multiply", group=2)}, "groups and for late multiply of fc6, but only"),
    "subnets": (
        "mixed", {"fc6": Placement(holding="subnet")}, "asks for holding 'subnet' of fc6, but mixed has only"),
    "a role that no strategy has with a holding": (
        "modulo_shard", {"fc6": "fc2"}, "role 'fc2' of fc6, but modulo_shard has only conv, fc"),
    "no sync of what many ranks train": (
        "data_parallel", {"fc6": Placement(sync="none")}, "sync 'none' of fc6, whose gradient must be summed"),
    "no sync of what servers hold": (
        "parameter_server", {"fc6": Placement(sync="none")}, "sync 'none' of fc6, whose gradient must be summed"),
    "a split where nothing is divided": (
        "single_device", {"fc7": Placement(split="rows")}, "split 'rows' of fc7, but single_device divides no layer$"),
    "a split of what is whole": (
        "modulo_shard", {"fc7": Placement(holding="replicated", split="rows")}, "'rows' of fc7, which is not sharded"),
    "groups of what is below them": (
        "modulo_shard", {"fc7": Placement(role="conv", holding="sharded")}, "role 'conv' of fc7 and for groups"),
    "groups of one rank": (
        "mixed", {"fc6": Placement(holding="sharded", group=1)}, "asks fc6 to be sharded in groups of 1"),
    "groups on one rank": (
        "mixed", {"fc6": Placement(role="fc", group=2), "fc7": Placement(sync="late_multiply")},
        "pin 'fc6' asks for groups of 2 of fc6 on one rank"),
    "servers in a mixture": (
        "mixed", {"fc6": Placement(sync="parameter_server"), "fc7": Placement(holding="sharded")},
        "pin 'fc6' asks for sync 'parameter_server' of fc6, but mixed has only all_reduce, late_multiply, none"),
    "all reduced where late multiply was asked for": (
        "late_multiply", {"fc*": Placement(sync="all_reduce")}, r"or table is left to multiply late \(pin"),
    "cuts that pins leave none of": (
        "layer_separation(ranks=1+1)", {"*": "conv"}, "in every role and keeps to the pins: conv is pinned by"),
    "no sync of convolutions": ("hybrid_single", {"conv": Placement(sync="none")}, "conv is pinned by 'conv'"),
    "groups of a size that does not divide the ranks": (
        "mixed", {"fc6": Placement(holding="sharded", group=3)}, r"fc6.*group.*3|group.*3.*fc6"),
    "groups of another size than mp": (
        "modulo_shard(mp=2)", {"fc6": Placement(group=4)}, r"fc6.*group.*4|group.*4.*fc6"),
    "groups of no ranks": ("mixed", {"fc6": Placement(holding="sharded", group=0)}, r"pin 'fc6'.*group"),
    "groups of a part of a rank": ("mixed", {"fc6": Placement(holding="sharded", group=2.0)}, r"pin 'fc6'.*group"),  # type: ignore[arg-type]
    "groups that are true": ("mixed", {"fc6": Placement(holding="sharded", group=True)}, r"pin 'fc6'.*group"),
    "groups of what is not linear": (
        "mixed", {"conv": Placement(holding="sharded", group=2)}, "asks conv to be sharded, but only linear"),
    "mp of what is not linear": (
        "modulo_shard(mp=2)", {"conv": Placement(holding="sharded", group=2)}, "asks conv to be sharded, but only"),
    "late multiply of what is not linear": (
        "late_multiply", {"conv": Placement(sync="late_multiply")}, "asks conv to be late-multiplied, but only linear"),
    "late multiply of a layer on one rank": (
        "mixed", {"fc6": Placement(role="fc", sync="late_multiply")}, "pin 'fc6'"),
    "no sync in a mixture": (
        "mixed", {"fc6": Placement(sync="none"), "fc7": Placement(sync="late_multiply")}, "sync 'none' of fc6, whose"),
    "no sync beside late multiply": ("late_multiply", {"fc6": Placement(sync="none")}, "sync 'none' of fc6, whose"),
    "a role that a mixture has not": (
        "mixed", {"fc6": "worker", "fc7": Placement(holding="sharded", group=2)}, "pin 'fc6' asks for role 'worker'"),
    "nothing left to divide": (
        "modulo_shard", {"fc*": Placement(holding="replicated")}, r"nothing is left to divide: no .*pin 'fc\*'"),
}  # fmt: skip


def test_pins_that_cannot_be_followed_are_refused_by_name() -> None:
    for name, (strategy, pins, words) in REFUSED.items():
        with pytest.raises(PlacementError) as error:
            pinned(2, strategy, **pins)
        assert re.search(words, str(error.value)), name


@pytest.mark.slow
def test_pins_of_tied_layers_are_refused_by_name() -> None:
    both = of_tokens(True, head=Placement(sync="late_multiply")).placements  # or neither
    assert both["embed"].sync == both["head"].sync == "late_multiply"
    with pytest.raises(PlacementError, match="embed and head share embed"):
        of_tokens(True, "mixed", head=Placement(holding="sharded"))
    both = of_tokens(True, head=Placement(holding="sharded")).placements
    assert both["embed"].holding == "sharded" and {both["embed"].split, both["head"].split} == {"rows", "columns"}


@pytest.mark.parametrize(("strategy", "other"), [("modulo_shard(mp=2)", "fc7"), ("mixed", "fc6")])
def test_no_sync_of_groups_that_have_replicas_is_refused(strategy: str, other: str) -> None:
    pins = {
        "fc6": Placement(sync="none"),
        other: Placement(sync="none" if other == "fc6" else None, holding="sharded", group=2),
    }
    with pytest.raises(PlacementError, match="sync 'none' of fc6, whose gradient must be summed"):
        pinned(4, strategy, **pins)


def test_groups_of_two_sizes_are_a_mixture_and_no_modulo_shard() -> None:
    pins = {"fc6": Placement(holding="sharded", group=4), "fc7": Placement(holding="sharded", group=2)}
    plan = planned(4, "mixed", pins=pins).plan
    assert plan.strategy == "mixed" and [grouping.size for grouping in plan.groups.values()] == [4, 2]
    with pytest.raises(PlacementError, match=r"asks for groups of 4 of fc6, but here all groups have 2 ranks"):
        pinned(4, "modulo_shard", **pins)
