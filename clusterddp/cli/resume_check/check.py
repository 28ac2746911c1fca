"""``submit --check-resume N``: runs the first N steps of a job without and with resumes, and compares them.

The runs have run directories of their own, in a folder that is deleted at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from clusterddp.cli.resume_check import verdict
from clusterddp.cli.resume_check.comparison import epochs_of
from clusterddp.cli.resume_check.plan import LEAST_STEPS, choose_stops
from clusterddp.cli.resume_check.trials import AllocatedTrials, Interrupted, LocalTrials, Trials
from clusterddp.errors import INTERRUPTED, ClusterddpError
from clusterddp.jobdef.job import Job, Limits
from clusterddp.reporter import counted, say, show
from clusterddp.rundir.find import runs_folder


def check_resume(job: Job, steps: int, allocated: bool) -> int:
    """Runs the check here; returns the exit code. Nothing is left of it.

    ``allocated``: in the surrounding allocation, with srun, instead of as processes of this machine. Raises what
    ``result`` raises.
    """
    with temporary_folder() as folder:
        try:
            place = AllocatedTrials if allocated else LocalTrials
            show(result(place(folder, without_side_effects(job)), steps))
        except Interrupted:
            say("interrupted: nothing was found out")
            return INTERRUPTED
    return 0


def result(trials: Trials, steps: int) -> str:
    """What is known of a script whose resumes make no difference.

    Raises ResumeDiffers, with the first difference, ClusterddpError when the script fails or makes too few steps.
    """
    check = compare(trials, steps)
    if check.differs:
        raise verdict.failure(check)
    return verdict.success(check)


def compare(trials: Trials, steps: int) -> verdict.Check:
    """Runs a script as often as it takes. Raises ClusterddpError when it makes too few steps."""
    show(f"resume check: {counted(steps, 'step')} without a resume")
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
    show(f"resume check: the same steps, interrupted after {verdict.joined(stops)}")
    resumed = trials.run("resumed", [*stops, steps])
    check = verdict.Check(uninterrupted, resumed, stops, inexact=trials.inexact("resumed"))
    if not check.differs:
        return check
    show("resume check: there is a difference; once more without a resume, to see whether that is repeatable")
    return replace(check, again=trials.run("again", [steps]))


def without_side_effects(job: Job) -> Job:
    """The job without what would tell others of it, or end it early."""
    job = replace(job, tensorboard=False, wandb=None, mlflow=None)
    return replace(job, hook=(), profile=None, preflight=False, limits=Limits(), done=None)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder beside the runs, which are where the ranks can write; deleted at the end."""
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
