"""The page of ``clusterddp report``: nothing in a run's files becomes part of it, it loads nothing, it stays small."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from clusterddp.cli.report import collected
from clusterddp.jobdef.job import Job
from clusterddp.report import theme
from clusterddp.report.booking import CATEGORIES
from clusterddp.report.charts import Axis, Curve, axis_of, chart, lane, number, time_axis
from clusterddp.report.curves import read_metrics
from clusterddp.report.page import page
from clusterddp.report.theme import escaped, tag
from clusterddp.rundir.run_directory import SWEEP_FILE, RunDirectory
from clusterddp.runs.sweep_members import Record
from tests.long_run import long_run
from tests.runs_on_disk import BEGAN, event, recorded_run, started, steps, write_lines

NOW = BEGAN + 1e6
#: The most bytes of a page.
MOST = 500_000
BYTES_OF_A_NUMBER = 8
#: What a page consists of. None of these runs or loads anything without a style of its own or an address.
TAGS = set(
    "html head meta title style body header footer main nav section h1 h2 h3 p a b ul li dl dt dd div span i "
    "svg g path rect line text figure figcaption table thead tbody tr th td details summary pre code".split()
)
ATTRIBUTES = set(
    "lang charset name content http-equiv id class style href tabindex open role aria-label aria-hidden d x y x1 x2 "
    "y1 y2 width height rx viewbox preserveaspectratio text-anchor".split()
)
HOSTILE = '</title></pre></svg><script>alert("x")</script><img src=x onerror=alert(1)>"\' onclick=x \x1b[m\u202e\ud800'


class Reader(HTMLParser):
    """The elements and attributes of a page, as a browser sees them, and whether each element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.unclosed: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(name, attributes)
        self.unclosed.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(name)
        self.attributes += attributes

    def handle_endtag(self, name: str) -> None:
        assert self.unclosed.pop() == name


def page_of(*runs: RunDirectory) -> str:
    return page(collected(runs, NOW))


