"""The parts of a report's page: each takes the data of one run, or of several, and returns a section or None."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from clusterddp.report.booking import CATEGORIES, Interval
from clusterddp.report.charts import (
    Curve,
    bar,
    chart,
    is_logarithmic,
    lane,
    ruler,
    shares_height,
    steps_axis,
    zoomable,
)
from clusterddp.report.curves import Point, has_rank, label, main_of, newest, parameters, ranked
from clusterddp.report.efficiency import IDLE_NODES, WITHOUT_NODES, node_hours
from clusterddp.report.theme import GROUP_OF, GROUPS, SERIES, Axis, Markup, clipped, number, tag, time_axis, with_code
from clusterddp.report.timeline import spans
from clusterddp.reporter import counted, duration
from clusterddp.rundir.timing import GPU_FIGURES

Run = Mapping[str, Any]
#: The maximum number of lanes, of metrics, and of runs in one chart.
LANES, METRICS, OVERLAID = 60, 20, 32
#: The maximum number of ranks in the table of GPUs.
RANKS = 64
#: The maximum number of runs with their own colour. If there are more, the best have one and the others are grey.
COLOURED = 6
#: Points of all charts together, which bound the size of a page, and the least and most of one run in one chart.
_POINTS, _LEAST_POINTS, _MOST_POINTS = 10_000, 20, 600
#: Parts of all lanes of several runs, and the maximum of one.
_PARTS, _MOST_PARTS = 6000, 1000
#: The fewest seconds of a category with a row. Fewer would be "0.0 s".
_SHOWN_S = 0.05
#: Runs shorter than this have all their times in seconds.
_BRIEF_S = 600.0
#: The maximum number of values of a parameter that are named below a chart.
_MOST_MARKS = 8
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
    waits = _waits((found["spans"] for found in attempts), axis)
    intro = f"Each bar is an attempt, with the wait that led to it. It begins {when(began)}.{left_out}{waits}"
    colours = legend_of_groups(attempts)
    picture = zoomable([*drawn, ruler(marks, axis)], axis, run["began"], "Timeline of the attempts")
    return section("Timeline", "timeline", tag("p", intro, class_="quiet"), colours, picture)


def _waits(lanes: Iterable[Iterable[Sequence[Any]]], axis: Axis) -> str:
    """The meaning of the lower part of a bar, if there is one."""
    waited = any(shares_height(parts, axis) for parts in lanes)
    return " The lower part of a bar is the share of time spent waiting for a straggler." if waited else ""


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


def timelines(runs: Sequence[Run]) -> Section | None:
    """A lane per run."""
    known = [run for run in runs if any(found["spans"] for found in run["attempts"])]
    if not known:
        return None
    shown = known[:LANES]
    began = min(run["began"] for run in shown)
    ended = max(run["ended"] for run in shown)
    axis, marks = time_axis(ended - began, began)
    width = max(ended - began, 1.0) / min(_MOST_PARTS, _PARTS // len(shown))
    drawn, parts = [], []
    for run in shown:
        booked = [Interval(*part[:3]) for found in run["attempts"] for part in found["spans"]]
        parts.append(spans(booked, began, width))
        seconds = run["time"]["seconds"] if run["time"] else {}
        picture = lane(parts[-1], axis, seconds, f"{run['name']}, {', '.join(_largest(seconds))}")
        drawn.append(tag("div", tag("p", tag("b", plain(label(run))), f": {_in_short(run)}"), picture, class_="lane"))
    more = len(known) - len(shown)
    left_out = f" {counted(more, 'further run')} left out." if more else ""
    intro = (
        f"Each bar is a run, from its first submission. The first begins {when(began)}.{left_out}{_waits(parts, axis)}"
    )
    colours = legend_of_groups(found for run in shown for found in run["attempts"])
    # their time counts from the first run's submission, that of their curves from each run's own
    together = zoomable([*drawn, ruler(marks, axis)], replace(axis, name="dates"), began, "Timeline of the runs")
    return section("Timeline", "timeline", tag("p", intro, class_="quiet"), colours, together)


def _in_short(run: Run) -> str:
    stops = sum(run["interruptions"].values())
    parts = [run["state"], f"interrupted {'once' if stops == 1 else counted(stops, 'time')}" if stops else ""]
    if run["time"]:
        parts.append(f"{100 * run['time']['ettr']:.0f}% training that counts")
    return " · ".join(part for part in parts if part)


def legend_of_groups(lanes: Iterable[Mapping[str, Any]]) -> Markup:
    """The meaning of the colours of these lanes."""
    used = {GROUP_OF.get(span[2], "down") for found in lanes for span in found["spans"]}
    return legend((group, words) for group, (words, _) in GROUPS.items() if group in used)


def legend(items: Iterable[tuple[str, str]]) -> Markup:
    entries = [tag("li", tag("i", class_=f"f-{colour}"), words) for colour, words in items]
    return tag("ul", *entries, class_="legend")


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
        drawn = bar([(at, at + share, GROUP_OF[name])], f"{words}: {_share(share)}")
        rows.append((words, drawn, _time(seconds, total), _share(share)))
        at += share
    body = [
        _row([tag("td", a, class_="cat"), tag("td", b, class_="bar"), _number(c), _number(d)]) for a, b, c, d in rows
    ]
    head = _row([tag("th", "Category"), tag("td", ""), tag("th", "Time", class_="n"), tag("th", "Share", class_="n")])
    whole = _row([tag("td", tag("b", "all")), tag("td", ""), _number(_time(total, total)), _number("100%")])
    table = tag("table", tag("thead", head), tag("tbody", *body, whole, _idle_nodes(booked["idle_node_s"])))
    found = [table, _ratios(run)]
    if run["advice"]:
        found += [
            tag("h3", "What would save time"),
            tag("ul", *(tag("li", with_code(words)) for words in run["advice"])),
        ]
    return section("Where the time went", "time", *found)


def _idle_nodes(seconds: float) -> Markup | None:
    """The row of the nodes without ranks, which is no part of the run's time."""
    if not seconds:
        return None
    return _row([tag("td", "idle nodes", class_="cat"), tag("td", IDLE_NODES), _number(node_hours(seconds)), tag("td")])


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


