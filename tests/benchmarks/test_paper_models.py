"""The models after their papers: the list, one of them, and the part of the page."""

from __future__ import annotations

import pytest
import torch

from benchmarks.paper_models.__main__ import HEADING, page
from benchmarks.paper_models.case import PaperCase, papers
from benchmarks.paper_models.measure import Result, Trained, measured


def test_every_model_has_a_loss_without_ranks() -> None:
    for name, paper in papers().items():
        if not paper.package:
            torch.manual_seed(1)
            case = PaperCase(paper, paper.make().double())
            assert case.value(*case.batch(paper.examples, 1)).isfinite(), name


@pytest.mark.slow
def test_a_model_that_can_be_divided_trains_under_every_strategy() -> None:
    result = measured("neumf")
    assert result.trains, result


def test_the_part_of_the_page_says_what_was_refused_and_why() -> None:
    refused = Trained("auto", refused="CaptureError: no such layer")
    exact = Trained("data_parallel", "data_parallel", 1e-16)
    trained = Result("other", "views", (exact, Trained("auto", "mixed", 3e-15)), 1.0)
    text = page([Result("net", "views", (exact, refused), 1.0), trained])
    assert "1 of 2 train" in " ".join(text.split())
    assert "| views | **net**, other | 1e-16 | 3e-15 |" in text
    assert "| net | CaptureError: no such layer |" in text
    assert text.startswith(HEADING)