def drawings(text: str) -> list[ElementTree.Element]:
    """The outer ``<svg>`` elements; fails if one is not XML."""
    found, depth, begin = [], 0, 0
    for mark in re.finditer(r"<svg\b[^>]*?(/?)>|</svg>", text):
        if mark[0].startswith("</"):
            depth -= 1
        elif not mark[1]:
            begin = mark.start() if depth == 0 else begin
            depth += 1
        if depth == 0:
            found.append(ElementTree.fromstring(text[begin : mark.end()]))
    return found


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run in which every text is hostile."""
    events = [
        started(nodes=HOSTILE) | {"code": {HOSTILE: HOSTILE}, "changed": [HOSTILE]},
        event("progress", step=0, steps=9, rank=0),
        event("training", step=0),
        event("checkpoint_failed", step=2, reason=HOSTILE),
        event("checkpoint", step=2, blocked_s=0.1, durable_s=0.2, bytes=9),
        event("rank_failed", rank=0, host=HOSTILE, error=HOSTILE, step=3),
        event("restarted", reason=HOSTILE, cause=HOSTILE, step=3, checkpoint=2),
        started(1, job=HOSTILE),
        event("resumed", 1, step=2, parent={}, inexact=[HOSTILE], redone=1),
    ]
    values: dict[str, Any] = {HOSTILE: 0.4, "</svg>": "NaN"}
    lines = [*steps(range(3), **values), *steps(range(2, 5), 1, **values)]
    outcome = {"state": "failed", "step": 3, "reason": HOSTILE}
    folder = tmp_path_factory.mktemp("runs")
    run = recorded_run(folder / "<b>run", events, metrics=lines, outcome=outcome)
    run.job_file.write_text(run.job_file.read_text() + f"# {HOSTILE}\n".replace("\ud800", ""))
    (run.attempt_logs(0) / "rank-0.err").write_text("Traceback:\n<script>alert(3)</script>\n</pre>\n")
    other = recorded_run(folder / "</td>", events, metrics=lines, outcome=outcome)
    return page_of(run) + page_of(run, other)


def test_no_text_of_a_run_becomes_markup(hostile: str) -> None:
    """Names of metrics, reasons, hosts, tracebacks, versions and folders stay text."""
    found = Reader(hostile)
    assert found.tags <= TAGS
    assert {name for name, _ in found.attributes} <= ATTRIBUTES
    assert not found.unclosed
    assert "<script" not in hostile
    assert hostile.count("&lt;script&gt;") > 10
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\ud800-\udfff]", hostile)


def test_nothing_is_loaded_from_anywhere(hostile: str, tmp_path: Path) -> None:
    """Links lead to sections of the page, and a policy forbids the browser everything else."""
    for text in (hostile, page_of(long_run(tmp_path / "run"))):
        found = Reader(text)
        assert {name for name, _ in found.attributes} <= ATTRIBUTES  # no src, srcset, action, xlink:href
        targets = {value for name, value in found.attributes if name == "href"}
        assert targets and all(value and re.fullmatch("#[a-z]+", value) for value in targets)
        assert all(f'id="{value[1:]}"' in text for value in targets if value)
        assert not re.search(r"https?:|url\(|@import|//[a-z]", text.replace(str(tmp_path), ""))
        assert "default-src &#x27;none&#x27;" in text


def test_each_drawing_is_well_formed(hostile: str, tmp_path: Path) -> None:
    """As XML, so that it can also be taken out of the page; each has a name for those who cannot see it."""
    found = [*drawings(hostile), *drawings(page_of(long_run(tmp_path / "run")))]
    assert len(found) > 20
    assert all(one.get("aria-label") or one.get("aria-hidden") for one in found)
    for one in found:
        for path in one.iter("path"):
            assert re.fullmatch(r"[MlhvzV0-9 +H-]+", path.get("d", "")), path.get("d")


def test_colours_of_drawings_are_defined(tmp_path: Path) -> None:
    """Each category has one, and each class of the page a rule."""
    assert set(theme.GROUP_OF) == set(CATEGORIES)
    assert theme.LIGHT.keys() == theme.DARK.keys()
    assert set(theme.GROUPS) <= set(theme.LIGHT)
    text = page_of(long_run(tmp_path / "run"))
    style = theme.style_sheet()
    used = {name for classes in re.findall(r'class="([^"]+)"', text) for name in classes.split()}
    assert [name for name in sorted(used) if f".{name}" not in style] == []


def test_the_ratios_can_be_checked_with_the_times_beside_them(tmp_path: Path) -> None:
    """In seconds, minutes or hours, whichever the run took."""
    for length, unit in ((30, "s"), (6000, "min"), (80_000, "h")):
        text = page_of(long_run(tmp_path / unit, attempts=2, steps=length))
        found = re.findall(rf"= ([\d,.]+) {unit} / ([\d,.]+) {unit} = ([\d.]+)%", text)
        assert len(found) == 2
        for part, whole, share in found:
            assert float(part.replace(",", "")) / float(whole.replace(",", "")) == pytest.approx(
                float(share) / 100, abs=0.006
            )


def test_idle_nodes_have_a_row_that_does_not_call_a_node_that_the_run_left_a_spare_one(tmp_path: Path) -> None:
    """As after a lost node of a range: the run has no spare nodes."""
    events = [started() | {"aside": ["n2"]}, event("completed") | {"time": BEGAN + 7200}]
    text = page_of(recorded_run(tmp_path / "run", events, outcome={"state": "completed"}))
    row = '<td class="bar">spare nodes, and nodes that the run left</td><td class="n">2 node-hours</td>'
    assert row in text
    assert "Spare nodes" not in text
    assert "idle nodes" not in page_of(long_run(tmp_path / "none"))


# --- size


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    """Its metrics are reduced, and of many attempts the newest are drawn."""
    text = page_of(long_run(tmp_path / "run", attempts=70, steps=2800))
    assert len(text.encode()) < MOST
    assert "The first 10 attempts are left out" in text
    drawings(text)


def test_texts_without_end_stay_small(tmp_path: Path) -> None:
    """Of a run with long names, reasons and tracebacks, many metrics and thousands of events."""
    long = "x" * 5000
    names: dict[str, Any] = {f"{long}{index}": 1.0 * index for index in range(150)}
    events = [started(), *[event("checkpoint_failed", step=1, reason=long) for _ in range(1500)]]
    for attempt in range(1, 50):
        events.append(event("rank_failed", attempt, rank=0, host=long, error=long, step=3))
        events.append(event("restarted", attempt, reason=long, cause=long, step=3, checkpoint=2))
    run = recorded_run(tmp_path / "run", events, metrics=steps(range(2), **names))
    run.job_file.write_text(run.job_file.read_text() + f"# {long}\n" * 50)
    text = page_of(run)
    assert len(text.encode()) < MOST
    assert "metrics left out" in text


def test_many_runs_stay_small(tmp_path: Path) -> None:
    """Their page has no curves."""
    runs = [long_run(tmp_path / f"run-{index}", attempts=4, steps=160) for index in range(40)]
    text = page_of(*runs)
    assert len(text.encode()) < MOST
    assert text.count("<tr") == 41


def test_a_hundred_thousand_steps_of_fifty_attempts_stay_small(tmp_path: Path) -> None:
    """The size that the page is made for, with the times of 64 ranks: also the process, which gets 250 MB at most."""
    run = long_run(tmp_path / "run", attempts=50, steps=100_000, ranks=64)
    assert run.timing_file.stat().st_size > 9e5
    command = [sys.executable, "-m", "clusterddp", "report", str(run), "-o", str(tmp_path / "page.html")]
    limits = (resource.RLIMIT_AS, (250_000_000, 250_000_000))
    subprocess.run(command, check=True, preexec_fn=lambda: resource.setrlimit(*limits))
    assert (tmp_path / "page.html").stat().st_size < MOST


def test_a_longer_run_needs_little_more_memory(tmp_path: Path) -> None:
    """A number is kept of each value, step and time; neither the file nor its lines are in memory as a whole."""
    run = long_run(tmp_path / "run", attempts=2, steps=10_000)
    tracemalloc.start()
    found = read_metrics(run)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 * found.lines * (len(found.names) + 2) * BYTES_OF_A_NUMBER  # an array grows ahead of its use


# --- several runs


def sweep_of(folder: Path, lrs: Sequence[str], sizes: Sequence[str]) -> list[RunDirectory]:
    """A member per combination; the middle learning rate and the largest size are best, and the first one failed."""
    members = {f"lr={lr},size={size}": {"lr": lr, "size": size} for lr in lrs for size in sizes}
    runs = []
    for place, (name, values) in enumerate(members.items()):
        run = long_run(folder / name, attempts=2, steps=40)
        loss = 1.0 + abs(lrs.index(values["lr"]) - len(lrs) // 2) + 1 / (1 + sizes.index(values["size"]))
        write_lines(run.metrics_file, [{**line, "loss": loss} for line in run.metrics()])
        if place == 0:
            run.outcome_file.write_text('{"state": "failed", "step": 40, "attempts": 1, "reason": "no"}')
        runs.append(run)
    (folder / SWEEP_FILE).write_text(Record(Job(name="net", module="net", device="cpu"), members).to_yaml())
    return runs


def test_a_sweeps_page_names_the_winner_ranks_the_runs_and_plots_the_parameters(tmp_path: Path) -> None:
    """The table has the parameters in place of names, the best run first, and failed ones without a rank last."""
    runs = sweep_of(tmp_path / "sweep", ("1e-4", "1e-3", "1e-2"), ("64", "128"))
    text = page_of(*runs)
    assert "Best loss: 1.5, lr=1e-3, size=128. 5 completed, 1 failed." in text
    table = text[text.index("<table") : text.index("</table>")]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row)[:4] for row in table.split("<tr")[2:]]
    assert rows[0] == ["1", "1e-3", "128", "1.5"] and rows[1] == ["2", "1e-3", "64", "2"]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5", ""] and rows[-1][1:3] == ["1e-4", "64"]
    assert "lr=1e-3,size=128" not in table
    assert re.findall(r'aria-label="(loss over [^"]*)"', text) == ["loss over lr", "loss over size"]
    assert text.index(">1e-4<", text.index("loss over lr")) < text.index(">1e-2<", text.index("loss over lr"))


def test_a_runs_page_begins_with_its_best_value_and_reads_as_sentences(tmp_path: Path) -> None:
    """The metric of its best checkpoint comes first; a reason is a sentence of its own, and its code is code."""
    run = long_run(tmp_path / "net-0", steps=60)
    events = [{**line, "best": {"accuracy": 0.75}} if line["event"] == "checkpoint" else line for line in run.events()]
    write_lines(run.events_file, events)
    reason = "rank 1 (n2) failed: call `init()` first"
    run.outcome_file.write_text(json.dumps({"state": "failed", "step": 60, "attempts": 3, "reason": reason}))
    text = page_of(run)
    assert "<dt>Best accuracy</dt><dd>0.75, checkpoint 60</dd>" in text
    assert re.findall(r'<div class="metric"><h3>(\w+)', text)[0] == "accuracy"
    assert "after its submission. Rank 1 (n2) failed: call <code>init()</code> first. It was " in text


# --- colours


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2.2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("colours", [theme.LIGHT, theme.DARK])
def test_texts_and_drawings_have_contrast(colours: dict[str, str]) -> None:
    """4.5 for text and 3 for parts of drawings, on each surface: level AA."""
    for surface in theme.SURFACES:
        for name in theme.TEXTS:
            assert contrast(colours[name], colours[surface]) >= 4.5, (name, surface)
        for name in theme.GROUPS:
            assert contrast(colours[name], colours[surface]) >= 3, (name, surface)


# --- drawing


def test_a_larger_value_is_higher() -> None:
    """And a later step further right; the ends of the scale are the ends of the drawing."""
    curve = Curve([[[0, 1.0, 1.0, 1.0], [5, 3.0, 3.0, 3.0], [10, 2.0, 2.0, 2.0]]], "training", "loss")
    (drawn,) = drawings(chart([curve], Axis(0, 10), [], Axis(1, 3), "loss"))
    (line,) = drawn.iter("path")
    assert line.get("d") == "M0 1000l1000-1000 1000+500"


def test_time_that_alternates_is_drawn_as_a_share_of_the_height() -> None:
    """Training, and waiting for a straggler in each of many short intervals; a long wait is a part of the bar."""
    spans = [[at + part, at + end, name] for at in range(9) for part, end, name in _PARTS]
    (drawn,) = drawings(lane([*spans, [9, 50, "training"], [50, 99, "straggler"]], Axis(0, 100), {}, "lane"))
    training, waiting = (path.get("d") for path in drawn.iter("path"))
    assert training == "M0 0h180V100H0zM180 0h820V100H180z"
    assert waiting == "M0 75h180V100H0zM1000 0h980V100H1000z"


_PARTS = ((0, 0.75, "training"), (0.75, 1, "straggler"))


def test_scales() -> None:
    """Round numbers; logarithmic where values are far apart; one value is in the middle."""
    assert [text for _, text in Axis(0, 20_000).ticks()] == ["0", "5,000", "10,000", "15,000", "20,000"]
    assert axis_of([0.001, 0.5]).logarithmic and not axis_of([0.5, 2]).logarithmic and not axis_of([0, 2]).logarithmic
    assert axis_of([7.0, 7.0]).at(7.0) == 0.5
    assert len({text for _, text in axis_of([1.00000001, 1.00000002]).ticks()}) > 1
    for low, high in ((-1e300, 1e300), (0.0, 5e-324), (1e-300, 1e300), (2**62, 2**63)):
        assert axis_of([low, high]).ticks()
    assert [text for _, text in axis_of([0.0003, 2.0]).ticks()] == ["0.001", "0.01", "0.1", "1"]
    assert [text for _, text in axis_of([0.015, 0.9]).ticks()] == ["0.02", "0.05", "0.1", "0.2", "0.5"]
    assert [text for _, text in time_axis(7200.0, 0.0)[1]][:2] == ["0", "50 min"]
    assert [number(value) for value in (0.25, 1e-7, 1234.0, 20_000_000.0)] == ["0.25", "1e-7", "1,234", "2e7"]


def test_markup_is_escaped_once() -> None:
    """Text becomes markup by ``tag`` alone."""
    inner = tag("b", "a<b&c")
    assert tag("p", inner, "<") == "<p><b>a&lt;b&amp;c</b>&lt;</p>"
    assert tag("p", title='"') == '<p title="&quot;"></p>'
    assert escaped("\x00\ud800\u202e") == "???"
