"""Plans on disk: the second search for the same plan reads the first one's, and any other is searched for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from splitc.errors import PlacementError
from splitc.ir.plan import Plan
from splitc.passes import place as place_module
from splitc.passes.place import Place
from splitc.passes.planner.request import Request
from splitc.strategies.auto import Auto
from splitc.strategies.data_parallel import DataParallel
from splitc.strategies.layer_separation import LayerSeparation
from tests.support.small_programs import separable, small_cluster

PLACE = Place(small_cluster(1e6), 2, Auto())  # proved: a plan with a gap is not kept


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The strategies of the plans that were searched for."""
    monkeypatch.setenv("SPLITC_CACHE", str(tmp_path))
    monkeypatch.setattr(place_module, "graph_text", lambda program: "graph")  # the toy's functions have no names
    names: list[str] = []
    real = Place._plan

    def counting(self: Place, request: Request) -> Plan:
        names.append(self.strategy.name)
        return real(self, request)

    monkeypatch.setattr(Place, "_plan", counting)
    return names


def test_a_plan_is_searched_for_once(searched: list[str]) -> None:
    first, second = (PLACE.run(separable()).plan for _ in range(2))
    assert searched == ["auto"] and first == second and first.prediction == second.prediction
    assert first.candidates == second.candidates and first.to_json() == second.to_json()


@pytest.mark.slow
def test_a_recalled_plan_prices_other_strategies_when_they_are_read(searched: list[str]) -> None:
    named = replace(PLACE, strategy=LayerSeparation())
    first, second = (named.run(separable()).plan for _ in range(2))
    assert len(second.prediction.priced) == 1 and first.candidates == second.candidates and len(second.candidates) > 4


def test_another_request_is_searched_for(searched: list[str]) -> None:
    usual, program = replace(PLACE, strategy=DataParallel()), separable()
    others: dict[str, Callable[[], object]] = {
        "the same": lambda: usual.run(separable()),
        "world": lambda: replace(usual, world=3).run(program),
        "cluster": lambda: replace(usual, cluster=small_cluster(2e6)).run(program),
        "option": lambda: replace(usual, strategy=DataParallel(sync_batchnorm=True)).run(program),
        "pins": lambda: replace(usual, pins={"fc1": "all"}).run(program),
        "memory": lambda: replace(usual, memory=1e8).run(program),
        "batch": lambda: replace(usual, global_batch=20).run(program),
        "costs": lambda: usual.run(replace(program, costs={**program.costs, "fc1": program.costs["conv1"]})),
        "whole batch": lambda: usual.run(replace(program, in_batch="loss")),
    }
    for number, (name, run) in enumerate(others.items()):
        usual.run(program)
        with contextlib.suppress(PlacementError):
            run()
        assert len(searched) == number + 1, name
