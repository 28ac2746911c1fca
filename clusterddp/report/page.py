"""A report as one HTML page. It loads no other file, its only script is ``zoom.js``, and all texts of a run are escaped
(``theme.py``)."""

from __future__ import annotations

import base64
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.report.heatmap import ranks_over_time
from clusterddp.report.ranking import has_rank, label, main_of, newest, ranked
from clusterddp.report.sections import (
    Section,
    checkpoints,
    gpus,
    metrics,
    over_parameters,
    plain,
    section,
    timeline,
    timelines,
    when,
    where_the_time_went,
)
from clusterddp.report.theme import Markup, clipped, joined, number, style_sheet, tag, with_code
from clusterddp.reporter import counted, duration

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
