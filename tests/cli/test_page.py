"""`--html`: the page that commands write, of the figures that they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import splitc

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("net")


@pytest.mark.slow
def test_inspect_writes_a_page_of_what_it_prints_as_json(capsys: Capture) -> None:
    asked = "inspect net.py --world 2 --cluster v100-10gbe --strategy data_parallel --json --html report.html -q"
    done = splitc(capsys, asked)
    assert (done.code, done.err) == (0, "wrote report.html: the report, which any browser opens\n")
    figures, text = json.loads(done.out), Path("report.html").read_text()
    assert text.startswith("<!doctype html>") and {"timeline", "collectives", "what_if"} <= figures.keys()
    embedded = text.partition('id="figures">')[2].partition("</script>")[0]
    assert json.loads(embedded) == figures


def test_a_page_that_cannot_be_written_is_told_before_anything_runs(capsys: Capture) -> None:
    for command in ("inspect net.py --world 2", "tune net.py --world 2"):
        done = splitc(capsys, f"{command} --html there/is/none.html")
        assert done.code == 2 and "--html there/is/none.html: there is no folder" in done.err
