"""The parts of a report's page that draw or calculate: each takes the data of a run, and returns a section or None."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from clusterddp.report.booking import CATEGORIES
from clusterddp.report.charts import (
    Curve,
    Marks,
    bar,
    figure,
    lane,
    number,
    ruler,
    shares_height,
    steps_axis,
    time_axis,
)
from clusterddp.report.curves import BUCKETS
from clusterddp.report.efficiency import IDLE_NODES, WITHOUT_NODES, node_hours
from clusterddp.report.theme import GROUP_OF, GROUPS, Markup, clipped, tag, with_code
from clusterddp.reporter import counted, duration, value_text
from clusterddp.rundir.timing import GPU_FIGURES

Run = Mapping[str, Any]
#: The maximum number of lanes, of metrics, and of ranks in the table of GPUs.
LANES, METRICS, RANKS = 60, 20, 64
#: The fewest seconds of a category with a row. Fewer would be "0.0 s".
_SHOWN_S = 0.05
#: Runs shorter than this have all their times in seconds.
_BRIEF_S = 600.0
#: The longest name that is shown, in characters.
_NAME = 80


class Section(NamedTuple):
    """A part of the page. ``anchor``: its name in links."""

    title: str
    anchor: str
    body: Markup


def section(title: str, anchor: str, *parts: object) -> Section:
    """A card with a heading."""
    return Section(title, anchor, tag("section", tag("h2", title), *parts, id=anchor))


def when(moment: float | None) -> str:
    """A moment in local time."""
    return "" if moment is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def plain(name: object) -> str:
    """A name from a file, not longer than a line."""
    return clipped(" ".join(str(name).split()), _NAME)


def tone(state: str) -> str:
    """The class of a state's colour."""
    return {"completed": "good", "running": "good", "failed": "bad", "cancelled": "bad", "unknown": "bad"}.get(
        state, ""
    )


def repeated(booked: Mapping[str, Any]) -> str:
    """The number of steps that were made again."""
    return "unknown" if booked["repeated_steps"] is None else f"{booked['repeated_steps']:,}"


def number_cell(text: object) -> Markup:
    """A cell of a table, aligned to the right."""
    return tag("td", text, class_="n")


# --- time


def timeline(run: Run) -> Section | None:
    """A lane per attempt."""
    attempts = [found for found in run["attempts"] if found["spans"]][-LANES:]
    if not attempts:
        return None
    began = attempts[0]["begin"]
    axis, marks = time_axis(attempts[-1]["end"] - began, began)
    drawn = []
    for found in attempts:
        name = "not started" if found["attempt"] is None else f"Attempt {found['attempt']}"
        facts = [*_of_attempt(found), duration(found["end"] - found["begin"])]
        words = tag("p", tag("b", name), f": {' · '.join(facts)}")
        label = f"{name}, {', '.join(_largest(found['seconds']))}"
        drawn.append(tag("div", words, lane(found["spans"], axis, found["seconds"], label), class_="lane"))
    more = len([found for found in run["attempts"] if found["spans"]]) - len(attempts)
    left_out = f" The first {counted(more, 'attempt')} are left out." if more > 0 else ""
    waited = any(shares_height(found["spans"], axis) for found in attempts)
    waits = " The lower part of a bar is the share of time spent waiting for a straggler." if waited else ""
    intro = f"Each bar is an attempt, with the wait that led to it. It begins {when(began)}.{left_out}{waits}"
    used = {GROUP_OF.get(span[2], "down") for found in attempts for span in found["spans"]}
    entries = [tag("li", tag("i", class_=f"f-{group}"), words) for group, (words, _) in GROUPS.items() if group in used]
    colours = tag("ul", *entries, class_="legend")
    return section("Timeline", "timeline", tag("p", intro, class_="quiet"), colours, *drawn, ruler(marks, axis))


def _of_attempt(found: Mapping[str, Any]) -> list[str]:
    facts = [clipped(" ".join(found["words"].split()), 300)] if found["attempt"] is not None else []
    if found["job"] is not None:
        where = f" on {plain(found['nodes'])}" if found["nodes"] else ""
        facts.append(f"{'' if found['job'].startswith('process') else 'job '}{plain(found['job'])}{where}")
    if found["repeated"]:
        facts.append(f"repeated {counted(found['repeated'], 'step')}")
    return facts


def _largest(seconds: Mapping[str, float]) -> list[str]:
    ordered = sorted(seconds.items(), key=lambda part: -part[1])
    return [f"{CATEGORIES.get(name, name)} {duration(value)}" for name, value in ordered[:4]]


