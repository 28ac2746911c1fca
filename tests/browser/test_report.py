"""The page of ``clusterddp report`` in Chromium: it loads nothing, reports no error, fits phones and paper, and passes
axe. ``SCREENSHOTS=FOLDER`` keeps a picture of each page at each width.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.examples import reports

pytestmark = pytest.mark.product
SCHEMES, WIDTHS = ("light", "dark"), (400, 1200)

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports, by name."""
    return reports(tmp_path_factory.mktemp("reports"))


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path]) -> Iterator[Open]:
    """Opens a page; afterwards there must have been no message on the console, no error and no request."""
    wrong: list[str] = []
    contexts = []

    def open_(name: str, width: int = 1200, scheme: str = "light", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        contexts.append(context)
        shown = context.new_page()
        address = pages[name].as_uri()
        shown.on("console", lambda message: wrong.append(message.text))
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.on("dialog", lambda dialog: wrong.append(dialog.message))
        shown.on("request", lambda request: None if request.url == address else wrong.append(request.url))
        shown.goto(address)
        return shown

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.mark.parametrize("name", ["run", "troubled", "two", "sweep", "runs", "live", "failed", "damaged"])
def test_each_page_fits_its_screen_and_passes_axe(opened: Open, name: str) -> None:
    """Light and dark, on a phone and on a desk: no horizontal scrolling, and no violation of WCAG 2.2 AA."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for scheme in SCHEMES:
        for width in WIDTHS:
            shown = opened(name, width, scheme)
            for summary in shown.locator("summary").all():
                summary.click()
            found = axe.run(shown).response
            assert [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in found["violations"]] == []
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            if "SCREENSHOTS" in os.environ:
                shown.screenshot(path=Path(os.environ["SCREENSHOTS"], f"{name}-{width}-{scheme}.png"), full_page=True)


@pytest.mark.parametrize("name", ["run", "troubled", "runs"])
def test_each_text_of_a_chart_is_inside_of_it(opened: Open, name: str) -> None:
    """Also on a phone: nothing is cut off."""
    for width in WIDTHS:
        outside = opened(name, width).evaluate(
            """() => [...document.querySelectorAll("svg text")].filter((text) => {
                const own = text.getBoundingClientRect(), card = text.closest("section").getBoundingClientRect();
                return own.left < card.left || own.right > card.right;
            }).map((text) => text.textContent)"""
        )
        assert outside == []


@pytest.mark.parametrize("name", ["run", "runs"])
def test_a_page_is_printed_on_light_paper(opened: Open, name: str, tmp_path: Path) -> None:
    """From a dark screen, too; no line of a table is wider than the paper."""
    shown = opened(name, 718, "dark")  # A4 with margins of 10 mm
    shown.emulate_media(media="print", color_scheme="dark")
    assert shown.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
    assert shown.evaluate("[...document.querySelectorAll('table')].every((one) => one.scrollWidth <= innerWidth)")
    shown.pdf(path=Path(os.environ.get("SCREENSHOTS", tmp_path), f"{name}.pdf"), prefer_css_page_size=True)
