"""Several runs on one page: which is best, a table in that order, and the parameters of a sweep.

The best run has the best newest value of the metric by which most of them are judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from clusterddp.report.charts import Axis, Curve, figure, number
from clusterddp.report.sections import METRICS, Run, Section, number_cell, plain, repeated, section, tone
from clusterddp.report.theme import tag
from clusterddp.reporter import counted, duration

#: States of runs that are ranked, as in ``list --best``. The others ended early.
RANKED = ("completed", "running", "held", "pending")
#: The maximum number of runs and of metrics in the table, and of values of a parameter that are named below a chart.
_RUNS, _COLUMNS, _MOST_MARKS = 400, 4, 8


def _main_of(runs: Sequence[Run]) -> str | None:
    """The metric by which most runs are judged, or None if none was logged."""
    mains = Counter(run["metrics"][0]["name"] for run in runs if run["metrics"])
    return mains.most_common(1)[0][0] if mains else None


def _newest(run: Run, name: str | None) -> Mapping[str, Any] | None:
    """The newest value of a metric, with its step, or None."""
    found: Mapping[str, Any] | None = next((one["last"] for one in run["metrics"] if one["name"] == name), None)
    return found


def ranked(runs: Sequence[Run], name: str | None) -> list[Run]:
    """The runs, best first and then by name, followed by those that failed or have no value, in their order."""
    own = [one["best"] for run in runs for one in run["metrics"] if one["name"] == name]
    smallest = any(best["smallest"] for best in own if best)

    def key(run: Run) -> tuple[bool, float, str]:
        value = _newest(run, name) if run["state"] in RANKED else None
        if value is None:
            return True, 0.0, ""
        return False, value["value"] if smallest else -value["value"], str(run["name"])

    return sorted(runs, key=key)


def _has_rank(run: Run, name: str | None) -> bool:
    """Whether a run is compared with the others."""
    return run["state"] in RANKED and _newest(run, name) is not None


def label(run: Run) -> str:
    """The label that identifies a run: its parameters, or else its name."""
    return ", ".join(f"{key}={value}" for key, value in run["values"].items()) or str(run["name"])


def _parameters(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The keys of a sweep that have several values, with these in order: numbers, then texts."""
    found: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for run in runs for key in run["values"]):
        values = {run["values"][key] for run in runs if key in run["values"]}
        if len(values) > 1:
            found[key] = sorted(values, key=_in_order)
    return found


def _in_order(text: str) -> tuple[bool, float, str]:
    try:
        value = float(text)
    except ValueError:
        return True, 0.0, text
    return False, value if value == value else 0.0, text


def winner(runs: Sequence[Run]) -> str:
    """Which run has the best newest value, as ``list --best`` says it, or empty if no run has one."""
    name = _main_of(runs)
    first = ranked(runs, name)[0]
    value = _newest(first, name)
    if value is None or not _has_rank(first, name):
        return ""
    return f"Best {plain(name)}: {number(value['value'])}, {plain(label(first))}. "


def members(runs: Sequence[Run]) -> Section:
    """A row per run."""
    keys = list(dict.fromkeys(key for run in runs for key in run["values"]))[:8]
    main = _main_of(runs)
    logged = dict.fromkeys([main, *(one["name"] for run in runs for one in run["metrics"])])
    names = [name for name in logged if name is not None and name not in keys][:_COLUMNS]
    of_sweep = len({label(run) for run in runs if run["values"]}) == len(runs)  # then the values identify the run
    titles = ["Place", *([] if of_sweep else ["Run"]), *(f"{plain(key)}=" for key in keys), *map(plain, names), "State"]
    titles += ["Step", "Time", "ETTR", "Inter\u00adruptions", "Repeated steps"]
    rows = []
    for place, run in enumerate(ranked(runs, main)[:_RUNS]):
        last = {one["name"]: one["last"]["value"] for one in run["metrics"] if one["last"] is not None}
        booked = run["time"]
        in_rank = _has_rank(run, main)
        cells = [
            number_cell(place + 1 if in_rank else ""),
            *([] if of_sweep else [tag("td", plain(run["name"]))]),
            *(number_cell(plain(run["values"].get(key, ""))) for key in keys),
            *(number_cell(number(last[name]) if name in last else "") for name in names),
            tag("td", run["state"], class_=tone(run["state"]) or None),
            number_cell("" if run["step"] is None else f"{run['step']:,}"),
            number_cell(duration(booked["total_s"]) if booked else ""),
            number_cell(f"{100 * booked['ettr']:.0f}%" if booked else ""),
            number_cell(sum(run["interruptions"].values())),
            number_cell(repeated(booked) if booked else ""),
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


def over_parameters(runs: Sequence[Run]) -> Section | None:
    """The newest value of the main metric over each parameter of a sweep."""
    name = _main_of(runs)
    shown = [run for run in ranked(runs, name) if _has_rank(run, name)]
    charts = []
    for key, values in list(_parameters(shown).items())[:METRICS]:
        axis = Axis(-0.5, len(values) - 0.5)  # only the order of a parameter's values is known
        points = []
        for run in shown:
            if key in run["values"] and (value := _newest(run, name)) is not None:
                points.append([float(values.index(run["values"][key])), *[value["value"]] * 3])
        curves = [
            Curve([[point] for point in points[1:]], "queued", "the others", dots=True),
            Curve([points[:1]], "training", f"the best: {plain(label(shown[0]))}", dots=True),
        ]
        step = -(-len(values) // _MOST_MARKS)
        marks = [(float(place), plain(text)) for place, text in enumerate(values) if place % step == 0]
        words = f"{plain(name)} over {plain(key)}"
        charts.append(figure(words, curves, axis, marks, words))
    if not charts:
        return None
    intro = f"Each dot is a run: its newest {plain(name)}. The best run is blue."
    return section("Parameters", "parameters", tag("p", intro, class_="quiet"), tag("div", *charts, class_="pair"))