def _number(text: object) -> Markup:
    return tag("td", text, class_="n")


def _row(cells: Iterable[Markup]) -> Markup:
    return tag("tr", *cells)


# --- metrics


def metrics(runs: Sequence[Run], members: bool) -> Section | None:
    """A pair of charts per metric: over steps, and over hours. ``members``: the runs share their charts."""
    drawn = [run for run in (ranked(runs, main_of(runs)) if members else runs) if run["metrics"]][:OVERLAID]
    names = list(dict.fromkeys(metric["name"] for run in drawn for metric in run["metrics"]))
    if not names:
        return None
    shown = names[:METRICS]
    most = len(drawn) * max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS // (2 * len(shown) * len(drawn))))
    intro, names_of_runs = _words_of_curves(drawn, members, len(runs))
    parts = [_pair(name, drawn, members, most) for name in shown]
    more = [plain(name) for name in names[METRICS:]]
    words = f"Not drawn: {clipped(', '.join(more), 400)} (--json has all)."
    left_out = tag("p", words, class_="quiet") if more else None
    return section("Metrics", "metrics", tag("p", intro, class_="quiet"), names_of_runs, *parts, left_out)


def _words_of_curves(drawn: Sequence[Run], members: bool, number_of_runs: int) -> tuple[str, Markup | None]:
    if members:
        more = number_of_runs - len(drawn)
        left_out = f" {counted(more, 'run')} not drawn." if more else ""
        words = f"Only steps that count. The time is that of training, without waits between attempts.{left_out}"
        return words, _names_of(drawn)
    has_tails = any(metric["discarded"] for metric in drawn[0]["metrics"])
    tails = " Dashed: steps that were repeated later and do not count." if has_tails else ""
    edges = " Dotted: where attempts resumed." if _edges(drawn[0]) else ""
    return f"Solid: steps that count. Shaded: the range of neighbouring steps.{tails}{edges}", None


