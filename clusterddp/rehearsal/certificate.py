"""The certificate of a rehearsal: ``rehearsal.json`` and one page that says the same."""

from __future__ import annotations

import html
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from clusterddp.rehearsal.preemption_job import Observed
from clusterddp.rehearsal.rehearsal import Rehearsal, Tried
from clusterddp.reporter import counted
from clusterddp.version import __version__

#: The version of the format.
FORMAT = 1


@dataclass(frozen=True)
class Subject:
    """What was rehearsed, and how. ``script``: as given. ``program``: its path below ``root``, or ``-m MODULE``.
    ``commit``: of the script's repository. ``code``: the digest of the code. ``confined``: whether the kernel refused
    writes outside the copy of the script's folder. ``mode``: what started the script again, ``slurm`` or
    ``clusterddp``."""

    script: str
    program: str
    arguments: Sequence[str]
    root: Path
    commit: str | None
    code: str
    ranks: int
    notice_s: float
    confined: bool
    mode: str


def as_json(subject: Subject, rehearsal: Rehearsal, observed: Observed | None = None) -> dict[str, Any]:
    """The content of ``rehearsal.json``."""
    return {
        "rehearsal": FORMAT,
        "made": round(time.time()),
        "script": subject.script,
        "program": subject.program,
        "arguments": list(subject.arguments),
        "mode": subject.mode,
        "ranks": subject.ranks,
        "notice_s": subject.notice_s,
        "commit": subject.commit,
        "code": subject.code,
        "confined": subject.confined,
        "versions": {"clusterddp": __version__, "python": platform.python_version(), "torch": _version("torch")},
        "repeatable": rehearsal.unlike is None,
        "differs_in_step": rehearsal.unlike,
        "steps": rehearsal.script.steps,
        "starts": rehearsal.starts,
        "seconds": round(rehearsal.seconds, 1),
        "verdict": rehearsal.verdict,
        "partition": None if observed is None else _partition(observed),
        "disturbances": [_tried(one) for one in rehearsal.tried],
        "findings": [
            {
                "rank": finding.rank.value,
                "cause": finding.cause.value,
                "disturbances": [one.value for one in disturbances],
                "detail": finding.detail,
                "file": in_script(finding.file),
                "line": finding.line,
            }
            for finding, disturbances in rehearsal.findings
        ],
    }


def _partition(observed: Observed) -> dict[str, Any]:
    policy, first = observed.preemption, observed.first
    return {
        "name": policy.partition,
        "mode": policy.mode,
        "notice_s": policy.notice_s,
        "ranks": first.get("ranks"),
        "signalled": first.get("signalled"),
        "missing": first.get("missing"),
        "requeued": bool(observed.second),
        "problem": observed.problem,
    }


def _tried(one: Tried) -> dict[str, Any]:
    return {
        "name": one.disturbance.value,
        "tried": one.why_not is None,
        "why_not": one.why_not,
        "at": one.at,
        "starts": one.starts,
        "with_others": one.with_others,
        "resumed_from": one.resumed_from,
        "resumed_step": one.resumed_step,
        "repeated_steps": one.repeated_steps,
        "notice_to_exit_s": None if one.exit_s is None else round(one.exit_s, 2),
        "note": one.note,
        "result": None if one.result is None else one.result.value,
    }


def in_script(file: str | None) -> str | None:
    """A file of a run's working folder, relative to it."""
    return None if file is None else Path(file.partition("/run-")[2].partition("/")[2] or file).as_posix()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_CLASSES = {"ok": "ok", "known": "none", "not tried": "none", "warning": "none"}
VERDICTS = {
    "survives": "survives what was tried",
    "loses_work": "loses work",
    "wrong_result": "continues with a wrong result",
    "repeats_work": "repeats work",
    "untidy": "survives, and leaves something behind",
    "not_repeatable": "survives what was tried, as far as a script that is not repeatable can be compared",
    "unfinished": "could not be disturbed",
}


