"""docs/measurements/papers.md says what the models say: its tables are made anew and compared."""

from __future__ import annotations

import re

import pytest

from tests import ROOT
from tests.support.paper_tables import TABLES

PAGE = ROOT / "docs" / "measurements" / "papers.md"
MARKED = r"(<!-- table: {} -->\n)(.*?)(\n<!-- end -->)"


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_page_is_what_the_models_give(name: str, request: pytest.FixtureRequest) -> None:
    pattern, text = re.compile(MARKED.format(re.escape(name)), re.DOTALL), PAGE.read_text()
    made = TABLES[name]()
    if request.config.getoption("--update-golden"):
        text = pattern.sub(lambda found: found[1] + made + found[3], text)
        PAGE.write_text(text)
    (found,) = pattern.finditer(text)
    assert found[2] == made, f"table {name} changed; if that is meant, run pytest --update-golden and read the page"


def test_the_page_has_no_table_that_nothing_makes() -> None:
    assert re.findall(r"<!-- table: (.*?) -->", PAGE.read_text()) == list(TABLES)
