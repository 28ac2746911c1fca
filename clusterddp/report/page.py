"""A report as one HTML page. It loads no other file, its only script is ``zoom.js``, and all texts of a run are escaped
(``theme.py``).

The section about ranks over time has a heat map by host, the ranks that were slow, and the phases of a step.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from clusterddp.report.charts import WIDTH, Curve, chart, ruler, zoomable
from clusterddp.report.curves import has_rank, label, main_of, newest, ranked
from clusterddp.report.ranks import COST
from clusterddp.report.sections import (
    Section,
    checkpoints,
    gpus,
    legend,
    metrics,
    over_parameters,
    plain,
    section,
    timeline,
    timelines,
    when,
    where_the_time_went,
)
from clusterddp.report.theme import (
    LEVELS,
    Axis,
    Markup,
    clipped,
    joined,
    number,
    style_sheet,
    tag,
    time_axis,
    with_code,
)
from clusterddp.reporter import counted, duration
from clusterddp.rundir.timing import PHASES

_Rows = Sequence[Mapping[str, Any]]
#: The phases of a step: their words, and the colours of their lines.
_PHASES = {
    "data_s": ("waiting for the batch", "starting"),
    "own_s": ("own compute time", "training"),
    "wait_s": ("waiting for other ranks", "stuck"),
    "save_s": ("blocked by a save", "saving"),
}
#: Minimum and maximum height of a row in pixels, and the approximate height of all rows together.
_LOW, _HIGH, _ALL = 5, 14, 320
#: Units of a row's height in its drawing. One of them is the gap to the next row.
_ROW = 10
_INTRO = (
    "How much longer than the median rank each rank took for its own part of a step: waiting for its batch, and its "
    "own compute time. The other ranks wait that long for it."
)


def ranks_over_time(run: Mapping[str, Any]) -> Section | None:
    """The section, or None for a run whose ranks were not timed."""
    found = run["ranks"]
    if found is None:
        return None
    seconds = found["part_s"] * found["parts"]
    axis, marks = time_axis(seconds, found["begin"])
    parts: list[Markup | None] = []
    if found["ranks"] > 1:
        words = tag("p", _INTRO, class_="quiet")
        colours = legend((level, text) for level, (_, text) in LEVELS.items())
        parts += [words, colours, _map(found, axis, marks, run["began"]), _slow(found)]
    parts.append(_phases(found, run["began"]))
    return section("Ranks over time", "ranks", *parts)


def _map(found: Mapping[str, Any], axis: Axis, marks: Sequence[tuple[float, str]], began: float) -> Markup:
    """The rows of a host, beside its name."""
    rows = found["rows"]
    height = max(_LOW, min(_HIGH, _ALL // len(rows)))
    cells: list[Markup] = []
    for host, grouped in groupby(rows, key=lambda row: row["host"]):
        own = list(grouped)
        name = _name(host)
        cells += [tag("div", tag("b", name), " ", tag("span", _ranks(own), class_="quiet")), _drawn(own, name, height)]
    return zoomable([*cells, tag("div"), ruler(marks, axis)], axis, began, "Ranks over time", class_="heat")


def _name(host: str | None) -> str:
    if host is None:
        return "the other hosts"
    return plain(host) or "host unknown"


def _ranks(rows: _Rows) -> str:
    """``ranks 0-7``."""
    numbers = sorted({rank for row in rows for rank in row["ranks"]})
    pieces = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        own = [number for _, number in run]
        pieces.append(str(own[0]) if len(own) == 1 else f"{own[0]}-{own[-1]}")
    shown = ", ".join(pieces[:4]) + (", ..." if len(pieces) > 4 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _drawn(rows: _Rows, name: str, height: int) -> Markup:
    """One path per level: a box for each stretch of time."""
    boxes: dict[str, list[str]] = {level: [] for level in LEVELS}
    for place, row in enumerate(rows):
        at, parts = 0, len(row["excess"])
        for level, stretch in groupby(map(_level, row["excess"])):
            length = len(list(stretch))
            left, right = (round(WIDTH * part / parts) for part in (at, at + length))
            at += length
            if level is not None:
                boxes[level].append(f"M{left} {_ROW * place}h{right - left}v{_ROW - 1}H{left}z")
    drawn = [
        tag("path", tag("title", f"{name}: {LEVELS[level][1]}"), class_=f"f-{level}", d="".join(own))
        for level, own in boxes.items()
        if own
    ]
    box = {"viewBox": f"0 0 {WIDTH} {_ROW * len(rows)}", "preserveAspectRatio": "none"}
    known = [value for row in rows for value in row["excess"] if value is not None]
    label = f"{name}, {_ranks(rows)}: at most {100 * max(known, default=0.0):.0f}% of a step"
    picture = tag("svg", *drawn, height=height * len(rows), **box)
    return tag("svg", picture, height=height * len(rows), role="img", aria_label=label)


def _level(excess: float | None) -> str | None:
    if excess is None:
        return None
    return [level for level, (least, _) in LEVELS.items() if excess >= least][-1]


def _slow(found: Mapping[str, Any]) -> Markup:
    """The ranks that cost most, a sentence each."""
    if not found["slow"]:
        return tag("p", f"No slow rank made the others wait for {100 * COST:.0f}% of the time.")
    return tag("div", tag("h3", "Slow ranks"), tag("ul", *(tag("li", *_of_slow(one)) for one in found["slow"])))


def _of_slow(one: Mapping[str, Any]) -> Iterable[object]:
    yield tag("b", f"Rank {one['rank']} on {plain(one['host']) or 'an unknown host'}")
    per_step = f"{_seconds(one['work_s'])} per step instead of {_seconds(one['median_s'])}"
    yield f": {per_step}, for {duration(one['slow_s'])}. "
    yield f"The slow part was {_PHASES[one['phase']][0]}. "
    yield f"The other ranks spent {100 * one['excess']:.0f}% of their training time waiting for it."


def _seconds(value: float) -> str:
    return f"{1000 * value:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def _phases(found: Mapping[str, Any], began: float) -> Markup | None:
    """The phases of a step of the median rank, over time."""
    curves = []
    for phase in PHASES:
        points = [
            [found["begin"] - began + (part + 0.5) * found["part_s"], *(value,) * 3]
            for part, value in enumerate(found["median"][phase])
            if value is not None
        ]
        words, colour = _PHASES[phase]
        if points:
            curves.append(Curve(_pieces(points, found["part_s"]), colour, words, band=False, from_zero=True))
    if not curves:
        return None
    latest = found["begin"] - began + found["part_s"] * found["parts"]
    axis, marks = time_axis(latest)
    names = legend((curve.colour, curve.title) for curve in curves)
    who = "the median rank" if found["ranks"] > 1 else "the rank"
    drawing = chart(curves, axis, marks, "Seconds per step over time", 4 * found["parts"])
    caption = tag("figcaption", f"Seconds per step of {who}, over the time since the first submission")
    return tag("div", tag("h3", "What a step consists of"), names, tag("figure", caption, drawing))


def _pieces(points: Sequence[list[float]], width: float) -> list[list[list[float]]]:
    """The points, split where the run had no steps for a long time."""
    found: list[list[list[float]]] = []
    for point in points:
        if not found or point[0] - found[-1][-1][0] > 2.5 * width:
            found.append([])
        found[-1].append(point)
    return found


Run = Mapping[str, Any]
#: The page's only script.
SCRIPT = Path(__file__).with_name("zoom.js").read_text()
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
#: Makes a browser refuse to load anything, or to run anything but the script.
_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'"
_HINT = (
    "Drag across a chart to zoom in. Double-click to reset the zoom. With the keyboard, press Tab to reach a chart, "
    "then + and -, the arrow keys, and Esc."
)
#: The maximum number of runs in a table, notes, metrics in a table, and failures of several runs.
_RUNS, _NOTES, _COLUMNS, _FAILURES = 400, 20, 4, 60


def page(report: Mapping[str, Any]) -> str:
    """The whole page. ``report``: what ``--json`` prints."""
    runs = report["runs"]
    sections = _of_one(runs[0]) if len(runs) == 1 else _of_several(runs)
    found = [part for part in sections if part is not None]
    sweep = f"{plain(runs[0]['sweep'])}: " if len({run["sweep"] for run in runs}) == 1 and runs[0]["sweep"] else ""
    title = plain(runs[0]["name"]) if len(runs) == 1 else f"{sweep}{counted(len(runs), 'run')}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} - clusterddp report"),
        tag("style", Markup(style_sheet())),
    )
    zone = time.strftime("%Z", time.localtime(report["made"]))
    words = f"Made {when(report['made'])} by clusterddp {report['version']}. Times are in {zone}."
    made = tag("p", words, class_="quiet small")
    hint = tag("p", _HINT, class_="hint quiet small", hidden="")
    main = tag("main", hint, *(part.body for part in found))
    script = tag("script", Markup(SCRIPT))
    several = "several" if len(runs) > 1 else None
    body = tag("body", _header(runs, title), _contents(found), main, tag("footer", made), script, class_=several)
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _contents(sections: Iterable[Section]) -> Markup:
    """Links to the sections, for the keyboard, too."""
    links = [tag("a", part.title, href=f"#{part.anchor}") for part in sections]
    return tag("nav", *links, aria_label="Sections")


def _header(runs: Sequence[Run], title: str) -> Markup:
    if len(runs) > 1:
        states = Counter(run["state"] for run in runs)
        words = ", ".join(f"{count} {state}" for state, count in states.most_common())
        return tag("header", tag("h1", title), tag("p", f"{_winner(runs)}{words}.", class_="verdict"))
    run = runs[0]
    return tag(
        "header",
        tag("p", clipped(run["run"], 300), class_="quiet small"),
        tag("h1", title, " "),
        tag("p", tag("span", run["state"], class_=f"badge {_tone(run['state'])}"), style="margin:8px 0 0"),
        tag("p", with_code(run["verdict"]), class_="verdict"),
        _facts(run),
    )


def _winner(runs: Sequence[Run]) -> str:
    """Which run has the best newest value, as ``list --best`` says it, or empty if no run has one."""
    name = main_of(runs)
    first = ranked(runs, name)[0]
    value = newest(first, name)
    if value is None or not has_rank(first, name):
        return ""
    return f"Best {plain(name)}: {number(value['value'])}, {plain(label(first))}. "


def _tone(state: str) -> str:
    return {"completed": "good", "running": "good", "failed": "bad", "cancelled": "bad", "unknown": "bad"}.get(
        state, ""
    )


def _repeated(booked: Mapping[str, Any]) -> str:
    return "unknown" if booked["repeated_steps"] is None else f"{booked['repeated_steps']:,}"


def _facts(run: Run) -> Markup:
    """The most important figures."""
    step, steps, booked = run["step"], run["steps"], run["time"]
    of = f" of {steps:,}" if steps is not None and steps != step else ""
    facts = [("Steps", f"{step:,}{of}" if step is not None else "none recorded")]
    if step is None and run["steps_made"] is not None:
        facts = [("Steps in the newest attempt", f"{run['steps_made']:,}")]
    if (best := _best(run)) is not None:
        facts.append(best)
    if booked is not None:
        facts.append(
            ("Since submission" if booked["provisional"] else "Submission to end", duration(booked["total_s"]))
        )
        facts.append(("Productive time (ETTR)", f"{100 * booked['ettr']:.0f}%"))
        if booked["goodput"] is not None:
            facts.append(("With nodes (goodput)", f"{100 * booked['goodput']:.0f}%"))
        facts.append(("Steps repeated", _repeated(booked)))
        facts.append(("Attempts", str(len([one for one in run["attempts"] if one["attempt"] is not None]))))
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts), class_="facts")


def _best(run: Run) -> tuple[str, str] | None:
    """The best value of the run's main metric: that of its best checkpoint, if it keeps one."""
    if saved := run["checkpoints"]["best"]:
        value = number(saved["value"]) if type(saved["value"]) in (int, float) else str(saved["value"])
        return f"Best {plain(saved['metric'])}", f"{value}, checkpoint {saved['step']:,}"
    found = next((one for one in run["metrics"] if one["best"]), None)
    return found and (
        f"Best {plain(found['name'])}",
        f"{number(found['best']['value'])} at step {found['best']['step']:,}",
    )


