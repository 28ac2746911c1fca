"""The errors a user can act on, one class per kind of action.

Every message says what was given, what was expected and what to do. The command line prints the message alone,
without a traceback, and exits with ``exit_code``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

#: Exit codes. Those of sysexits.h are EX_SOFTWARE (70) and EX_TEMPFAIL (75: stopped at a checkpoint, start it again);
#: those above 128 are what a shell reports for SIGINT and SIGPIPE.
FAILED, WRONG_USAGE, INTERNAL_ERROR, STOPPED, INTERRUPTED, BROKEN_PIPE = 1, 2, 70, 75, 130, 141


class ClusterddpError(Exception):
    """The base of every error that clusterddp raises on purpose."""

    exit_code = FAILED


class UsageError(ClusterddpError):
    """The command line, or what it names, is wrong: nothing was submitted or written."""

    exit_code = WRONG_USAGE


class JobDefinitionError(UsageError):
    """A job definition holds mistakes; the message lists all of them, each with its place."""


class LauncherEnvironmentError(ClusterddpError):
    """The variables that a launcher should have set are missing or contradict each other."""


class DeviceError(ClusterddpError):
    """The devices asked for are not there."""


class RunDirectoryError(ClusterddpError):
    """The run directory cannot be used for what was asked: held, over, or recorded with other arguments."""


class SlurmError(ClusterddpError):
    """Slurm refused the request, or a command of it failed."""


class SlurmUnavailable(SlurmError):
    """A Slurm command is missing, or the controller did not answer."""


class SlurmMissing(SlurmUnavailable):
    """A Slurm command is not on PATH: asking again does not help."""


class CheckpointError(ClusterddpError):
    """No checkpoint of the run can be restored, or one cannot be written."""


class RunFailed(ClusterddpError):
    """A run that was waited for is over, or stopped, without being done; the message holds the first failure."""


class Superseded(ClusterddpError):
    """A newer attempt of the run exists: this one must not write any more."""


class Stopped(SystemExit):
    """Training stopped at a step boundary because it was told to; it is not done and can go on from ``step``.

    Raised on every rank at the same step, after the checkpoint of that step is committed. A SystemExit, so that it
    passes through ``except Exception`` and ends an unsupervised process with code 75 (EX_TEMPFAIL, sysexits.h).
    """

    #: The one that this process has made: a script may catch it and go on, which makes it no less stopped.
    latest: ClassVar[Stopped | None] = None
    #: Called with each one that is made: the rank shim bounds the time until the process ends.
    on_raised: ClassVar[Callable[[Stopped], None] | None] = None

    def __init__(self, step: int | None, reason: str) -> None:
        super().__init__(STOPPED)
        Stopped.latest = self
        self.step = step
        self.reason = reason
        if Stopped.on_raised is not None:
            Stopped.on_raised(self)


class StoppedAlone(Stopped):
    """Only this rank stops by itself; its exit code makes the launcher end the others."""


class Declined(SystemExit):
    """A callable's ``checkpoint()`` returned None: it was told to stop, and is not to go on."""