def _pair(name: str, runs: Sequence[Run], members: bool, most: int) -> Markup:
    """A metric's charts, side by side where there is room."""
    own = [
        (place, run, metric) for place, run in enumerate(runs) for metric in run["metrics"] if metric["name"] == name
    ]
    own = own[::-1] if members else own  # the best in front
    many = len(runs)
    over_steps = [curve for place, run, metric in own for curve in _over_steps(place, run, metric, members, many)]
    over_time = [curve for place, run, metric in own for curve in _over_time(place, run, metric, members, many)]
    parts = [tag("h3", plain(name)), _newest(own, members)]
    charts = []
    if any(curve.points for curve in over_steps):
        axis, marks = steps_axis(over_steps)
        drawing = chart(over_steps, axis, marks, f"{plain(name)} over steps", most, [] if members else _edges(runs[0]))
        charts.append(_figure("over steps", over_steps, drawing, most))
    latest = max((point[0] for curve in over_time for point in curve.points), default=0.0)
    if latest > 0:
        axis, marks = time_axis(latest)
        drawing = chart(over_time, axis, marks, f"{plain(name)} over time", most)
        since = f"over the time since the first {'submission' if runs[0]['time'] else 'recorded step'}"
        charts.append(_figure("over the time of training" if members else since, over_time, drawing, most))
    return tag("div", *parts, tag("div", *charts, class_="pair"), class_="metric")


def _of_member(place: int, run: Run, pieces: Sequence[Sequence[Point]], number_of_runs: int) -> Curve:
    """The curve of one of several runs, the best of which come first."""
    if _has_colour(place, number_of_runs):
        return Curve(pieces, SERIES[place], plain(label(run)), band=False, run=place)
    return Curve(pieces, "queued", plain(label(run)), band=False, run=place, kind="back")


def _has_colour(place: int, number_of_runs: int) -> bool:
    return place < (number_of_runs if number_of_runs <= len(SERIES) else COLOURED)


def _names_of(runs: Sequence[Run]) -> Markup:
    """The colours of several runs, and one for all others."""
    entries = [
        tag("li", tag("i", class_=f"f-{SERIES[place]}"), plain(label(run)), data_run=place)
        for place, run in enumerate(runs)
        if _has_colour(place, len(runs))
    ]
    if more := len(runs) - len(entries):
        entries.append(tag("li", tag("i", class_="f-queued"), f"{counted(more, 'other run')}"))
    return tag("ul", *entries, class_="legend")


def _over_steps(place: int, run: Run, metric: Mapping[str, Any], members: bool, many: int) -> list[Curve]:
    """A run's curve. If it is drawn alone, also the steps that were repeated later."""
    if members:
        return [_of_member(place, run, [metric["steps"]], many)]
    tails = [tail["points"] for tail in metric["discarded"]]
    found = [Curve(tails, "repeating", "repeated later, does not count", faint=True)] if tails else []
    return [*found, Curve([metric["steps"]], SERIES[0], plain(metric["name"]))]


def _over_time(place: int, run: Run, metric: Mapping[str, Any], members: bool, many: int) -> list[Curve]:
    """The same over seconds, with gaps between attempts. For one of several runs, over seconds of training."""
    pieces: dict[bool, list[list[list[float]]]] = {True: [], False: []}
    for part in metric["hours"]:
        pieces[part["counts"]].append([[3600 * point[0], *point[1:]] for point in part["points"]])
    if members:
        joined, at = [], 0.0
        for piece in pieces[True]:
            joined += [[at + point[0] - piece[0][0], *point[1:]] for point in piece]
            at = joined[-1][0]
        return [_of_member(place, run, [joined], many)]
    found = [Curve(pieces[False], "repeating", "repeated later, does not count", faint=True)] if pieces[False] else []
    return [*found, Curve(pieces[True], SERIES[0], plain(metric["name"]))]


def _figure(words: str, curves: Sequence[Curve], drawing: Markup, most: int) -> Markup:
    scale = ", logarithmic scale" if is_logarithmic(curves, most) else ""
    return tag("figure", tag("figcaption", words + scale), drawing)


def _newest(own: Sequence[tuple[int, Run, Mapping[str, Any]]], members: bool) -> Markup | None:
    """The newest value of a run's metric, and values that cannot be drawn."""
    parts = []
    for _, run, metric in own:
        prefix = f"{plain(label(run))}: " if members else ""
        if metric["last"] is not None and not members:
            parts.append(f"{number(metric['last']['value'])} at step {metric['last']['step']:,}")
        if metric["not_finite"] is not None:
            count, step = metric["not_finite"]["count"], metric["not_finite"]["step"]
            parts.append(f"{prefix}{counted(count, 'value')} NaN or infinite, the first at step {step:,}")
    return tag("p", ", ".join(parts[:8]), class_="quiet small") if parts else None


