"""How ``--check-resume`` runs a script: in attempts that stop where they are told, here or in this job's allocation."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

from clusterddp.cli.local import INTERRUPTS, POLL_S, AllocatedRun, LocalRun, interrupts_counted
from clusterddp.cli.progress import Progress
from clusterddp.cli.recording import claim, recorded
from clusterddp.cli.submission import record_local
from clusterddp.errors import INTERRUPTED, STOPPED, CheckUnfinished, ClusterddpError, SlurmError
from clusterddp.jobdef import code_snapshot
from clusterddp.jobdef.job import Job
from clusterddp.protocol import CHECK_RESUME
from clusterddp.reporter import show
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.step_records import WHY, Recording, Trial, read_trial
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.cause import Cause

#: The events of its runs that the user wants to know of.
_SHOWN = ("resumed", "diverged", "slow", "rank_failed", "hung")

#: Seconds that a file of another node may take to appear, on NFS.
LATE_S = 60.0


class Interrupted(Exception):
    """The user pressed Ctrl-C."""


class Trials(Protocol):
    """How a script is run."""

    def run(self, name: str, untils: Sequence[int], output: bool = False) -> Trial:
        """Runs it from the beginning, up to each of ``untils`` steps in a fresh process; returns what was recorded."""

    def inexact(self, name: str) -> list[str]:
        """Why the resumes of a trial are not exact, as it says itself."""


class _Interruptions(LocalRun):
    """A local run whose attempts stop where they are told."""

    def interrupted(self) -> None:
        """On Ctrl-C: nothing of this run is worth saving."""
        self.interrupts += 1
        self._kill()

    def make(self, recording: Recording, progress: Progress) -> bool:
        """Makes an attempt; whether the run is not over. Raises as ``LocalTrials.run`` does."""
        self.environment = {CHECK_RESUME: str(recording)}
        code = self._attempt(progress)
        if self.interrupts:
            raise Interrupted
        outcome = self.run.outcome()
        if outcome is None and code in (STOPPED, INTERRUPTED):
            if why := stopped_by_others(self.run):
                raise CheckUnfinished(unfinished(why))
            return True
        if outcome is not None and outcome["state"] == "cancelled":
            raise CheckUnfinished(unfinished(outcome["reason"]))
        if outcome is None or outcome["state"] != "completed":
            reason = outcome["reason"] if outcome else f"its supervisor ended with exit code {code}"
            raise ClusterddpError(
                f"the script failed, so that its resume cannot be checked: {reason}; start it without "
                "--check-resume to keep its logs"
            )
        return False


class _AllocatedInterruptions(AllocatedRun, _Interruptions):
    """The same in the surrounding allocation, with srun."""

    def interrupted(self) -> None:
        """On Ctrl-C: told to stop, as a killed supervisor would leave its step behind."""
        self.interrupts += 1
        self._signal(Cause.INTERRUPTED)


def stopped_by_others(run: RunDirectory) -> str:
    """Why the newest attempt has stopped, if the check did not want it to; else ''."""
    own = [event for event in run.events() if event["attempt"] == run.newest_attempt()]
    if any(event["event"] == "stopping" and event.get("reason") == WHY for event in own):
        return ""
    reasons = [str(event["reason"]) for event in own if event["event"] == "stopped" and event.get("reason")]
    return reasons[-1] if reasons else "it was stopped before its first step"


def unfinished(why: str) -> str:
    """The message about a check without a result."""
    again = "start it again"
    if "time limit" in why:
        again += " with a longer --time, or with fewer steps: they run twice, and a third time after a difference"
    elif "preempt" in why:
        again += ", if there is one in a partition or QOS (-p, -q) that is not preempted"
    return f"the check did not finish, and nothing was found out: {why}; {again}"


@dataclass(frozen=True)
class LocalTrials:
    """Starts of a job on this machine, in run directories below ``folder``."""

    folder: Path
    job: Job
    #: What ends the check.
    interrupts: ClassVar[Sequence[signal.Signals]] = INTERRUPTS

    def run(self, name: str, untils: Sequence[int], output: bool = False) -> Trial:
        """See ``Trials``.

        Raises ClusterddpError when the ranks do not end as wanted, CheckUnfinished when something else stops them,
        Interrupted on Ctrl-C.
        """
        records = self.folder / f"{name}-steps"
        records.mkdir(mode=0o700)
        trial = self._trial(str(self.folder / name))
        shown = Progress(trial.run, untils[-1], bar=False, output=output, events=_SHOWN)
        with shown as progress, interrupts_counted(trial.interrupted, self.interrupts):
            for until in untils:
                if not trial.make(Recording(until, records.absolute()), progress):
                    break
        return self._read(records)

    def _read(self, records: Path) -> Trial:
        return read_trial(records)

    def _trial(self, path: str) -> _Interruptions:
        return _Interruptions(record_local(self.job, path, None, told=False, loop=False), self.job)

    def inexact(self, name: str) -> list[str]:
        """See ``Trials``."""
        events = RunDirectory(self.folder / name).events()
        return list(dict.fromkeys(why for event in events for why in event.get("inexact", [])))


@dataclass(frozen=True)
class AllocatedTrials(LocalTrials):
    """Starts of a job in the surrounding allocation. ``owner``: has the snapshot of the code, if there is one.

    TERM is Slurm's, and the supervisor asks it why; the ranks get it, too.
    """

    owner: RunDirectory | None = None
    interrupts: ClassVar[Sequence[signal.Signals]] = (signal.SIGINT, signal.SIGHUP)

    def run(self, name: str, untils: Sequence[int], output: bool = False) -> Trial:
        """See ``Trials``. Says, after the first run, if the time limit is too near for the same steps again."""
        first, began = not any(self.folder.iterdir()), time.monotonic()
        made = super().run(name, untils, output)
        with suppress(SlurmError):
            job = slurm.show_job(slurm.own_job_id(os.environ) or "") if first else None
            if job and job.end_time and (words := short_of_time(time.monotonic() - began, job.end_time - time.time())):
                show(words)
        return made

    def _read(self, records: Path) -> Trial:
        """Once the files of all ranks are there, if rank 0 has one."""
        from clusterddp.supervisor.main import as_started

        deadline = time.monotonic() + LATE_S
        missing = set(range(as_started(self.job, os.environ).world_size))
        while missing and time.monotonic() < deadline:
            missing = {rank for rank in missing if not Recording(0, records).file(rank).exists()}
            if 0 in missing or not missing:
                break
            time.sleep(POLL_S)
        return read_trial(records)

    def _trial(self, path: str) -> _Interruptions:
        run, created = claim(path, self.job)
        plant = partial(code_snapshot.share, owner=self.owner) if self.owner else None
        with recorded(run, self.job, created, plant):
            return _AllocatedInterruptions(run, self.job)


def short_of_time(made_s: float, left_s: float) -> str:
    """A warning, after a run that took ``made_s``, if less than that is left of the job's time limit; else ''."""
    if left_s >= made_s:
        return ""
    return (
        f"resume check: these steps took {made_s:.0f} s, and {max(0.0, left_s):.0f} s are left until the job's "
        "time limit: the check may not finish; a longer --time, or fewer steps"
    )