# --- one run


def _of_one(run: Run) -> list[Section | None]:
    return [
        _notes([run]),
        timeline(run),
        where_the_time_went(run),
        metrics([run], members=False),
        ranks_over_time(run),
        gpus(run),
        _failures(run),
        checkpoints(run),
        _commands(run),
        _code(run),
        _job(run),
        _history(run),
    ]


def _notes(runs: Sequence[Run]) -> Section | None:
    """The records that could not be read."""
    several = len(runs) > 1
    notes = [f"{plain(label(run))}: {note}" if several else note for run in runs for note in run["notes"]]
    if not notes:
        return None
    items = [tag("li", clipped(note, 400)) for note in notes[:_NOTES]]
    more = len(notes) - _NOTES
    rest = tag("p", f"and {counted(more, 'more note')}", class_="quiet") if more > 0 else None
    intro = tag("p", "Some of the run's records are missing or damaged. This report uses the others.")
    return section("Missing", "missing", tag("div", intro, tag("ul", *items), rest, class_="note"))


def _failures(run: Run) -> Section | None:
    if not run["failures"]:
        return None
    parts: list[Markup] = []
    for failure in reversed(run["failures"]):
        title = f"Attempt {failure['attempt']}, {when(failure['time'])}"
        parts += [tag("h3", title), tag("p", failure["words"])]
        if failure["box"] is not None:
            first = failure is run["failures"][-1]
            summary = tag("summary", "Traceback or end of the log")
            parts.append(tag("details", summary, _block(failure["box"]), open="" if first else None))
    return section("Failures", "failures", tag("p", "The newest first.", class_="quiet"), *parts)


