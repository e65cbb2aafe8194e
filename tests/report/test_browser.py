"""The page in a real browser: it loads nothing, says no error, is accessible, and reads without JavaScript."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitc.cli.model_file import load_model
from splitc.report.figures import as_json
from splitc.report.html import page
from splitc.report.step import figures_of_step
from tests import ROOT
from tests.report.test_html import EVIL, figures
from tests.support.compiled import compiled

playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'splitc[browser]'")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install 'splitc[browser]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt install chromium"),
]
EXAMPLES = ("alexnet", "digits", "extreme", "mlp", "recommender", "resnet", "transformer", "vgg16")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def of_example(name: str) -> dict[str, Any]:
    """The figures of an example under one strategy, which takes no search."""
    file = load_model(str(ROOT / "examples" / f"{name}.py"), None)
    data = {key: value for key, value in file.example.tensors.items() if key != "target"}
    made = compiled(file.model, data, file.example.tensors["target"], file.example.loss, 4, "data_parallel").program
    made = replace(made, plan=replace(made.plan, prediction=replace(made.plan.prediction, all=None)))
    return {**as_json(made), **figures_of_step(made)}


def written(given: dict[str, Any], folder: Path) -> str:
    path = folder / "page.html"
    path.write_text(page(given), encoding="utf-8")
    return path.as_uri()


def opened(browser: Any, url: str, **options: Any) -> tuple[Any, list[str]]:
    """The page, and what it asked for beside itself or complained of."""
    wrong: list[str] = []
    file = url.partition("#")[0]
    shown = browser.new_context(**options).new_page()
    shown.on("request", lambda request: wrong.append(request.url) if request.url.partition("#")[0] != file else None)
    shown.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    shown.on("pageerror", lambda error: wrong.append(str(error)))
    shown.on("dialog", lambda dialog: wrong.append(dialog.message))
    shown.set_default_timeout(240_000)
    shown.goto(url)
    return shown, wrong


@pytest.mark.parametrize("name", [*EXAMPLES, EVIL])
def test_a_page_is_quiet_accessible_and_as_wide_as_the_window_in_both_themes(
    name: str, browser: Any, tmp_path: Path
) -> None:
    given = figures(model=EVIL, advice=EVIL) if name == EVIL else of_example(name)
    url = written(given, tmp_path)
    for width in (400, 1280):
        for theme in ("dark", "light"):
            shown, wrong = opened(browser, url, viewport={"width": width, "height": 900}, color_scheme=theme)
            assert not wrong
            assert shown.evaluate("document.documentElement.scrollWidth") == width
            shown.screenshot(path=tmp_path / f"{width}-{theme}.png", full_page=True)
            found = axe.Axe().run(shown).response["violations"]
            grave = [
                (each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")
            ]
            assert not grave, (width, theme)
            shown.context.close()


def test_without_javascript_all_tables_and_the_tree_are_there(browser: Any, tmp_path: Path) -> None:
    shown, wrong = opened(browser, written(figures(), tmp_path), java_script_enabled=False)
    assert not wrong
    assert shown.locator("table:visible").count() == 7 and shown.locator(".tree > ul > li").is_visible()
    assert not shown.locator("#theme").is_visible() and not shown.locator("#chosen").is_visible()


def test_the_address_holds_theme_open_parts_and_the_chosen_cell_and_the_keyboard_reaches_all(
    browser: Any, tmp_path: Path
) -> None:
    url = written(figures(), tmp_path)
    shown, wrong = opened(browser, url, color_scheme="light")
    shown.locator("#theme").press("Enter")
    shown.locator("a.cell").nth(1).press("Enter")
    shown.locator("details summary").nth(2).press("Enter")
    shown.wait_for_function("location.hash.includes('open=')")
    again, more = opened(browser, shown.url, color_scheme="light")
    for each in (shown, again):
        assert each.evaluate("document.documentElement.dataset.theme") == "dark"
        assert each.locator("a.cell[aria-current=true]").count() == 1
        assert each.locator("#chosen").inner_text() == each.locator("a.cell").nth(1).get_attribute("data-say")
    states = [each.evaluate("[...document.querySelectorAll('details')].map(d => d.open)") for each in (shown, again)]
    fresh = opened(browser, url)[0].evaluate("[...document.querySelectorAll('details')].map(d => d.open)")
    assert states[0] == states[1] != fresh and not wrong and not more