def _edges(run: Run) -> list[tuple[float, str]]:
    """Where attempts resumed."""
    found = [
        (float(one["began_at"]), f"attempt {one['attempt']} resumed from step {one['began_at']:,}")
        for one in run["attempts"]
        if one["began_at"]
    ]
    return found if len(found) <= LANES else []


def over_parameters(runs: Sequence[Run]) -> Section | None:
    """The newest value of the main metric over each parameter of a sweep."""
    name = main_of(runs)
    shown = [run for run in ranked(runs, name) if has_rank(run, name)]
    charts = []
    for key, values in list(parameters(shown).items())[:METRICS]:
        axis = Axis(-0.5, len(values) - 0.5)  # only the order of a parameter's values is known
        points = []
        for run in shown:
            if key in run["values"] and (value := newest(run, name)) is not None:
                points.append([float(values.index(run["values"][key])), *[value["value"]] * 3])
        curves = [
            Curve([[point] for point in points[1:]], "queued", "the others", band=False, kind="dots"),
            Curve([points[:1]], SERIES[0], f"the best: {plain(label(shown[0]))}", band=False, kind="dots"),
        ]
        step = -(-len(values) // _MOST_MARKS)
        marks = [(float(place), plain(text)) for place, text in enumerate(values) if place % step == 0]
        drawing = chart(curves, axis, marks, f"{plain(name)} over {plain(key)}", _POINTS)
        charts.append(_figure(f"{plain(name)} over {plain(key)}", curves, drawing, _POINTS))
    if not charts:
        return None
    words = f"Each dot is a run: its newest {plain(name)}. The best run is blue."
    return section("Parameters", "parameters", tag("p", words, class_="quiet"), tag("div", *charts, class_="pair"))


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
        value = f"{best['value']:.4g}" if isinstance(best["value"], float) else best["value"]
        facts.append(f"the best after step {best['step']:,}, {best['metric']} {value}")
    if found["bytes"]:
        facts.append(f"{size(found['bytes']['newest'])} each")
    if found["failed"]:
        facts.append(f"{found['failed']} not saved or not readable (see the history)")
    rows, charts = [], []
    for key, words in (("blocked_s", "training was blocked"), ("durable_s", "until it was on disk")):
        if found[key]:
            rows.append((words, f"{number(found[key]['median'])} s", f"{number(found[key]['most'])} s"))
            curve = [Curve([found[key]["points"]], "saving", words)]
            axis, marks = steps_axis(curve)
            if len(found[key]["points"]) > 1:
                drawing = chart(curve, axis, marks, f"{words}, over steps", 300)
                charts.append(_figure(f"seconds {words}, over steps", curve, drawing, 300))
    head = _row([tag("th", "Per checkpoint"), tag("th", "Median", class_="n"), tag("th", "Longest", class_="n")])
    body = [_row([tag("td", a, class_="cat"), _number(b), _number(c)]) for a, b, c in rows]
    table = tag("table", tag("thead", head), tag("tbody", *body)) if rows else None
    return section(
        "Checkpoints", "checkpoints", tag("p", f"{', '.join(facts)}."), tag("div", *charts, class_="pair"), table
    )


def size(number_of_bytes: float) -> str:
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
    head = _row([tag("th", "Rank"), tag("th", "Node"), *(tag("th", title, class_="n") for title in titles)])
    body = [
        _row(
            [
                tag("td", str(row["rank"])),
                tag("td", plain(row["host"])),
                *(
                    _number("" if row[name] is None else f"{row[name]:,.0f}{unit}")
                    for name, unit in zip(GPU_FIGURES, units, strict=True)
                ),
            ]
        )
        for row in run["gpus"][:RANKS]
    ]
    more = len(run["gpus"]) - len(body)
    rest = tag("p", f"and {counted(more, 'more rank')}", class_="quiet") if more > 0 else None
    intro = "Per rank in the newest attempt, during its steps. Busy: the share of the time in which a kernel ran."
    table = tag("table", tag("thead", head), tag("tbody", *body))
    return section("GPUs", "gpus", tag("p", intro, class_="quiet"), table, rest)