def rows(rehearsal: Rehearsal) -> list[tuple[str, str, str]]:
    """The table: each disturbance, what came of it, and how the run continued."""
    found = []
    for one in rehearsal.tried:
        if one.why_not is not None:
            found.append((one.disturbance.words, "not tried", one.why_not))
            continue
        outcome = one.findings[0].rank.words if one.findings else "warning" if one.note else "ok"
        found.append((one.disturbance.words, outcome, one.note or _continued(one)))
    return found


def _continued(one: Tried) -> str:
    if one.resumed_step is None:
        return one.at or ""
    source = f"continued from {one.resumed_from}" if one.resumed_from else "began again"
    repeated = "no step" if not one.repeated_steps else counted(one.repeated_steps, "step")
    return f"{one.at + ': ' if one.at else ''}{source} at step {one.resumed_step}, {repeated} repeated"


def page(subject: Subject, rehearsal: Rehearsal, observed: Observed | None = None) -> str:
    """The certificate as one HTML file."""
    facts = {
        "Script": " ".join([subject.script, *subject.arguments]),
        "Made": time.strftime("%Y-%m-%d %H:%M"),
        "Commit": subject.commit or "none",
        "Code": subject.code,
        "Started again by": {"slurm": "Slurm alone"}.get(subject.mode, subject.mode),
        "Ranks": str(subject.ranks),
        "Notice": f"{subject.notice_s:g} s",
        "Script's own objects": "compared on rank 0",
        "Steps": str(rehearsal.script.steps),
        "Repeatable": "yes" if rehearsal.unlike is None else not_repeatable(rehearsal.unlike),
        "Starts": f"{rehearsal.starts}, {rehearsal.seconds:.0f} s in all",
        "Writes outside the copy": "refused by the kernel" if subject.confined else "not prevented",
        "Versions": f"clusterddp {__version__}, Python {platform.python_version()}, torch {_version('torch')}",
    }
    listed = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts.items())
    table = "".join(
        f'<tr class="{_CLASSES.get(outcome, "bad")}"><td>{_text(what)}</td>'
        f"<td>{_text(outcome)}</td><td>{_text(how)}</td></tr>"
        for what, outcome, how in [*rows(rehearsal), *(observed.rows() if observed else ())]
    )
    findings = "".join(
        f"<li><b>{_text(finding.rank.words)}</b> ({_text(finding.cause.value)}): {_text(finding.detail)}"
        f"{_text(place(finding.file, finding.line))}</li>"
        for finding, _ in rehearsal.findings
    )
    return _PAGE.format(
        title=_text(f"Rehearsal of {subject.script}"),
        verdict=_text(f"{subject.script} {VERDICTS[rehearsal.verdict]}."),
        facts=listed,
        table=table,
        problem=f"<p>{_text(observed.preemption.partition)}: {_text(observed.problem)}.</p>"
        if observed and observed.problem
        else "",
        findings=f"<h2>Findings</h2><ul>{findings}</ul>" if findings else "",
    )


def not_repeatable(step: int) -> str:
    """The answer to whether the script is repeatable, if two undisturbed runs differ in this step."""
    return f"no: two undisturbed runs differ in step {step}, so weights and losses were not compared"


def place(file: str | None, line: int | None) -> str:
    """`` (train.py:12)``, or empty."""
    return f" ({in_script(file)}:{line})" if file and line else ""


def _text(text: str) -> str:
    return html.escape(text)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; margin: 1rem 0; }} th, td {{ text-align: left; padding: .25rem .8rem .25rem 0;
vertical-align: top; border-bottom: 1px solid #ddd; }} th {{ font-weight: 600; }}
.ok td:nth-child(2) {{ color: #14692f; }} .bad td:nth-child(2) {{ color: #a11212; font-weight: 600; }}
.tried td:nth-child(2) {{ white-space: nowrap; }} tr, li {{ break-inside: avoid; }} h2 {{ break-after: avoid; }}
@page {{ margin: 15mm; }} .none {{ color: #666; }} .verdict {{ font-size: 1.2rem; }}
</style></head><body>
<h1>{title}</h1><p class="verdict">{verdict}</p>
{problem}
{findings}
<h2>Disturbances</h2>
<table class="tried"><tr><th>Disturbance</th><th>Outcome</th><th>How it continued</th></tr>{table}</table>
<h2>What was rehearsed</h2><table>{facts}</table>
</body></html>
"""
