"""A small job that tests what a preemption would do to a run in a partition: ``clusterddp rehearse -p PARTITION``.

Users cannot preempt their own jobs. The job tests whether the nodes have Slurm's commands, whether the signal of a
preemption reaches every rank, and whether a requeue from inside the job restarts it. The length of the notice comes
from the controller's configuration. This module is also the job's batch step and, with ``--rank``, each of its ranks.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import SlurmError, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.process import module_command
from clusterddp.rundir.files import write_json
from clusterddp.rundir.records import read_json
from clusterddp.runs.waiting import Hold
from clusterddp.slurm import commands as slurm
from clusterddp.slurm import configuration, queue
from clusterddp.slurm.configuration import Preemption

#: What the job wrote at its first or second start.
StartFacts = Mapping[str, Any]
QUEUE_S, RANK_S = 3600.0, 60.0
#: What a run needs on its nodes.
COMMANDS = ("srun", "scontrol", "sbatch", "scancel")


@dataclass(frozen=True)
class Observed:
    """What the job showed. ``first`` and ``second``: what it wrote at its two starts. ``lifted_at``: when its hold was
    lifted. ``save_s``: how long a save of the script took, if one was seen."""

    preemption: Preemption
    first: StartFacts
    second: StartFacts
    lifted_at: float | None = None
    save_s: float | None = None

    @property
    def problem(self) -> str | None:
        """Why a run would not survive a preemption here, or None if it would."""
        first = self.first
        if not first:
            return "the job did not start within an hour, or failed. See its state with sacct"
        if first["signalled"] < first["ranks"]:
            return "the signal does not reach every rank. Start python directly, not in a wrapper script"
        if "scontrol" in first["missing"]:
            return "scontrol is missing on the nodes. Keep `clusterddp wait --resubmit` running on a login node"
        if not self.second and not self.preemption.must_resubmit:
            error = first.get("requeue_error")
            return "the requeued job did not start again" + (f": {error}" if error else "")
        if self.save_s is not None and self.preemption.notice_s < 2 * self.save_s + 2:
            return (
                f"a save takes {self.save_s:.1f} s and may not finish within the notice of {self.preemption.notice_s} "
                "s. Save more often to repeat fewer steps"
            )
        return None

    def rows(self) -> list[tuple[str, str, str]]:
        """For the table of a rehearsal: what was tested, what came of it, and what was seen."""
        name, first = self.preemption.partition, self.first
        found = [(f"the notice of {name}", "known", self.preemption.sentence(Job(name="rehearsal", device="cpu")))]
        if first:
            missing = f"missing: {', '.join(first['missing'])}" if first["missing"] else "all found on the nodes"
            reached = f"TERM reached {first['signalled']} of {first['ranks']} ranks in {first['seconds']:.2f} s"
            found.append((f"Slurm's commands in {name}", "fails" if "scontrol" in first["missing"] else "ok", missing))
            found.append((f"signals in {name}", "ok" if first["signalled"] == first["ranks"] else "fails", reached))
        if self.second:
            since = ""
            if self.lifted_at is not None:
                since = f"the job started {self.second['time'] - self.lifted_at:.1f} s after the hold was lifted"
            found.append((f"a requeue in {name}", "ok", since))
        elif first and not self.preemption.must_resubmit:
            found.append((f"a requeue in {name}", "fails", first.get("requeue_error", "the job did not start again")))
        return found


def observe(partition: str | None, qos: str | None, nodes: int, tell: Callable[[str], object]) -> Observed:
    """Submits the job and waits for it."""
    slurm.require("sbatch", "scontrol", "sinfo")
    preemption = configuration.preemption(partition, qos)
    with tempfile.TemporaryDirectory(prefix="clusterddp-rehearse-", dir=Path.cwd(), ignore_cleanup_errors=True) as path:
        folder = Path(path)
        script = folder / "rehearse.sbatch"
        script.write_text(batch_script(partition, qos, nodes, folder, sys.executable))
        job_id = queue.submit(script)
        tell(f"submitted job {job_id} to partition {preemption.partition}")
        try:
            lifted_at = _await_end(job_id, folder)
        finally:
            slurm.patiently(lambda: slurm.cancel(job_id))
        found = [read_json(folder / name) or {} for name in ("first.json", "second.json")]
    return Observed(preemption, found[0], found[1], lifted_at)


def batch_script(partition: str | None, qos: str | None, nodes: int, folder: Path, python: str) -> str:
    """The batch script of the job."""
    options = {
        "job-name": "clusterddp-rehearse", "partition": partition, "qos": qos, "nodes": str(nodes),
        "ntasks-per-node": "1", "time": "10", "output": f"{folder}/log", "open-mode": "append",
    }  # fmt: skip
    for text in (*options.values(), python):
        if text is not None and not text.isprintable():
            raise UsageError(f"{text!r}: line breaks and control characters are not allowed in a batch script")
    lines = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items() if value is not None]
    command = f"exec {shlex.join([*module_command('clusterddp.rehearsal.preemption_job', python), str(folder)])}"
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
        *module_command("clusterddp.rehearsal.preemption_job"),
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
