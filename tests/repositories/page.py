"""Writes RESULTS.md here from what RESULTS.json holds, and the short table of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ddp import REPOSITORY
from tests.markdown import fill
from tests.repositories.disturbances import CELLS, Result
from tests.repositories.entries import Repository

PAGE = Path(__file__).with_name("RESULTS.md")
SHORT = REPOSITORY / "docs" / "measurements" / "repositories.md"
HEADINGS = {
    "undisturbed": "undisturbed",
    "before": "preempted before its first checkpoint",
    "middle": "preempted in the middle",
    "end": "preempted near the end",
    "killed": "a rank killed",
    "lines": "preempted, with lines for no lost step",
}
LINES = "with lines for no lost step"
PREEMPTED = {name: HEADINGS[name] for name in ("before", "middle", "end")}
INTRODUCTION = """\
# Tested repositories

Public training repositories at pinned commits, each run undisturbed, preempted at three moments and with a rank killed,
with two ranks on one machine (`make test-repositories REPOSITORIES=FOLDER`). A disturbed run is *completed* if it made
every step of the undisturbed run, and *repeated* are the steps that it made twice; each cell is one run.

Stand-in GPUs are host memory and CPU kernels that torch sees as CUDA devices. The last column repeats the preemption in
the middle with [the lines that save at a stop](../../docs/guide/existing-repository.md#two-lines-for-no-lost-step).
"""

SLURM = """\
## On a real Slurm

The same preemptions on the test cluster, by a job of higher priority with a grace period of 20 s.
"""


def write_page(entries: Sequence[Repository], measured: Mapping[str, Any]) -> None:
    PAGE.write_text(page(entries, measured))
    fill(SHORT, {"tested repositories": short_table(entries, measured).strip()})


def page(entries: Sequence[Repository], measured: Mapping[str, Any]) -> str:
    """The whole page."""
    rows = [_row(entry, _results(entry, measured)) for entry in entries]
    columns = ["repository", "lines of YAML", "changed lines of code", *HEADINGS.values()]
    parts = [
        INTRODUCTION,
        _versions(entries, measured),
        _table(columns, rows),
        SLURM,
        _table(["repository", *PREEMPTED.values()], _on_slurm(entries, measured)),
    ]
    parts += [_section(entry) for entry in entries]
    return "\n".join(parts)


def short_table(entries: Sequence[Repository], measured: Mapping[str, Any]) -> str:
    """The table of the guide: what each repository needs, and what a preemption in the middle costs."""
    rows = []
    for entry in entries:
        results = _results(entry, measured)
        whole, middle = results.get("undisturbed"), results.get("middle")
        disturbed = [result for name, result in results.items() if name not in ("undisturbed", "lines")]
        good = sum(whole is not None and result.complete(whole) for result in disturbed)
        rows.append(
            [
                f"[{_short_name(entry)}]({entry.url})",
                f"`resume: {entry.preset}`" if entry.preset else f"{entry.lines_of_yaml} lines",
                str(entry.changed_lines),
                f"{good} of {len(disturbed)}" if disturbed else "not run",
                _repeated(middle, whole) if middle and whole else "",
                _with_lines(results.get("lines"), whole),
            ]
        )
    head = ["repository", "job definition", "changed lines", "completed", "repeated (middle)", "with lines"]
    return _table(head, rows)


def _with_lines(result: Result | None, whole: Result | None) -> str:
    if result is None or whole is None or not result.complete(whole):
        return ""
    return f"{_repeated(result, whole)}, {result.lines} line{'s' * (result.lines > 1)}"


def _versions(entries: Sequence[Repository], measured: Mapping[str, Any]) -> str:
    """Which commits of clusterddp were measured, with what was measured on each."""
    found: dict[str, set[str]] = {}
    for entry in entries:
        for result in _results(entry, measured).values():
            found.setdefault(result.version, set()).add(entry.name if result.disturbance != "lines" else LINES)
    parts = [f"{version or 'unknown'} ({', '.join(sorted(what))})" for version, what in found.items()]
    return f"Measured on these commits of clusterddp: {'; '.join(parts) or 'none'}.\n"


def _on_slurm(entries: Sequence[Repository], measured: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for entry in entries:
        results = _results(entry, measured)
        cells = [_shown(f"slurm-{name}", results) for name in PREEMPTED]
        rows.append([f"[{_short_name(entry)}](#{entry.name})", *cells])
    return rows


def _row(entry: Repository, results: Mapping[str, Result]) -> list[str]:
    cells = [_shown(name, results) for name in HEADINGS]
    if "lines" in results:
        cells[-1] += f", {(count := results['lines'].lines)} line{'s' * (count > 1)}"
    elif not entry.no_step_lost:
        cells[-1] = ""
    return [f"[{_short_name(entry)}](#{entry.name})", str(entry.lines_of_yaml), str(entry.changed_lines), *cells]


def _shown(name: str, results: Mapping[str, Result]) -> str:
    whole, result = results.get("undisturbed"), results.get(name)
    if result is None or whole is None:
        return "not run"
    if name == "undisturbed":
        return f"{result.state}, {whole.steps} steps, {_metric(result)}"
    return _cell(result, whole)


def _cell(result: Result, whole: Result) -> str:
    if not result.disturbed:
        return "the run ended before"
    state = result.state or "no outcome"
    if result.state == "completed" and not result.confirmed:
        state = "completed, not confirmed"
    if result.attempts == 1:
        state += " within the notice"
    missing = whole.steps - result.steps
    parts = [f"**{state}**" if not result.complete(whole) else state]
    parts += [f"{missing} steps missing"] if missing > 0 else []
    return ", ".join([*parts, f"{_repeated(result, whole)} repeated", _metric(result)])


def _repeated(result: Result, whole: Result) -> str:
    return f"{result.repeated} of {whole.steps}"


def _metric(result: Result) -> str:
    return f"metric {result.metric}" if result.metric else "no metric"


def _section(entry: Repository) -> str:
    tree = f"[{entry.commit[:10]}]({entry.url}/tree/{entry.commit})"
    device = "stand-in GPUs" if entry.device == "stand-in" else "CPUs with gloo"
    lines = [
        f"## {entry.name}",
        "",
        f"{entry.url.removeprefix('https://github.com/')} at {tree}, on {device}. Its README: `{entry.readme.strip()}`",
        "",
        f"- The metric is {entry.metric_name}"
        + ("." if entry.repeatable else ", which differs between undisturbed runs."),
        f"- Here: {', '.join(entry.differences)}.",
    ]
    lines += [f"- Packages: {', '.join(entry.packages)}."]
    changes = sorted({change.why for change in entry.substitutions})
    lines += [f"- Substitutions in its code for this test: {', '.join(changes)}."] if changes else []
    lines += [f"- {note}" for note in entry.notes]
    return "\n".join([*lines, ""])


def _results(entry: Repository, measured: Mapping[str, Any]) -> dict[str, Result]:
    row = measured.get(entry.name, {})
    if row.get("commit") != entry.commit:
        return {}
    return {name: Result(**row["runs"][name]) for name in CELLS if name in row["runs"]}


def _short_name(entry: Repository) -> str:
    return entry.title or entry.url.removeprefix("https://github.com/")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