def where_the_time_went(run: Run) -> Section | None:
    """A bar per category, each of which begins where the one above it ends."""
    booked = run["time"]
    if booked is None or not booked["total_s"]:
        return None
    total, at, rows = booked["total_s"], 0.0, []
    for name, words in CATEGORIES.items():
        seconds = booked["seconds"].get(name, 0.0)
        share = seconds / total
        if seconds < _SHOWN_S:
            at += share
            continue
        drawn = bar(at, at + share, GROUP_OF[name], f"{words}: {_share(share)}")
        rows.append((words, drawn, _time(seconds, total), _share(share)))
        at += share
    body = [_time_row(*row) for row in rows]
    head = tag("tr", tag("th", "Category"), tag("td"), tag("th", "Time", class_="n"), tag("th", "Share", class_="n"))
    whole = _time_row(tag("b", "all"), "", _time(total, total), "100%")
    table = tag("table", tag("thead", head), tag("tbody", *body, whole, _idle_nodes(booked["idle_node_s"])))
    found = [table, _ratios(run)]
    if run["advice"]:
        found += [
            tag("h3", "What would save time"),
            tag("ul", *(tag("li", with_code(words)) for words in run["advice"])),
        ]
    return section("Where the time went", "time", *found)


def _time_row(category: str, drawn: str, time_: str, share: str) -> Markup:
    cells = (tag("td", category, class_="cat"), tag("td", drawn, class_="bar"), number_cell(time_), number_cell(share))
    return tag("tr", *cells)


def _idle_nodes(seconds: float) -> Markup | None:
    """The row of the nodes without ranks, which is no part of the run's time."""
    return _time_row("idle nodes", IDLE_NODES, node_hours(seconds), "") if seconds else None


def _ratios(run: Run) -> Markup:
    booked = run["time"]
    seconds, total = booked["seconds"], booked["total_s"]
    productive = seconds.get("training", 0.0) + seconds.get("evaluating", 0.0)
    without = sum(seconds.get(name, 0.0) for name in WITHOUT_NODES)
    lines = [
        f"ETTR = training and evaluating / all time since the first submission = {_exact(productive, total)} / "
        f"{_exact(total, total)} = {_share(booked['ettr'])}."
    ]
    if booked["goodput"] is not None:
        lines.append(
            f"Goodput = training and evaluating / time with nodes = {_exact(productive, total)} / "
            f"{_exact(total - without, total)} = {_share(booked['goodput'])}."
        )
    if booked["provisional"]:
        lines.append("The run has not ended, so the figures may still change.")
    return tag("p", " ".join(lines), class_="quiet small", style="margin-top:10px")


def _time(seconds: float, total: float) -> str:
    """A part of the time of a run."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if total < _BRIEF_S else duration(seconds)


def _exact(seconds: float, total: float) -> str:
    """The same with enough digits to check the ratios."""
    if total < _BRIEF_S:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:,.1f} min" if total < 10 * 3600 else f"{seconds / 3600:,.1f} h"


def _share(share: float) -> str:
    return "< 0.1%" if 0 < share < 0.001 else f"{100 * share:.1f}%"


# --- metrics


def metrics(run: Run) -> Section | None:
    """A chart per metric, over steps."""
    shown = run["metrics"][:METRICS]
    if not shown:
        return None
    edges = _edges(run)
    tails = (
        " Dashed: steps that were repeated later and do not count." if any(one["discarded"] for one in shown) else ""
    )
    dotted = " Dotted: where attempts resumed." if edges else ""
    intro = f"Over steps. Solid: steps that count. Shaded: the range of neighbouring steps.{tails}{dotted}"
    more = [plain(metric["name"]) for metric in run["metrics"][METRICS:]]
    words = f"Not drawn: {clipped(', '.join(more), 400)} (--json has all)."
    left_out = tag("p", words, class_="quiet") if more else None
    drawn = tag("div", *(_metric(metric, edges) for metric in shown), class_="pair")
    return section("Metrics", "metrics", tag("p", intro, class_="quiet"), drawn, left_out)


def _metric(metric: Mapping[str, Any], edges: Marks) -> Markup:
    """A metric's newest value, its values that cannot be drawn, and its chart."""
    name, facts = plain(metric["name"]), []
    if metric["last"] is not None:
        facts.append(f"{number(metric['last']['value'])} at step {metric['last']['step']:,}")
    if metric["not_finite"] is not None:
        count, step = metric["not_finite"]["count"], metric["not_finite"]["step"]
        facts.append(f"{counted(count, 'value')} NaN or infinite, the first at step {step:,}")
    tails = Curve(_newest_tails(metric), "repeating", "repeated later, does not count", faint=True)
    curves = [tails, Curve([metric["steps"]], "training", name)]
    points = [point for curve in curves for point in curve.points]
    drawn = figure(", ".join(facts), curves, *steps_axis(points), f"{name} over steps", edges) if points else None
    words = tag("p", ", ".join(facts), class_="quiet small") if not points else None
    return tag("div", tag("h3", name), words, drawn, class_="metric")


