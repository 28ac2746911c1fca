"""Whether a job's script is known to survive a preemption: what ``submit`` reads in the certificate of a rehearsal."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from clusterddp import codec
from clusterddp.jobdef.job import Job
from clusterddp.rehearsal.certificate import FORMAT, VERDICTS
from clusterddp.rehearsal.workspace import CERTIFICATE, program_of, workspace_of

#: ``submit`` prints a line for these verdicts.
_TOLD = ("loses_work", "wrong_result")


@dataclass(frozen=True)
class _Certificate:
    """The fields of ``rehearsal.json`` that are read here."""

    rehearsal: int
    program: str
    code: str
    verdict: str


def remark(job: Job) -> str | None:
    """What a user should know before the job is preempted, or None if its script was rehearsed as it is now.

    The certificate is in the current folder, or beside the script. Arguments may differ from those of the rehearsal,
    because most rehearsals shorten the training with them.
    """
    script = job.script or f"-m {job.module}"
    again = f"clusterddp rehearse {shlex.quote(job.script)}" if job.script else "clusterddp rehearse JOB.yaml"
    folders = [Path.cwd(), *([Path(job.script).resolve().parent] if job.script else [])]
    files = [file for folder in dict.fromkeys(folders) if (file := folder / CERTIFICATE).exists()]
    if not files:
        return f"{script} was never rehearsed. See whether it survives a preemption: {again}"
    workspace = workspace_of(job, bounded=False)
    program = " ".join(program_of(job, workspace.root))
    for file in files:
        try:
            found = codec.read(_Certificate, json.loads(file.read_text()))
        except (OSError, ValueError, codec.Misfit) as error:
            return f"could not read {file} ({error}). Rehearse again: {again}"
        if found.program != program:
            continue
        if found.rehearsal != FORMAT or found.code != workspace.digest():
            return f"the code has changed since {script} was rehearsed ({file}). Rehearse it again: {again}"
        return f"{script} {VERDICTS[found.verdict]} when it is preempted ({file})" if found.verdict in _TOLD else None
    return f"{script} was never rehearsed. See whether it survives a preemption: {again}"