def _block(text: str) -> Markup:
    return tag("pre", text)


def _commands(run: Run) -> Section:
    parts = [
        joined(tag("p", f"To {one['what']}:", style="margin:0"), _block(one["command"])) for one in run["commands"]
    ]
    return section("Commands", "commands", *parts)


def _code(run: Run) -> Section | None:
    nodes = Counter(one["nodes"] for one in run["attempts"] if one["nodes"])
    rows = [(plain(node), counted(count, "attempt")) for node, count in nodes.most_common(20)]
    code = [(name, plain(value)) for name, value in run["code"].items()]
    changed = [one for one in run["attempts"] if one["changed"]]
    changes = [(f"attempt {one['attempt']}", clipped(", ".join(one["changed"]), 300)) for one in changed]
    parts = [_pairs("Nodes", rows), _pairs("Code and versions, newest attempt", code)]
    parts.append(_pairs("The code changed before", changes[-20:]))
    if run["job"]["shape"]:
        parts.insert(0, tag("p", run["job"]["shape"]))
    shown = [part for part in parts if part is not None]
    return section("Nodes, versions, code", "code", *shown) if shown else None


def _pairs(title: str, rows: Sequence[tuple[str, str]]) -> Markup | None:
    if not rows:
        return None
    body = [tag("tr", tag("td", name), tag("td", value)) for name, value in rows]
    return joined(tag("h3", title), tag("table", tag("tbody", *body)))


