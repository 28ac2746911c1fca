"""Writes docs/measurements/repositories.md from what ``repositories.json`` holds, and the guide's short table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.ddp import REPOSITORY
from tests.repositories.disturbances import CELLS, Result
from tests.repositories.entries import Repository

PAGE = REPOSITORY / "docs" / "measurements" / "repositories.md"
GUIDE = REPOSITORY / "docs" / "guide" / "existing-repository.md"
BEGIN, END = "<!-- tested repositories: make test-repositories -->", "<!-- end of tested repositories -->"
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

Public training repositories at pinned commits, with the command of their README, small synthetic data and two ranks of
one machine. Each is run undisturbed, preempted at three moments of its training, and with a rank killed in the middle.
`make test-repositories REPOSITORIES=FOLDER` measures them and writes this page. It downloads nothing and runs those
whose checkouts the folder has. What it knows of each is in `tests/repositories/entries/`. The
[guide](../guide/job-definition.md#presets) explains the keys of the job definition.

A disturbed run is *completed* if it made every step of the undisturbed run. *Repeated* are the steps that it made
twice, because the repository saves after certain steps or epochs only. Repositories that call `.cuda()` run on stand-in
GPUs: host memory and CPU kernels that torch sees as CUDA devices. Each cell is one run.

The last column is another preemption in the middle, after
[the lines that save at a stop](../guide/existing-repository.md#two-lines-for-no-lost-step) were added. Their number
counts added and changed lines without `import clusterddp`, with the save and `requeue()` on one line.

*Completed within the notice* means that the run was over before its ranks had stopped. A batch counts as repeated if it
was trained on twice. With gradient accumulation, as in yolov5, such a batch was part of no optimizer step before.
"""


SLURM = """\
## On a real Slurm

The same preemptions by a job of higher priority, on the test cluster of this repository: the job gets TERM and 20 s, is
requeued and continues. The undisturbed run is that of the first table.
"""


def write_page(entries: Sequence[Repository], measured: Mapping[str, Any]) -> None:
    PAGE.write_text(page(entries, measured))
    guide = GUIDE.read_text()
    if BEGIN in guide:
        before, rest = guide.split(BEGIN, 1)
        GUIDE.write_text(f"{before}{BEGIN}\n\n{short_table(entries, measured)}\n{END}{rest.split(END, 1)[1]}")


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
    return ", ".join([*parts, _repeated(result, whole), _metric(result)])


def _repeated(result: Result, whole: Result) -> str:
    return f"{result.repeated} of {whole.steps} repeated"


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
