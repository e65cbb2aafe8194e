"""The page: well-formed, whole without a network, the same bytes again, and names that are nothing but text."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

from splitc.compiled import CompiledProgram
from splitc.ir.prediction import Candidate, Tried
from splitc.report.figures import as_json, of_plan
from splitc.report.grid import what_if
from splitc.report.html import page
from splitc.report.html.head import sentence
from splitc.report.step import figures_of_step, timeline
from splitc.runtime.transport.phases import Span
from tests.support.compiled import class_batch, compiled

EVIL = '<script>alert(\'&amp;"1")</script>'
VOID = {"meta"}


@cache
def program() -> CompiledProgram:
    """Its other strategies are candidates that nobody needs to plan."""
    x, y = class_batch((4, 6), classes=3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.Linear(8, 3))
    made = compiled(model, (x,), y, F.cross_entropy, 3, "data_parallel")
    candidates = (
        Candidate("single_device", 1e-3, 4000.0, 4, True, True, "", {"all": (0,)}),
        Candidate("layer_separation", 0.0, 0.0, 0, True, False, f"no {EVIL} here"),
    )
    prediction = replace(made.plan.prediction, all=None, priced=candidates)
    return made.of(replace(made.program, plan=replace(made.plan, prediction=prediction)))


@cache
def _figures() -> dict[str, Any]:
    settings, made = program().request.settings, program()
    figures = {**as_json(made.program), **figures_of_step(made.program)}
    cell = {
        "bandwidth": 1e9,
        "batch": 4,
        "world": 3,
        "strategy": "data_parallel",
        "choice": "data_parallel 3",
        "why": "",
    }
    cell |= {"samples_per_second": 9.0, "flips": False}
    other = {**cell, "world": 6, "strategy": "single_device", "choice": "single_device 1", "flips": True}
    none = {**cell, "batch": 8, "choice": "", "why": EVIL}
    now = {key: cell[key] for key in ("bandwidth", "batch", "world")}
    grid = {"now": now, "of_a_reader": settings.global_batch is None, "cells": [cell, other, none], "left_out": 2}
    return {**figures, "what_if": grid}


def figures(**changed: Any) -> dict[str, Any]:
    return {**deepcopy(_figures()), **changed}


class Page(HTMLParser):
    """What a page consists of; raises where an element is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        self._open += [tag] * (tag not in VOID)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def said(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def test_a_page_is_well_formed_with_headings_in_order_and_tables_whose_headers_have_a_scope() -> None:
    found = Page(page(figures()))
    assert [name for name, _ in found.elements if name in ("h1", "h2", "h3")] == ["h1", *["h2"] * 6]
    assert found.said("h2") == ["Model", "One step", "Candidates", "Traffic", "Memory", "What if"]
    assert len(found.of("table")) == len(found.of("caption")) == 7, (
        "a chart, five sections, two worlds; the model is a tree"
    )
    assert {each.get("scope") for each in found.of("th")} == {"row", "col"}
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {each["href"] for each in found.of("a") if "class" not in each} == {
        f"#{each}" for each in ids if each in LINKED
    }
    hidden = [name for name, attributes in found.elements if "hidden" in attributes]
    assert sorted(hidden) == ["button", "p"], "what only JavaScript can use"


LINKED = ("model", "timeline", "candidates", "traffic", "memory", "what-if")


def test_a_page_loads_nothing_and_embeds_the_figures_that_it_is_made_of() -> None:
    given = figures(model=EVIL)
    text = page(given)
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(", text)
    data = next(data for tag, data in Page(text).texts if tag == "script" and data.startswith("{"))
    assert json.loads(data) == json.loads(json.dumps(given)) and "<" not in data


def test_the_same_figures_make_the_same_bytes_and_the_same_program_the_same_figures() -> None:
    again = {**as_json(program().program), **figures_of_step(program().program)}
    assert page({**again, "what_if": figures()["what_if"]}) == page(figures())


def test_no_text_of_a_user_is_markup() -> None:
    given = figures(model=EVIL, cluster=EVIL, advice=EVIL, notes=[EVIL], strategy=EVIL)
    given["layers"][0] |= {"name": EVIL, "role": EVIL, "why": EVIL, "sync": EVIL}
    given["ranks"][0]["role"] = EVIL
    given["tried"] = [{"name": EVIL, "plan": "", "failed": EVIL, "measured": 0.0}]
    found = Page(page(given))
    assert len(found.of("script")) == 2 and not any("alert" in text for text in found.said("script")[1:])
    names = [text for tag, text in found.texts if tag not in ("script", "style") and EVIL in text]
    assert len(names) >= 10, "they are there, as text"
    assert all(not key.startswith("on") for _, attributes in found.elements for key in attributes)


def test_the_head_names_both_baselines_and_what_was_measured() -> None:
    ddp = {**figures()["candidates"][0], "strategy": "data_parallel", "samples_per_second": 1000.0}
    given = figures(strategy="late_multiply", samples_per_second=2000.0, measured_seconds=0.004, global_batch=12)
    given["candidates"].append(ddp)
    said = " ".join(Page(page(given)).said("p"))
    assert "trains at 3,000 samples/s on 3 ranks of v100-10gbe by late_multiply: " in said
    assert "0.5 times as fast as one process (predicted) and 2.0 times as fast as DDP (predicted)." in said, (
        "predicted beside predicted"
    )
    assert "Predicted 2,000 samples/s ± 10%" in said and "measured 3,000, the prediction is -33.3% off" in said
    tried = Tried("late_multiply 3", given["plan"], 12, 0.006, 0.004, 0.02, 5)
    slower = Tried("data_parallel 3", "", 12, 0.012, 0.012, 0.02, 5)
    given["tried"] = [vars(tried), vars(slower)]
    said = " ".join(Page(page(given)).said("p"))
    assert "measured 3,000 ± 2.0%" in said and "3.0 times as fast as DDP" in said, "measured beside measured"


def test_what_is_not_known_is_left_out_and_said() -> None:
    of_build = of_plan(program().plan, "build")
    said = " ".join(Page(page(of_build)).said("p"))
    for part in ("The order within a step is not known", "does not tell the memory", "No other bandwidth"):
        assert part in said
    unpriced = figures(samples_per_second=0.0, step_seconds=0.0, candidates=[], cluster="", timeline=None)
    assert "data_parallel has no price; --cluster gives it one." in " ".join(Page(page(unpriced)).said("p"))


def test_repeated_modules_are_folded_with_all_their_rows() -> None:
    found = Page(page(figures()))
    assert "1 to 3: as 0" in found.said("summary")
    assert len([each for each in found.of("span") if each.get("class") == "row"]) == 6 + 2


def test_200_layers_on_64_unlike_ranks_are_less_than_500_kb() -> None:
    layer, rank = figures()["layers"][0], figures()["ranks"][0]
    layers = [{**layer, "name": f"encoder.{k}.projection", "parameters": k, "why": 20 * "reason "} for k in range(200)]
    ranks = [{**rank, "rank": k, "memory_bytes": 10**9 + 10**7 * k} for k in range(64)]
    spans = [
        Span(k, stream, "x", (i + 0.1 * (k % 7)) / 400, (i + 0.5) / 400)
        for k in range(64)
        for stream in ("compute", "wait", "comm")
        for i in range(400)
    ]
    drawn = timeline(spans, 1.0, [f"role{k}" for k in range(64)])
    given = figures(layers=layers, ranks=ranks, world=64, timeline=drawn)
    assert len(drawn["lanes"]) == 64 and 200_000 < len(page(given).encode()) < 500_000


def test_the_timeline_is_the_last_step_with_ranks_alike_together_that_wait_for_the_next() -> None:
    step = [Span(rank, "compute", "a", 1.0, 1.5 + rank / 4) for rank in (0, 1)]
    spans = [*step, *(replace(each, rank=each.rank + 2) for each in step), Span(0, "comm", "b", 0.9, 1.2)]
    drawn = timeline(spans, 1.0, ["r"] * 4)
    assert drawn["seconds"] == 1.0 and drawn["parts"] == 1000
    assert [each["ranks"] for each in drawn["lanes"]] == [[0], [1, 3], [2]]
    assert drawn["lanes"][0] == {
        "ranks": [0],
        "compute": (250, 750),
        "waiting": (750, 1000),
        "communication": (150, 450),
    }


def test_collectives_are_counted_once_with_the_bytes_of_all_ranks_and_what_they_hide() -> None:
    rows = {(each["kind"], each["what"]): each for each in figures()["collectives"]}
    sums = rows["all_reduce", "bucket"]
    assert sums["ranks"] == 3 and sums["count"] == 1
    assert sums["bytes"] == pytest.approx(sum(each["sent_bytes"] for each in figures()["ranks"]), rel=0.02)
    assert 0 <= sums["hidden"] < 1, "the last bucket is waited for"


def test_a_notebook_shows_the_head() -> None:
    shown = program()._repr_html_()
    found = Page(shown)
    assert "trains at" in " ".join(found.said("strong")) and len(found.of("table")) == 1
    assert not found.of("script") and len(shown) < 8000


@pytest.mark.slow
def test_the_grid_has_the_plan_of_now_first_and_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    made, place = program(), program().request.settings.place()
    assert what_if(place, made.analysed(), made.plan) is None, "as the suite asks for"
    monkeypatch.setenv("SPLITC_ADVICE", "999")
    grid = what_if(place, made.analysed(), made.plan)
    assert grid is not None and grid["left_out"] == 0 and grid["of_a_reader"]
    assert grid["now"] == {"bandwidth": 1.25e9, "batch": 4, "world": 3}
    assert {**grid["now"], "choice": "data_parallel 3"}.items() <= grid["cells"][0].items()
    assert {each["world"] for each in grid["cells"]} == {1, 3, 6} and len(grid["cells"]) == 27
    assert not any(each["flips"] for each in grid["cells"]), "a strategy was asked for"
    by_world = {each["world"]: each["samples_per_second"] for each in grid["cells"] if each["bandwidth"] > 4e9}
    assert all(by_world.values())


def test_a_plan_is_not_called_faster_than_one_process_that_takes_as_long_for_the_same_examples() -> None:
    given = figures()
    assert "times as fast as one process" in sentence(given)
    alone = figures(advice="One rank alone takes 4 ms for all 12 examples, 3 ranks 5 ms.")
    assert "no faster than one process with as many examples" in sentence(alone)
    idle = figures(advice="1 of 3 ranks is idle.", world=given["world"] + 1)
    assert "times as fast as one process" in sentence(idle)