def _job(run: Run) -> Section | None:
    if not run["job"]["text"]:
        return None
    whole = tag("details", tag("summary", "job.yaml, with all defaults"), _block(run["job"]["text"]))
    return section("Job definition", "job", whole)


def _history(run: Run) -> Section | None:
    if not run["history"]:
        return None
    rows = [
        tag(
            "tr",
            tag("td", _moment(one["time"]), class_="when small"),
            tag("td", one["attempt"], class_="n"),
            tag("td", one["words"]),
        )
        for one in run["history"]
    ]
    head = tag("tr", tag("th", "Time"), tag("th", "Attempt", class_="n"), tag("th", "Event"))
    table = tag("table", tag("thead", head), tag("tbody", *rows))
    summary = f"{counted(len(rows), 'message')} of {counted(run['events'], 'event')} in events.jsonl"
    return section("History", "history", tag("details", tag("summary", summary), table))


def _moment(moment: float) -> Markup:
    day, _, clock = when(moment).partition(" ")
    return joined(tag("span", day, class_="day"), " ", clock)


# --- several runs


def _of_several(runs: Sequence[Run]) -> list[Section | None]:
    several = [_members(runs), over_parameters(runs), metrics(runs, members=True), timelines(runs), _failures_of(runs)]
    return [_notes(runs), *several]


