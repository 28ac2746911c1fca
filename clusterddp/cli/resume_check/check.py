"""``submit --local --check-resume N``: runs the first N steps of a job without and with resumes, and compares them.

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

from clusterddp.cli.local import LocalRun, interrupts_counted
from clusterddp.cli.progress import Progress
from clusterddp.cli.resume_check import verdict
from clusterddp.cli.resume_check.comparison import epochs_of
from clusterddp.cli.resume_check.plan import LEAST_STEPS, choose_stops
from clusterddp.cli.submission import record_local
from clusterddp.errors import INTERRUPTED, STOPPED, ClusterddpError
from clusterddp.jobdef.job import Job, Limits
from clusterddp.protocol import CHECK_RESUME
from clusterddp.reporter import counted, say, show
from clusterddp.rundir.find import runs_folder
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.step_records import Recording, Trial, read_trial

#: The events of its runs that the user wants to know of.
_SHOWN = ("resumed", "diverged", "slow", "rank_failed", "hung")


class Interrupted(Exception):
    """The user pressed Ctrl-C."""


def check_resume(job: Job, steps: int) -> int:
    """Runs the check on this machine; returns the exit code. Nothing is left of it.

    Raises ResumeDiffers, with the first difference, ClusterddpError when the script fails or makes too few steps.
    """
    with _temporary_folder() as folder:
        try:
            check = compare(LocalTrials(folder, _without_side_effects(job)), steps)
        except Interrupted:
            say("interrupted: nothing was found out")
            return INTERRUPTED
    if check.differs:
        raise verdict.failure(check)
    show(verdict.success(check))
    return 0


class Trials(Protocol):
    """How a script is run."""

    def run(self, name: str, untils: Sequence[int], output: bool = False) -> Trial:
        """Runs it from the beginning, up to each of ``untils`` steps in a fresh process; returns what was recorded."""

    def inexact(self, name: str) -> list[str]:
        """Why the resumes of a trial are not exact, as it says itself."""


def compare(trials: Trials, steps: int) -> verdict.Check:
    """Runs a script as often as it takes. Raises ClusterddpError when it makes too few steps."""
    show(f"check of the resume: {counted(steps, 'step')} without a resume")
    uninterrupted = trials.run("uninterrupted", [steps], output=True)
    epochs = epochs_of(uninterrupted)
    if not epochs:
        raise ClusterddpError(
            "the check has recorded no step: expected a script with `run = ctx.run(...)` and a loop over run.steps() "
            "or run.epochs()"
        )
    if len(epochs) < LEAST_STEPS:
        raise ClusterddpError(
            f"the script made {counted(len(epochs), 'step')}: expected at least {LEAST_STEPS}, for two resumes"
        )
    stops = choose_stops(epochs)
    show(f"check of the resume: the same steps, interrupted after {verdict.joined(stops)}")
    resumed = trials.run("resumed", [*stops, steps])
    check = verdict.Check(uninterrupted, resumed, stops, inexact=trials.inexact("resumed"))
    if not check.differs:
        return check
    show("check of the resume: there is a difference; once more without a resume, to see whether that is repeatable")
    return replace(check, again=trials.run("again", [steps]))


@dataclass(frozen=True)
class LocalTrials:
    """Starts of a job on this machine, in run directories below ``folder``."""

    folder: Path
    job: Job

    def run(self, name: str, untils: Sequence[int], output: bool = False) -> Trial:
        """See ``Trials``. Raises ClusterddpError when the ranks do not end as wanted, Interrupted on Ctrl-C."""
        records = self.folder / f"{name}-steps"
        records.mkdir(mode=0o700)
        run = record_local(self.job, str(self.folder / name), None, told=False)
        local = _Interruptions(run, self.job)
        shown = Progress(run, untils[-1], bar=False, output=output, events=_SHOWN)
        with shown as progress, interrupts_counted(local.interrupted):
            for until in untils:
                if not local.make(Recording(until, records.absolute()), progress):
                    break
        return read_trial(records)

    def inexact(self, name: str) -> list[str]:
        """See ``Trials``."""
        events = RunDirectory(self.folder / name).events()
        return list(dict.fromkeys(why for event in events for why in event.get("inexact", [])))


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
        if outcome is None and code in (STOPPED, INTERRUPTED):  # as nobody but the check wanted it to stop
            return True
        if outcome is None or outcome["state"] != "completed":
            reason = outcome["reason"] if outcome else f"its supervisor ended with exit code {code}"
            raise ClusterddpError(
                f"the script failed, so that its resume cannot be checked: {reason}; start it without "
                "--check-resume to keep its logs"
            )
        return False


def _without_side_effects(job: Job) -> Job:
    """The job without what would tell others of it, or end it early."""
    return replace(job, hook=(), tensorboard=False, wandb=None, profile=None, preflight=False, limits=Limits())


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder beside the runs, which are where the ranks can write; deleted at the end."""
    runs = runs_folder(os.environ)
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
