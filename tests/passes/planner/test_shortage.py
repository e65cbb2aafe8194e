"""Plans without enough memory: the error names the roles that the plan has, and the ranks that are short."""

from __future__ import annotations

import re

import pytest

from splitc.errors import PlacementError
from splitc.ir.placements import Placement
from tests.support.every_strategy import planned
from tests.support.sampling import sampled

SHARDED = Placement(holding="sharded", group=2)

CASES: dict[str, tuple[dict[str, str | Placement], str]] = {
    "data_parallel": ({}, "each rank of role all (ranks 0 to 3) needs"),
    "late_multiply": ({}, "each rank of role all (ranks 0 to 3) needs"),
    "modulo_shard(mp=2)": ({}, "each rank of roles conv and fc (ranks 0 to 3) needs"),
    "auto": ({"fc6": SHARDED, "fc7": "conv", "fc8": "fc"}, "roles stage0, stage1, stage2 and stage3 (rank 0) needs"),
    "hybrid_single": ({}, "roles conv and fc (rank 0) needs"),
    "layer_separation(n_c=3, n_f=1)": ({}, "each rank of role conv (ranks 0 to 2) needs"),
    "layer_separation(ranks=2+1+1)": ({}, "each rank of role stage0 (ranks 0 to 1) needs"),
    "parameter_server(servers=1)": ({}, "each rank of role worker (ranks 0 to 2) needs"),
    "parameter_server(servers=2, beside=True)": ({}, "each rank of roles worker and server (ranks 2 to 3) needs"),
}


@sampled("strategy", CASES, everyday=["data_parallel", "hybrid_single", "parameter_server(servers=1)"])
def test_the_roles_that_lack_memory_are_named(strategy: str) -> None:
    pins, words = CASES[strategy]
    with pytest.raises(PlacementError, match=re.escape(words)):
        planned(4, strategy, pins=pins, memory=1e3)
