"""``clusterddp drill``: a tiny job finds out, before the first real preemption, what a partition does to a run.

Nobody can preempt a job of their own on demand. What can be tried is: whether the nodes have Slurm's commands, whether
the signal that a preemption sends reaches every rank, and whether a requeue from inside the job brings it back. What
notice there is, the controller says.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterddp.cli.status import open_run
from clusterddp.cli.watch import Hold
from clusterddp.errors import UsageError
from clusterddp.jobdef.job import Job
from clusterddp.process import module_command
from clusterddp.reporter import show
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.slurm import preemption_policy
from clusterddp.slurm.preemption_policy import Preemption

QUEUE_S = 3600.0


def drill(partition: str | None, qos: str | None, nodes: int, run: RunDirectory | None) -> int:
    """Submits the job, waits for it, prints what it found; 0 when a run would survive a preemption here."""
    slurm.require("sbatch", "scontrol", "sinfo")
    preemption = preemption_policy.preemption(partition, qos)
    folder = Path(tempfile.mkdtemp(prefix="clusterddp-drill-", dir=Path.cwd()))
    try:
        script = folder / "drill.sbatch"
        script.write_text(drill_script(partition, qos, nodes, folder, sys.executable))
        job_id = slurm.submit(script)
        show(f"drill: job {job_id} submitted to {preemption.partition}")
        try:
            lifted_at = _await_end(job_id, folder)
        finally:
            slurm.cancel(job_id)
        found = [read_json(folder / name) or {} for name in ("first.json", "second.json")]
        print("\n".join(report(preemption, found[0], found[1], lifted_at, last_save_s(run))))
        return 0 if verdict(preemption, found[0], found[1], last_save_s(run)) is None else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def drill_script(partition: str | None, qos: str | None, nodes: int, folder: Path, python: str) -> str:
    """The tiny job's batch script."""
    options = {
        "job-name": "clusterddp-drill", "partition": partition, "qos": qos, "nodes": str(nodes), "ntasks-per-node": "1",
        "time": "10", "output": f"{folder}/log", "open-mode": "append",
    }  # fmt: skip
    for text in (*options.values(), python):
        if text is not None and not text.isprintable():
            raise UsageError(f"{text!r} has line breaks or control characters, which a batch script cannot hold")
    lines = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items() if value is not None]
    command = f"exec {shlex.join([*module_command('clusterddp.cli.drill_job', python), str(folder)])}"
    return "\n".join(["#!/bin/bash", *lines, "#SBATCH --requeue", "trap '' TERM", command, ""])


def _await_end(job_id: str, folder: Path) -> float | None:
    """Until the second start has reported, or the job is over; when the hold after the requeue was lifted."""
    lifted_at, hold = None, Hold()
    deadline = time.monotonic() + QUEUE_S
    while time.monotonic() < deadline and not (folder / "second.json").exists():
        job = slurm.show_job(job_id)
        if job is None or not job.live:
            break
        if hold.lift_when_safe(job):
            lifted_at = time.time()
        time.sleep(0.5)
    return lifted_at


def last_save_s(run: RunDirectory | None) -> float | None:
    """How long the last save of a run took until it was durable, in seconds."""
    saves = [event["durable_s"] for event in run.events() if event.get("durable_s")] if run else []
    return float(saves[-1]) if saves else None


def verdict(
    preemption: Preemption, first: Mapping[str, Any], second: Mapping[str, Any], save_s: float | None
) -> str | None:
    """Why a run would not survive a preemption here; None when it would."""
    if not first:
        return "the job did not start"
    if first["signalled"] < first["ranks"]:
        return "the signal does not reach every rank: is python the task itself, without a wrapper?"
    if "scontrol" in first["missing"]:
        return "scontrol is missing on the nodes: keep `clusterddp watch` running on a login node"
    if not second and not preemption.must_resubmit:
        return f"the requeue does not bring the job back: {first.get('requeue_error') or 'it was never started again'}"
    if save_s is not None and preemption.notice_s < 2 * save_s + 2:
        return f"a save takes {save_s:.1f} s and the notice is {preemption.notice_s} s: save more often"
    return None


def report(
    preemption: Preemption,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    lifted_at: float | None,
    save_s: float | None,
) -> list[str]:
    """What was found, line by line."""
    lines = [f"notice    {preemption.sentence(Job(name='drill', device='cpu'))}"]
    if first:
        missing = f"missing: {', '.join(first['missing'])}" if first["missing"] else "all found on the nodes"
        lines.append(f"commands  {missing}")
        lines.append(
            f"signals   TERM reached {first['signalled']} of {first['ranks']} ranks in {first['seconds']:.2f} s"
        )
    if second:
        since = f"; it ran {second['time'] - lifted_at:.1f} s after the hold was lifted" if lifted_at else ""
        lines.append(f"requeue   works{since}")
    problem = verdict(preemption, first, second, save_s)
    saved = (
        f"{preemption.partition} gives {preemption.notice_s} s; your last save took {save_s:.1f} s: " if save_s else ""
    )
    lines.append(f"verdict   {saved}{problem or 'safe'}")
    return lines


def check(path: str | None) -> RunDirectory | None:
    """The run whose last save is compared, if one was named."""
    run = open_run(path) if path else None
    if run is not None and last_save_s(run) is None:
        raise UsageError(f"{run} has saved nothing yet: name a run with a checkpoint, or leave --run out")
    return run
