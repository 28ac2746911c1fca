"""Writes ``docs/measurements/rehearsals.md`` from the kept certificates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clusterddp.rehearsal.disturbances import Disturbance
from tests.ddp import REPOSITORY
from tests.markdown import table
from tests.repositories.entries import Repository

PAGE = REPOSITORY / "docs" / "measurements" / "rehearsals.md"
Certificates = Mapping[str, Mapping[str, Any]]
_CAUSES = {
    "checkpoint_destroyed": "overwrites its checkpoint in place",
    "resumes_half_written": "loads a half-written checkpoint",
    "not_resumed": "does not resume",
    "restart_fails": "does not start again",
    "no_handler": "no handler for SIGTERM",
}
INTRODUCTION = """\
# What public training scripts lose to a preemption

Public repositories at pinned commits were [rehearsed](../guide/rehearse.md) with two ranks on one machine, in small
configurations. Each was disturbed in four ways, and started again with the same command. Under **Slurm alone** it
resumes by its own means. A script that takes a checkpoint as an option gets its newest file, as from a batch script
that looks for one. Under **clusterddp** it resumes with [its preset](../guide/existing-repository.md).
"""
#: Explains the cells.
_CELLS = """\
The numbers are steps that were made twice, whose time is lost. **Wrong result** means that the run did not continue as
the undisturbed one. Most scripts do not save the state of their random generators, so that they see other crops of an
image, or other batches, after a restart. **Does not start again** means that every later start fails, so that all work
waits for its user. clusterddp restores only what a script saves, but it protects the files of a save, and falls back to
an older checkpoint if the newest one is incomplete.

`make rehearse-repositories REPOSITORIES=FOLDER` repeats all this, and keeps [a certificate of
each](../../tests/repositories/certificates). The sizes, the data and the substitutions are those of the [tested
repositories](../../tests/repositories/RESULTS.md).
"""
#: What starts a repository again, in words.
_MODES = {"slurm": "Slurm alone", "clusterddp": "clusterddp"}
_STUCK, _WRONG = "**does not start again**", "**wrong result**"


def write(entries: Sequence[Repository], certificates: Mapping[str, Certificates]) -> None:
    PAGE.write_text(page(entries, certificates))


def page(entries: Sequence[Repository], certificates: Mapping[str, Certificates]) -> str:
    """The whole page."""
    names = _disturbances(certificates)
    head = ["repository", "steps", "started by", *(Disturbance(name).words for name in names), "first cause"]
    made = [(entry, own) for entry in entries if (own := certificates.get(entry.name))]
    rows = [row for entry, own in made for row in _rows(entry, own, names)]
    lacking = {
        words: [entry.name for entry in entries if mode not in certificates.get(entry.name, {})]
        for mode, words in _MODES.items()
    }
    missing = [f"Not rehearsed yet under {words}: {', '.join(those)}.\n" for words, those in lacking.items() if those]
    parts = [INTRODUCTION, _summary([own for _, own in made], names), "", "## Each repository\n", table(head, rows), ""]
    parts += [_CELLS, *missing]
    parts += ["## What each loses, and why\n", *(_findings(entry, own) for entry, own in made)]
    return "\n".join(parts)


def _disturbances(certificates: Mapping[str, Certificates]) -> list[str]:
    found = (one["name"] for modes in certificates.values() for own in modes.values() for one in own["disturbances"])
    return list(dict.fromkeys(found))


def _summary(made: Sequence[Certificates], names: Sequence[str]) -> str:
    """How many repositories lose what, of those that have a certificate of that way."""
    by_mode = {
        mode: [[_cell(modes[mode], name) for name in names] for modes in made if mode in modes] for mode in _MODES
    }

    def row(words: str, test: Callable[[str], bool]) -> list[str]:
        """``test``: of all cells of a repository, as one text."""
        found = [f"{sum(test(' '.join(cells)) for cells in rows)} of {len(rows)}" for rows in by_mode.values()]
        return [words, *found]

    rows = [
        row("do not start again after one of the disturbances", lambda cells: _STUCK in cells),
        row("continue with a wrong result after one of them", lambda cells: _WRONG in cells),
        row("lose nothing but time", lambda cells: "**" not in cells),
    ]
    return table(["repositories that", *_MODES.values()], rows)


def _rows(entry: Repository, modes: Certificates, names: Sequence[str]) -> list[list[str]]:
    name = entry.title or entry.url.removeprefix("https://github.com/")
    link = f"[{name} at {entry.commit[:7]}]({entry.url}/tree/{entry.commit})"
    return [
        [link, str(own["steps"]), words, *(_cell(own, name) for name in names), _first_cause(own)]
        for mode, words in _MODES.items()
        if (own := modes.get(mode))
    ]


def _cell(certificate: Mapping[str, Any], name: str) -> str:
    """What one disturbance cost."""
    if not certificate["repeatable"]:
        return "not repeatable"
    tried = next((one for one in certificate["disturbances"] if one["name"] == name), None)
    if tried is None or not tried["tried"]:
        return "not tried"
    if tried["resumed_step"] is None and tried["result"] == "unfinished":
        return _STUCK
    repeated = f"{tried['repeated_steps'] or 0} repeated"
    if tried["result"] == "same":
        return repeated
    ranks = {one["rank"] for one in certificate["findings"] if name in one["disturbances"]}
    is_wrong = tried["result"] == "differs" or "wrong_result" in ranks
    return f"{repeated}, {_WRONG if is_wrong else '**does not complete**'}"


def _first_cause(certificate: Mapping[str, Any]) -> str:
    if not certificate["repeatable"]:
        return "two undisturbed runs differ"
    first = next(iter(certificate["findings"]), None)
    return "" if first is None else _CAUSES.get(first["cause"], str(first["cause"]).replace("_", " "))


def _findings(entry: Repository, modes: Certificates) -> str:
    lines = [f"### {entry.name}", ""]
    lines += [entry.loses.strip(), ""] if entry.loses else []
    for mode, words in _MODES.items():
        if own := modes.get(mode):
            said = [f"- {_said(one)}" for one in own["findings"]] or ["- nothing was lost"]
            lines += [f"Under {words}:", "", *said, ""]
    return "\n".join(lines)


def _said(finding: Mapping[str, Any]) -> str:
    place = f" ({finding['file']}:{finding['line']})" if finding["file"] and finding["line"] else ""
    return f"{str(finding['rank']).replace('_', ' ')}: {finding['detail']}{place}"
