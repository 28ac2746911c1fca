"""Writes ``docs/measurements/rehearsals.md`` from the kept certificates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
configurations. `make rehearse-repositories REPOSITORIES=FOLDER` repeats it, and keeps [a certificate of
each](../../tests/repositories/certificates). The sizes, the data and the substitutions are those of the [tested
repositories](../../tests/repositories/RESULTS.md).

Each repository was disturbed in four ways, and started again with the same command. The scripts resume by their own
means. A script that takes a checkpoint as an option gets its newest file, as from a batch script that looks for one.

A cell shows the steps that were made twice. **Wrong result** means that the run did not continue as the undisturbed
one, and **does not start again** that every later start fails, so that all work waits for its user.
"""


def write(entries: Sequence[Repository], certificates: Mapping[str, Certificates]) -> None:
    PAGE.write_text(page(entries, certificates))


def page(entries: Sequence[Repository], certificates: Mapping[str, Certificates]) -> str:
    """The whole page."""
    names = _disturbances(certificates)
    head = ["repository", "steps", *(Disturbance(name).words for name in names), "first cause", "under clusterddp"]
    made = [(entry, own) for entry in entries if "slurm" in (own := certificates.get(entry.name, {}))]
    missing = [entry.name for entry in entries if all(entry is not one for one, _ in made)]
    parts = [INTRODUCTION, table(head, [_row(entry, own, names) for entry, own in made]), ""]
    parts += [f"Not rehearsed yet: {', '.join(missing)}.\n"] if missing else []
    parts += ["## What each loses, and why\n", *(_findings(entry, own["slurm"]) for entry, own in made)]
    return "\n".join(parts)


def _disturbances(certificates: Mapping[str, Certificates]) -> list[str]:
    found = (one["name"] for modes in certificates.values() for own in modes.values() for one in own["disturbances"])
    return list(dict.fromkeys(found))


def _row(entry: Repository, modes: Certificates, names: Sequence[str]) -> list[str]:
    own = modes["slurm"]
    name = entry.title or entry.url.removeprefix("https://github.com/")
    link = f"[{name} at {entry.commit[:7]}]({entry.url}/tree/{entry.commit})"
    cells = [_cell(own, name) for name in names]
    return [link, str(own["steps"]), *cells, _first_cause(own), _verdict(modes.get("clusterddp"))]


def _cell(certificate: Mapping[str, Any], name: str) -> str:
    """What one disturbance cost."""
    if not certificate["repeatable"]:
        return "not repeatable"
    tried = next((one for one in certificate["disturbances"] if one["name"] == name), None)
    if tried is None or not tried["tried"]:
        return "not tried"
    if tried["resumed_step"] is None and tried["result"] == "unfinished":
        return "**does not start again**"
    repeated = f"{tried['repeated_steps'] or 0} repeated"
    return f"{repeated}, **wrong result**" if tried["result"] == "differs" else repeated


def _first_cause(certificate: Mapping[str, Any]) -> str:
    if not certificate["repeatable"]:
        return "two undisturbed runs differ"
    first = next(iter(certificate["findings"]), None)
    return "" if first is None else _CAUSES.get(first["cause"], str(first["cause"]).replace("_", " "))


def _verdict(certificate: Mapping[str, Any] | None) -> str:
    return "" if certificate is None else str(certificate["verdict"]).replace("_", " ")


def _findings(entry: Repository, certificate: Mapping[str, Any]) -> str:
    lines = [f"### {entry.name}", ""]
    lines += [entry.loses.strip(), ""] if entry.loses else []
    lines += [f"- {_said(one)}" for one in certificate["findings"]]
    return "\n".join([*lines, ""])


def _said(finding: Mapping[str, Any]) -> str:
    place = f" ({finding['file']}:{finding['line']})" if finding["file"] and finding["line"] else ""
    return f"{str(finding['rank']).replace('_', ' ')}: {finding['detail']}{place}"
