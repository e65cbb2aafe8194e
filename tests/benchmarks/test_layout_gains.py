"""Without overlap the integer program says what closed forms computed by hand say."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.layout_gains import SETTINGS, Setting, gains, program_of
from splitc.ir.program import Program

SMALL = [setting for setting in SETTINGS if setting.model != "vgg16"]
"""`python -m benchmarks.layout_gains` has all."""


@cache
def captured(model: str) -> Program:
    return program_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SMALL, ids=lambda s: f"{s.model} {s.ranks} {s.bandwidth:g}")
def test_the_gains_are_those_of_the_closed_forms_and_alike_layers_gain_more(setting: Setting) -> None:
    papers, divided, whole = gains(captured(setting.model), setting)
    assert papers.rate == pytest.approx(setting.papers, rel=0.03)
    assert divided.rate == pytest.approx(setting.layouts, rel=0.03)
    assert whole.rate >= divided.rate * (1 - 1e-6)
