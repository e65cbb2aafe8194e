"""The numbers of the README: predictions are computed anew, and measurements agree among themselves."""

from __future__ import annotations

import re

import pytest

from splitc.cli import main
from tests import ROOT

README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_picture_has_todays_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(ROOT / "examples" / "alexnet.py")
    command = ["inspect", model, "--world", "4", "--cluster", "v100-10gbe", "--global-batch", "512", "--quiet"]
    assert main(command) == 0
    report = capsys.readouterr().out
    today = dict(re.findall(r"^(\w+) .* ([\d,]+) +[\d.]+x$", report, re.MULTILINE))
    shown = re.findall(r" ([a-z]+_[a-z]+)  +([\d,]+)$", README, re.MULTILINE)
    assert shown == list(today.items())[: len(shown)] and len(shown) == 6
    for group in ("features", "classifier"):
        rows = re.findall(rf"^{group}\.\d+ .* ([\d.]+) (kB|MB) ", report, re.MULTILINE)
        sent = sum(float(number) * {"kB": 1e-3, "MB": 1.0}[unit] for number, unit in rows)
        assert f"{sent:.1f} MB a rank" in next(line for line in README.splitlines() if f"{group}.*" in line)


def test_the_measured_images_are_those_of_the_steps() -> None:
    rows = re.findall(r"^\| .*?(\d+) ms.*?\| \D*(\d+)\D*\| \D*(\d+) ms.*?\| \D*(\d+)\D*\|$", README, re.MULTILINE)
    assert len(rows) == 6
    for *_, row in ((each, list(map(int, each))) for each in rows):
        for step, images in (row[:2], row[2:]):
            assert images == pytest.approx(4 * 32 / step * 1000, abs=0.6)
