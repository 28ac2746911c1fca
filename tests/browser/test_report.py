"""The page of ``clusterddp report`` in Chromium: it loads nothing, reports no error, fits phones and paper, can be used
with the keyboard, and passes axe. ``SCREENSHOTS=FOLDER`` keeps a picture of each page at each width.
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
#: A chart over steps, and one over time.
STEPS, TIME = "svg[data-axis=steps]", "svg[data-axis=time]"
#: Pixels beside a chart in which its values are written.
VALUES = 44

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


def boxes(shown: Any, charts: str) -> list[str]:
    """The parts of their drawings that the charts show."""
    found: list[str] = shown.evaluate(
        f"[...document.querySelectorAll('{charts} svg')].map((one) => one.getAttribute('viewBox'))"
    )
    return found


def test_a_drag_zooms_all_charts_with_the_axis(opened: Open) -> None:
    """Those of time include the timeline and the ranks; a double click shows all again, exactly as before."""
    shown = opened("run")
    before, all_steps = shown.content(), boxes(shown, STEPS)
    shown.locator(TIME).first.scroll_into_view_if_needed()
    box = shown.locator(TIME).first.bounding_box()
    left, width = box["x"] + VALUES, box["width"] - VALUES
    shown.mouse.move(left + width / 4, box["y"] + 50)
    shown.mouse.down()
    shown.mouse.move(left + width / 2, box["y"] + 60, steps=3)
    shown.mouse.up()
    drawn = {tuple(float(part) for part in text.split()[::2]) for text in boxes(shown, TIME)}
    assert len(boxes(shown, TIME)) >= 4
    for left, width in drawn:
        assert left == pytest.approx(500, abs=5)
        assert width == pytest.approx(500, abs=5)
    lanes = boxes(shown, "div[data-axis=time] svg")
    assert len(lanes) >= 6 and all(300 < float(text.split()[0]) < 700 for text in lanes)
    assert boxes(shown, STEPS) == all_steps
    assert "min to" in shown.locator("[role=status]").inner_text()
    shown.locator(TIME).first.dblclick()
    assert shown.content().replace(' class=""', "") == before


def test_the_keyboard_zooms_too(opened: Open) -> None:
    """Tab reaches each chart, which shows that it has the focus; the values between the marks are round."""
    shown = opened("run")
    chart = shown.locator(STEPS).first
    reached = []
    for _ in range(60):
        shown.keyboard.press("Tab")
        reached.append(shown.evaluate("document.activeElement.getAttribute('data-axis') ?? ''"))
    assert reached.count("steps") >= 3 and reached.count("time") >= 5
    chart.focus()
    assert shown.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    whole = boxes(shown, STEPS)
    for key in ("+", "+", "ArrowRight"):
        shown.keyboard.press(key)
    assert {round(float(text.split()[2])) for text in boxes(shown, STEPS)[:3]} == {500}
    assert boxes(shown, STEPS)[-1] != whole[-1]
    marks = [float(text.replace(",", "")) for text in chart.locator("g.x text").all_text_contents()]
    assert len(marks) >= 2 and all(mark % 50 == 0 and 1125 <= mark <= 2250 for mark in marks)
    assert len(chart.locator("g.y text").all_text_contents()) >= 2
    assert shown.locator("[role=status]").inner_text().startswith("Shown: steps ")
    shown.keyboard.press("Escape")
    assert boxes(shown, STEPS) == whole


def test_a_run_of_several_is_shown_alone(opened: Open) -> None:
    """While its entry of the legend is pointed at, or has the focus. Dots over a parameter are of all runs."""
    shown = opened("runs")
    shown.locator("li[data-run]").nth(2).focus()
    assert {line.get_attribute("data-run") for line in shown.locator(".curve[data-run]:not(.away)").all()} == {"2"}
    shown.locator("h1").click()
    assert shown.locator(".away").count() == 0


def test_the_page_is_whole_without_scripts(opened: Open) -> None:
    """Nothing is hidden but the words about zooming."""
    shown = opened("run", java_script_enabled=False)
    assert shown.locator(".hint").is_hidden()
    assert shown.locator("section").count() == opened("run").locator("section").count()
    assert shown.locator("[data-axis][tabindex]").count() == 0


@pytest.mark.parametrize("name", ["run", "runs"])
def test_a_page_is_printed_on_light_paper(opened: Open, name: str, tmp_path: Path) -> None:
    """From a dark screen, too; no line of a table is wider than the paper, and no part of the zooming is printed."""
    shown = opened(name, 718, "dark")  # A4 with margins of 10 mm
    shown.emulate_media(media="print", color_scheme="dark")
    assert shown.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
    assert shown.locator(".hint").is_hidden()
    assert shown.evaluate("[...document.querySelectorAll('table')].every((one) => one.scrollWidth <= innerWidth)")
    shown.pdf(path=Path(os.environ.get("SCREENSHOTS", tmp_path), f"{name}.pdf"), prefer_css_page_size=True)
