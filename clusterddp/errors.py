"""The errors that a user can act on, one class per kind of action.

Every message says what was given, what was expected and what to do. The command line prints the message alone,
without a traceback, and exits with ``exit_code``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

#: Exit codes. Those of sysexits.h are EX_SOFTWARE (70) and EX_TEMPFAIL (75: stopped at a checkpoint, start it again);
#: those above 128 are what a shell reports for SIGINT and SIGPIPE.
FAILED, WRONG_USAGE, INTERNAL_ERROR, STOPPED, INTERRUPTED, BROKEN_PIPE = 1, 2, 70, 75, 130, 141
#: Of `submit --check-resume` alone: a resume makes a difference; the run differs even without one.
RESUME_DIFFERS, NOT_REPEATABLE = 3, 4
#: Of commands that wait for a run: it completed, but its script may have exited without training.
UNCONFIRMED = 14
#: Of `clusterddp wait` alone: that of the worst end of its runs, in this order; when its time is up, as of timeout(1).
WAITED = {"failed": 10, "cancelled": 11, "stopped": 12, "unknown": 13, "unconfirmed": UNCONFIRMED}
TIMED_OUT = 124


class ClusterddpError(Exception):
    """Base class of the errors that clusterddp raises."""

    exit_code = FAILED


class UsageError(ClusterddpError):
    """An argument, or a file that it names, is invalid. Nothing was submitted or written."""

    exit_code = WRONG_USAGE


class JobDefinitionError(UsageError):
    """A job definition is invalid. The message lists every error with its location."""


class LauncherEnvironmentError(ClusterddpError):
    """The environment variables that a launcher sets are missing or contradict each other."""


class PreflightError(ClusterddpError):
    """A check before training (``preflight: true``) failed. The run is retried, and a node that fails is left out."""


class DeviceError(ClusterddpError):
    """The requested devices are not available."""


class RunDirectoryError(ClusterddpError):
    """The run directory cannot be used: the run is held by a job, is over, or was recorded with other arguments."""


class SlurmError(ClusterddpError):
    """Slurm refused the request, or one of its commands failed."""


class SlurmUnavailable(SlurmError):
    """A Slurm command is not installed, or the controller does not answer."""


class SlurmMissing(SlurmUnavailable):
    """A Slurm command is not on PATH; a retry does not help."""


class CheckpointError(ClusterddpError):
    """A checkpoint cannot be restored or written."""


class ResumeDiffers(ClusterddpError):
    """``submit --check-resume`` found that a resume makes a difference; the message names the first one."""

    exit_code = RESUME_DIFFERS


class NotRepeatable(ResumeDiffers):
    """The same, but the run differs without a resume, too, when it runs again."""

    exit_code = NOT_REPEATABLE


class CheckUnfinished(ClusterddpError):
    """``submit --check-resume`` was stopped before it knew the result; the message says by what. Start it again."""

    exit_code = STOPPED


class RunFailed(ClusterddpError):
    """The run failed, was cancelled or stopped; the message has the first failure. Raised by ``Handle.result()``."""


class Superseded(ClusterddpError):
    """A newer attempt of the run exists, so this one can no longer save."""


class Stopped(SystemExit):
    """Training was stopped at a step boundary, by a preemption for example; the run can be continued.

    Raised on all ranks at the same step, after the checkpoint is committed. It is a SystemExit: it passes through
    ``except Exception``, and the exit code of a script that no supervisor started is 75 (EX_TEMPFAIL, sysexits.h).

    Attributes:
        step: the step of the newest checkpoint, from which the run continues; None without one, or if the script saves
            by itself.
        reason: why the run was stopped.

    Example::

        try:
            train(run)
        except clusterddp.Stopped as stopped:
            print(f"stopped at step {stopped.step}: {stopped.reason}")
            raise
    """

    #: The newest one of this process: the rank stays stopped even if the script catches it and continues.
    latest: ClassVar[Stopped | None] = None
    #: Called with each new one: the rank bounds the time until the process ends.
    on_raised: ClassVar[Callable[[Stopped], None] | None] = None

    def __init__(self, step: int | None, reason: str) -> None:
        super().__init__(STOPPED)
        Stopped.latest = self
        self.step = step
        self.reason = reason
        if Stopped.on_raised is not None:
            Stopped.on_raised(self)


class StoppedAlone(Stopped):
    """This rank alone stops; its exit code makes the launcher end the others."""


class Declined(SystemExit):
    """A submitit callable's ``checkpoint()`` returned None: the run fails instead of being requeued."""
