"""A report as one HTML page. It loads no other file and has no script, and all texts of a run are escaped
(``theme.py``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clusterddp.report.charts import number
from clusterddp.report.ranking import label, members, over_parameters, winner
from clusterddp.report.sections import (
    Run,
    Section,
    checkpoints,
    gpus,
    metrics,
    plain,
    repeated,
    section,
    timeline,
    tone,
    when,
    where_the_time_went,
)
from clusterddp.report.theme import Markup, clipped, joined, style_sheet, tag, with_code
from clusterddp.reporter import counted, duration

#: Makes a browser refuse to load or to run anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
#: The maximum number of notes.
_NOTES = 20


def page(report: Mapping[str, Any]) -> str:
    """The whole page. ``report``: what ``--json`` prints."""
    runs = report["runs"]
    sections = _of_one(runs[0]) if len(runs) == 1 else [_notes(runs), members(runs), over_parameters(runs)]
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
    main = tag("main", *(part.body for part in found))
    several = "several" if len(runs) > 1 else None
    body = tag("body", _header(runs, title), _contents(found), main, tag("footer", made), class_=several)
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _contents(sections: Iterable[Section]) -> Markup:
    """Links to the sections, for the keyboard, too."""
    links = [tag("a", part.title, href=f"#{part.anchor}") for part in sections]
    return tag("nav", *links, aria_label="Sections")


def _header(runs: Sequence[Run], title: str) -> Markup:
    if len(runs) > 1:
        states = Counter(run["state"] for run in runs)
        words = ", ".join(f"{count} {state}" for state, count in states.most_common())
        return tag("header", tag("h1", title), tag("p", f"{winner(runs)}{words}.", class_="verdict"))
    run = runs[0]
    return tag(
        "header",
        tag("p", clipped(run["run"], 300), class_="quiet small"),
        tag("h1", title, " "),
        tag("p", tag("span", run["state"], class_=f"badge {tone(run['state'])}"), style="margin:8px 0 0"),
        tag("p", with_code(run["verdict"]), class_="verdict"),
        _facts(run),
    )


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
        facts.append(("Steps repeated", repeated(booked)))
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
        metrics(run),
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