def _members(runs: Sequence[Run]) -> Section:
    """A row per run."""
    keys = list(dict.fromkeys(key for run in runs for key in run["values"]))[:8]
    main = main_of(runs)
    logged = dict.fromkeys([main, *(one["name"] for run in runs for one in run["metrics"])])
    names = [name for name in logged if name is not None and name not in keys][:_COLUMNS]
    of_sweep = len({label(run) for run in runs if run["values"]}) == len(runs)  # then the values identify the run
    titles = ["Place", *([] if of_sweep else ["Run"]), *(f"{plain(key)}=" for key in keys), *map(plain, names), "State"]
    titles += ["Step", "Time", "ETTR", "Inter\u00adruptions", "Repeated steps"]
    rows = []
    for place, run in enumerate(ranked(runs, main)[:_RUNS]):
        last = {one["name"]: one["last"]["value"] for one in run["metrics"] if one["last"] is not None}
        booked = run["time"]
        in_rank = has_rank(run, main)
        cells = [
            _right(place + 1 if in_rank else ""),
            *([] if of_sweep else [tag("td", plain(run["name"]))]),
            *(_right(plain(run["values"].get(key, ""))) for key in keys),
            *(_right(number(last[name]) if name in last else "") for name in names),
            tag("td", run["state"], class_=_tone(run["state"]) or None),
            _right("" if run["step"] is None else f"{run['step']:,}"),
            _right(duration(booked["total_s"]) if booked else ""),
            _right(f"{100 * booked['ettr']:.0f}%" if booked else ""),
            _right(sum(run["interruptions"].values())),
            _right(_repeated(booked) if booked else ""),
        ]
        best = "best" if place == 0 and in_rank else None
        rows.append(tag("tr", *cells, class_=best))
    left = {"Run", "State"}
    head = tag("tr", *(tag("th", title, class_=None if title in left else "n") for title in titles))
    more = len(runs) - len(rows)
    rest = tag("p", f"{counted(more, 'further run')} left out (--json has all).", class_="quiet") if more > 0 else None
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="wide")
    return section(
        "Runs", "runs", tag("div", table, class_="scroll", tabindex=0, role="region", aria_label="Runs"), rest
    )


def _right(text: object) -> Markup:
    return tag("td", text, class_="n")


def _failures_of(runs: Sequence[Run]) -> Section | None:
    """The newest failure of each run."""
    failed = [(run, run["failures"][-1]) for run in runs if run["failures"]][:_FAILURES]
    if not failed:
        return None
    rows = [tag("tr", tag("td", plain(label(run))), tag("td", clipped(one["words"], 300))) for run, one in failed]
    head = tag("tr", tag("th", "Run"), tag("th", "Newest failure"))
    return section("Failures", "failures", tag("table", tag("thead", head), tag("tbody", *rows)))
