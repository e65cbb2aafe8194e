"""The fingerprint of what was asked: alike in every process, another one where anything that decides is another."""

from __future__ import annotations

from dataclasses import replace

from splitc.cost_models.clusters.named import load_cluster
from splitc.ir.placements import Placement
from splitc.specialise import Settings
from splitc.tuned import Request
from tests.support.every_strategy import analysed

CLUSTER = load_cluster("v100-10gbe")
ASKED = Settings(2, cluster=CLUSTER)


def of(settings: Settings, batch: int | None = None) -> str:
    model, program = analysed()
    program = program if batch is None else replace(program, batch=batch)
    return Request(lambda: None, lambda: program, settings, model, None).fingerprint  # type: ignore[arg-type,return-value]


def test_it_is_the_same_in_every_process_and_for_other_names_of_the_same() -> None:
    assert of(ASKED) == "094411e79774"
    renamed = replace(CLUSTER, name="mine", source="measured", device=replace(CLUSTER.device, name="a GPU"))
    for same in (replace(ASKED, cluster="v100-10gbe"), replace(ASKED, cluster=renamed), replace(ASKED, code="net.py")):
        assert of(same) == of(ASKED)


def test_it_changes_with_all_that_a_plan_follows_from() -> None:
    device = replace(CLUSTER.device, memory=8e9)
    others = [
        *(replace(ASKED, world=3), replace(ASKED, global_batch=8), replace(ASKED, strategy="data_parallel")),
        *(replace(ASKED, strategy="layer_separation(n_c=1, n_f=1)"), replace(ASKED, memory=1e9)),
        replace(ASKED, fewer_readers=True),
        *(replace(ASKED, pins={"fc6": "fc"}), replace(ASKED, pins={"fc6": Placement(group=2)})),
        *(replace(ASKED, accumulate=2), replace(ASKED, cluster=CLUSTER.with_bandwidth(1e9))),
        *(replace(ASKED, cluster=replace(CLUSTER, device=device)), replace(ASKED, cluster=replace(CLUSTER, world=9))),
    ]
    found = [of(ASKED), of(ASKED, batch=5), *map(of, others)]
    assert len(set(found)) == len(found) == 14
