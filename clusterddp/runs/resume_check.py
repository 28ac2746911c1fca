"""``submit --check-resume N``: runs the first N steps of a job with and without resumes, and compares them.

The runs have run directories of their own, in a folder that is deleted at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from clusterddp.errors import INTERRUPTED, STOPPED, CheckUnfinished, ClusterddpError
from clusterddp.jobdef.job import Job, Limits
from clusterddp.protocol import CHECK_RESUME
from clusterddp.reporter import counted, say, show
from clusterddp.rundir.find import runs_folder
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.step_records import WHY, Recording, Trial, read_trial
from clusterddp.runs import resume_verdict
from clusterddp.runs.local import LocalRun, interrupts_counted
from clusterddp.runs.progress import Progress, Shown
from clusterddp.runs.resume_verdict import LEAST_STEPS, choose_stops, epochs_of
from clusterddp.runs.submission import record_local

#: The events of its runs to show to the user.
_SHOWN = ("resumed", "diverged", "slow", "rank_failed", "hung")


class Interrupted(Exception):
    """The user pressed Ctrl-C."""


class Trials(Protocol):
    """How a script is run."""

    def run(self, name: str, untils: Sequence[int], output: bool = False) -> Trial:
        """Runs it from the beginning, up to each of ``untils`` steps in a fresh process. Returns what was recorded."""

    def inexact(self, name: str) -> list[str]:
        """Why the resumes of a trial are not exact, according to its events."""


class _Interruptions(LocalRun):
    """A local run whose attempts stop after given steps."""

    def interrupted(self) -> None:
        """Handles Ctrl-C without saving, because the run is temporary."""
        self.interrupts += 1
        self._kill()

    def make(self, recording: Recording, progress: Progress) -> bool:
        """Makes an attempt. Returns whether the run is not over. Raises as ``LocalTrials.run`` does."""
        self.environment = {CHECK_RESUME: str(recording)}
        code = self._attempt(progress)
        if self.interrupts:
            raise Interrupted
        outcome = self.run.outcome()
        if outcome is None and code in (STOPPED, INTERRUPTED):
            if why := stopped_by_others(self.run):
                raise CheckUnfinished(_unfinished(why))
            return True
        if outcome is not None and outcome["state"] == "cancelled":
            raise CheckUnfinished(_unfinished(outcome["reason"]))
        if outcome is None or outcome["state"] != "completed":
            reason = outcome["reason"] if outcome else f"its supervisor exited with code {code}"
            raise ClusterddpError(
                f"the script failed ({reason}), so its resume could not be checked. To keep its logs, start it without "
                "--check-resume"
            )
        return False


def _unfinished(why: str) -> str:
    """The message about a check without a result."""
    return f"the check did not finish and has no result: {why}. Start it again"


def stopped_by_others(run: RunDirectory) -> str:
    """Why the newest attempt has stopped, if the check did not want it to, else ''."""
    own = [event for event in run.events() if event["attempt"] == run.newest_attempt()]
    if any(event["event"] == "stopping" and event.get("reason") == WHY for event in own):
        return ""
    reasons = [str(event["reason"]) for event in own if event["event"] == "stopped" and event.get("reason")]
    return reasons[-1] if reasons else "it was stopped before its first step"


@dataclass(frozen=True)
class LocalTrials:
    """Starts of a job on this machine, in run directories below ``folder``."""

    folder: Path
    job: Job

    def run(self, name: str, untils: Sequence[int], output: bool = False) -> Trial:
        """See ``Trials``.

        Raises ClusterddpError when the ranks do not end as wanted, CheckUnfinished when something else stops them,
        Interrupted on Ctrl-C.
        """
        records = self.folder / f"{name}-steps"
        records.mkdir(mode=0o700)
        trial = _Interruptions(record_local(self.job, str(self.folder / name), told=False, loop=False), self.job)
        shown = Progress(trial.run, untils[-1], shown=Shown(bar=False, output=output, events=_SHOWN))
        with shown as progress, interrupts_counted(trial.interrupted):
            for until in untils:
                if not trial.make(Recording(until, records.absolute()), progress):
                    break
        return read_trial(records)

    def inexact(self, name: str) -> list[str]:
        """See ``Trials``."""
        events = RunDirectory(self.folder / name).events()
        return list(dict.fromkeys(why for event in events for why in event.get("inexact", [])))


def check_resume(job: Job, steps: int) -> int:
    """Runs the check as processes on this machine and deletes its files. Returns the exit code.

    Raises ResumeDiffers, with the first difference, ClusterddpError when the script fails or makes too few steps.
    """
    with temporary_folder() as folder:
        try:
            check = compare(LocalTrials(folder, without_side_effects(job)), steps)
        except Interrupted:
            say("interrupted, no result")
            return INTERRUPTED
    if check.differs:
        raise resume_verdict.failure(check)
    show(resume_verdict.success(check))
    return 0


def compare(trials: Trials, steps: int) -> resume_verdict.Check:
    """Runs a script as often as needed. Raises ClusterddpError when it makes too few steps."""
    show(f"resume check: running {counted(steps, 'step')} without a resume")
    uninterrupted = trials.run("uninterrupted", [steps], output=True)
    epochs = epochs_of(uninterrupted)
    if not epochs:
        raise ClusterddpError(
            "the check has recorded no steps. It needs a script with `run = ctx.run(...)` and a loop over run.steps() "
            "or run.epochs()"
        )
    if len(epochs) < LEAST_STEPS:
        raise ClusterddpError(
            f"the script completed {counted(len(epochs), 'step')}, but the check needs {LEAST_STEPS} for two resumes"
        )
    stops = choose_stops(epochs)
    show(f"resume check: running the same steps, interrupted after {resume_verdict.joined(stops)}")
    resumed = trials.run("resumed", [*stops, steps])
    check = resume_verdict.Check(uninterrupted, resumed, stops, inexact=trials.inexact("resumed"))
    if not check.differs:
        return check
    show("resume check: the results differ. Running again without a resume, to see whether the run is repeatable")
    return replace(check, again=trials.run("again", [steps]))


def without_side_effects(job: Job) -> Job:
    """The job without notifications, and without conditions that end it early."""
    job = replace(job, tensorboard=False, wandb=None, mlflow=None)
    return replace(job, hook=(), profile=None, preflight=False, limits=Limits(), done=None)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder beside the runs, where the ranks can write. It is deleted at the end."""
    runs = runs_folder(os.environ).absolute()
    existed = runs.is_dir()
    runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".check-resume-", dir=runs))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not existed:
            with suppress(OSError):  # another command has put a run there meanwhile
                runs.rmdir()