def _newest_tails(metric: Mapping[str, Any]) -> list[Any]:
    """The steps that were repeated later, of the newest attempts, with as many points as a curve has."""
    found, room = [], BUCKETS
    for tail in reversed(metric["discarded"]):
        room -= len(tail["points"])
        if room < 0:
            break
        found.append(tail["points"])
    return found


def _edges(run: Run) -> Marks:
    """Where attempts resumed, unless there are too many to tell them apart."""
    found = [
        (float(one["began_at"]), f"attempt {one['attempt']} resumed from step {one['began_at']:,}")
        for one in run["attempts"]
        if one["began_at"]
    ]
    return found if len(found) <= LANES else []


# --- checkpoints


def checkpoints(run: Run) -> Section | None:
    """The cost of saves."""
    found = run["checkpoints"]
    if not found["number"] and not found["failed"]:
        return None
    facts = [counted(found["number"], "checkpoint")]
    if found["newest"]:
        facts.append(f"the newest after step {found['newest']['step']:,}, {when(found['newest']['time'])}")
    if best := found["best"]:
        facts.append(f"the best after step {best['step']:,}, {best['metric']} {value_text(best['value'])}")
    if found["bytes"]:
        facts.append(f"{_size(found['bytes']['newest'])} each")
    if found["failed"]:
        facts.append(f"{found['failed']} not saved or not readable (see the history)")
    rows, charts = [], []
    for key, words in (("blocked_s", "training was blocked"), ("durable_s", "until it was on disk")):
        if found[key]:
            rows.append((words, f"{number(found[key]['median'])} s", f"{number(found[key]['most'])} s"))
            points = found[key]["points"]
            if len(points) > 1:
                text = f"seconds {words}, over steps"
                charts.append(figure(text, [Curve([points], "saving", words)], *steps_axis(points), text))
    head = tag("tr", tag("th", "Per checkpoint"), tag("th", "Median", class_="n"), tag("th", "Longest", class_="n"))
    body = [tag("tr", tag("td", a, class_="cat"), number_cell(b), number_cell(c)) for a, b, c in rows]
    table = tag("table", tag("thead", head), tag("tbody", *body)) if rows else None
    return section(
        "Checkpoints", "checkpoints", tag("p", f"{', '.join(facts)}."), tag("div", *charts, class_="pair"), table
    )


def _size(number_of_bytes: float) -> str:
    """``1.2 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number_of_bytes < 1000 or unit == "TB":
            break
        number_of_bytes /= 1000
    return f"{number_of_bytes:.3g} {unit}" if number_of_bytes < 1000 else f"{number_of_bytes:,.0f} {unit}"


# --- GPUs


def gpus(run: Run) -> Section | None:
    """What each rank's GPUs did in the newest attempt."""
    if not run["gpus"]:
        return None
    titles = ("Busy", "Memory", "Power", "Hottest", "Throttled", "Memory errors")
    units = ("%", "%", " W", " °C", "%", "")
    head = tag("tr", tag("th", "Rank"), tag("th", "Node"), *(tag("th", title, class_="n") for title in titles))
    body = [
        tag(
            "tr",
            tag("td", str(row["rank"])),
            tag("td", plain(row["host"])),
            *(
                number_cell("" if row[name] is None else f"{row[name]:,.0f}{unit}")
                for name, unit in zip(GPU_FIGURES, units, strict=True)
            ),
        )
        for row in run["gpus"][:RANKS]
    ]
    more = len(run["gpus"]) - len(body)
    rest = tag("p", f"and {counted(more, 'more rank')}", class_="quiet") if more > 0 else None
    intro = "Per rank in the newest attempt, during its steps. Busy: the share of the time in which a kernel ran."
    table = tag("table", tag("thead", head), tag("tbody", *body))
    return section("GPUs", "gpus", tag("p", intro, class_="quiet"), table, rest)
