"""``clusterddp drill``: a small job tests what a preemption would do to a run.

Users cannot preempt their own jobs. The job tests whether the nodes have Slurm's commands, whether the signal of a
preemption reaches every rank, and whether a requeue from inside the job restarts it. The length of the notice comes
from the controller's configuration. This module is also the job's batch step and, with ``--rank``, each of its ranks.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clusterddp.errors import SlurmError, UsageError
from clusterddp.history.checkpoints import Checkpoint
from clusterddp.jobdef.job import Job
from clusterddp.process import module_command
from clusterddp.reporter import show
from clusterddp.rundir.files import write_json
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory, open_run
from clusterddp.runs.waiting import Hold
from clusterddp.slurm import commands as slurm
from clusterddp.slurm import configuration, queue
from clusterddp.slurm.configuration import Preemption

#: What the job wrote at its first or second start.
StartFacts = Mapping[str, Any]
QUEUE_S, RANK_S = 3600.0, 60.0
#: What a run needs on its nodes.
COMMANDS = ("srun", "scontrol", "sbatch", "scancel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``drill``."""
    parser.add_argument("-p", "--partition", help="partition, as in sbatch")
    parser.add_argument("-q", "--qos", help="quality of service, as in sbatch")
    parser.add_argument("-N", "--nodes", type=int, default=1, help="number of nodes (default: 1)")
    parser.add_argument("--run", metavar="RUN", help="compare the notice with the time that this run's last save took")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Submits the job, waits for it and prints its results. Returns 0 if a run would survive a preemption here."""
    run = open_run(arguments.run) if arguments.run else None
    save_s = last_save_s(run) if run else None
    if run and save_s is None:
        raise UsageError(f"{run} has no checkpoint. Choose a run that has saved one, or omit --run")
    slurm.require("sbatch", "scontrol", "sinfo")
    preemption = configuration.preemption(arguments.partition, arguments.qos)
    with tempfile.TemporaryDirectory(prefix="clusterddp-drill-", dir=Path.cwd(), ignore_cleanup_errors=True) as path:
        folder = Path(path)
        script = folder / "drill.sbatch"
        script.write_text(drill_script(arguments.partition, arguments.qos, arguments.nodes, folder, sys.executable))
        job_id = queue.submit(script)
        show(f"drill: submitted job {job_id} to partition {preemption.partition}")
        try:
            lifted_at = _await_end(job_id, folder)
        finally:
            slurm.patiently(lambda: slurm.cancel(job_id))
        found = [read_json(folder / name) or {} for name in ("first.json", "second.json")]
    print("\n".join(report(preemption, found[0], found[1], lifted_at, save_s)))
    return 0 if verdict(preemption, found[0], found[1], save_s) is None else 1


def drill_script(partition: str | None, qos: str | None, nodes: int, folder: Path, python: str) -> str:
    """The batch script of the job."""
    options = {
        "job-name": "clusterddp-drill", "partition": partition, "qos": qos, "nodes": str(nodes), "ntasks-per-node": "1",
        "time": "10", "output": f"{folder}/log", "open-mode": "append",
    }  # fmt: skip
    for text in (*options.values(), python):
        if text is not None and not text.isprintable():
            raise UsageError(f"{text!r}: line breaks and control characters are not allowed in a batch script")
    lines = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items() if value is not None]
    command = f"exec {shlex.join([*module_command('clusterddp.cli.drill', python), str(folder)])}"
    return "\n".join(["#!/bin/bash", *lines, "#SBATCH --requeue", "trap '' TERM", command, ""])


def _await_end(job_id: str, folder: Path) -> float | None:
    """Waits until the second start has reported or the job is over. Returns when the hold was lifted, or None."""
    lifted_at, hold = None, Hold()
    deadline = time.monotonic() + QUEUE_S
    while time.monotonic() < deadline and not (folder / "second.json").exists():
        job = slurm.patiently(lambda: slurm.show_job(job_id))
        if job is None or not job.live:
            break
        if hold.lift_when_safe(job):
            lifted_at = time.time()
        time.sleep(0.5)
    return lifted_at


def last_save_s(run: RunDirectory) -> float | None:
    """Seconds that the last save of a run took until it was durable."""
    saved = run.history().last(Checkpoint)
    return None if saved is None else saved.durable_s


def verdict(preemption: Preemption, first: StartFacts, second: StartFacts, save_s: float | None) -> str | None:
    """Why a run would not survive a preemption here, or None if it would."""
    if not first:
        return "the job did not start within an hour, or failed. See its state with sacct"
    if first["signalled"] < first["ranks"]:
        return "the signal does not reach every rank. Start python directly, not in a wrapper script"
    if "scontrol" in first["missing"]:
        return "scontrol is missing on the nodes. Keep `clusterddp wait --resubmit` running on a login node"
    if not second and not preemption.must_resubmit:
        error = first.get("requeue_error")
        return "the requeued job did not start again" + (f": {error}" if error else "")
    if save_s is not None and preemption.notice_s < 2 * save_s + 2:
        return "a save may not finish within the notice. Save more often to repeat fewer steps"
    return None


def report(
    preemption: Preemption, first: StartFacts, second: StartFacts, lifted_at: float | None, save_s: float | None
) -> list[str]:
    """The results, line by line."""
    lines = [f"notice    {preemption.sentence(Job(name='drill', device='cpu'))}"]
    if first:
        missing = f"missing: {', '.join(first['missing'])}" if first["missing"] else "all found on the nodes"
        reached = f"{first['signalled']} of {first['ranks']} ranks in {first['seconds']:.2f} s"
        lines += [f"commands  {missing}", f"signals   TERM reached {reached}"]
    if second:
        since = f". The job started {second['time'] - lifted_at:.1f} s after the hold was lifted" if lifted_at else ""
        lines.append(f"requeue   works{since}")
    problem = verdict(preemption, first, second, save_s) or "safe"
    if save_s:
        problem = f"{preemption.partition} gives {preemption.notice_s} s. Your last save took {save_s:.1f} s: {problem}"
    return [*lines, f"verdict   {problem}"]


# --- on the nodes


def rank(folder: Path) -> None:
    """Waits for TERM and records when it arrived."""
    name = os.environ["SLURM_PROCID"]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    (folder / f"ready-{name}").touch()
    if signal.sigtimedwait({signal.SIGTERM}, RANK_S) is not None:
        write_json(folder / f"signalled-{name}.json", {"time": time.time()})


def first_start(folder: Path, job_id: str) -> None:
    """Signals ranks as a preemption does, records which received the signal, and requeues the job."""
    ranks = int(os.environ["SLURM_JOB_NUM_NODES"])
    command = [
        "srun",
        "--export=ALL",
        "--ntasks-per-node=1",
        *module_command("clusterddp.cli.drill"),
        "--rank",
        str(folder),
    ]
    step = subprocess.Popen(command)
    _await(lambda: len(list(folder.glob("ready-*"))) == ranks)
    sent = time.time()
    subprocess.run(["scancel", "--signal=TERM", f"{job_id}.0"], check=False)
    _await(lambda: len(list(folder.glob("signalled-*.json"))) == ranks)
    seconds = time.time() - sent
    step.kill()
    found = {
        "ranks": ranks,
        "signalled": len(list(folder.glob("signalled-*.json"))),
        "seconds": seconds,
        "missing": [name for name in COMMANDS if shutil.which(name) is None],
    }
    write_json(folder / "first.json", found)
    try:
        slurm.requeue(job_id)
    except SlurmError as error:
        write_json(folder / "first.json", {**found, "requeue_error": str(error)})


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RANK_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def main() -> None:
    """Runs the batch step, at its first and second start, or a rank."""
    folder = Path(sys.argv[-1])
    if "--rank" in sys.argv:
        rank(folder)
    elif "SLURM_RESTART_COUNT" in os.environ:
        write_json(folder / "second.json", {"time": time.time()})
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        first_start(folder, os.environ["SLURM_JOB_ID"])


if __name__ == "__main__":
    main()
