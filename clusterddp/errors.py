"""The errors that a user can act on, one class per kind of action.

Every message says what was given, what was expected and what to do. The command line prints the message alone,
without a traceback, and exits with ``exit_code``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

#: Exit codes. Those of sysexits.h are EX_SOFTWARE (70) and EX_TEMPFAIL (75: stopped at a checkpoint, start it again).
#: Those above 128 are what a shell reports for SIGINT and SIGPIPE.
FAILED, WRONG_USAGE, INTERNAL_ERROR, STOPPED, INTERRUPTED, BROKEN_PIPE = 1, 2, 70, 75, 130, 141
#: Only of `rehearse`: it has found a fault, and the script differs even undisturbed.
FAULT_FOUND, NOT_REPEATABLE = 3, 4
#: Of commands that wait for a run: it completed, but its script may have exited without training.
UNCONFIRMED = 14
#: Only of `clusterddp wait`: the worst end of its runs, in this order. TIMED_OUT is that of timeout(1).
WAITED = {"failed": 10, "cancelled": 11, "stopped": 12, "unknown": 13, "unconfirmed": UNCONFIRMED}
TIMED_OUT = 124
#: What an exit code means, whichever command returns it.
MEANINGS: Mapping[int | str, str] = {
    0: "The command did what was asked. With `--wait`, `-f`, `--local` and `--here`, the run is completed.",
    FAILED: "An error, which the message explains, or a run that ended without being completed.",
    WRONG_USAGE: "The command line or the job definition is wrong. Nothing was submitted or written.",
    FAULT_FOUND: "`rehearse` has found a fault in the script.",
    NOT_REPEATABLE: "`rehearse`: two undisturbed runs of the script differ.",
    INTERNAL_ERROR: "An internal error. The message names the file with the traceback.",
    STOPPED: "EX_TEMPFAIL: start it again. A script without a supervisor was stopped before its end. `submit` of "
    "a sweep: Slurm refused some members, and the same command submits the rest.",
    INTERRUPTED: (
        "Ctrl-C, or a run with `--local` or `--here` that was saved and stopped, for example by a preemption of the "
        "allocation. The message says how to continue it."
    ),
    BROKEN_PIPE: "The reader of the output closed it, such as `head`, or a terminal that was closed under nohup.",
    "128 + N": "With `--local` and `--here`: signal N killed the supervisor, and the ranks ended with it.",
}
#: The exit codes by which a command gives its answer.
ANSWERS: Mapping[str, str] = {
    "submit": "0: submitted. With `--wait`, `-f`, `--local` and `--here`: 0 if the run completed, "
    f"{UNCONFIRMED} if it completed but this is not confirmed, else the training's exit code, or 1.",
    "rehearse": f"0: the script survives. {FAULT_FOUND}: the rehearsal has found a fault. {NOT_REPEATABLE}: two "
    "undisturbed runs differ. 1: the script fails undisturbed.",
    "wait": "0: all runs completed. Otherwise the code of the worst outcome, in this order: "
    + ", ".join(f"{code} {word}" for word, code in WAITED.items())
    + f". {TIMED_OUT}: the timeout expired before all of them ended, or with `--any` before one of them did.",
    "cancel": "0: all runs are over, including those that were over before. 1: one is not, or you answered no.",
    "logs": "0: printed. 1: no line matches `--grep`.",
    "prune": "0: done, even if there was nothing to delete or you answered no. 1: a run was refused, or a file could "
    "not be deleted.",
}


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


class InterfaceMissing(LauncherEnvironmentError):
    """The node has none of the interfaces in the key ``interface``. Others may have one."""


class PreflightError(ClusterddpError):
    """A check before training (``preflight: true``) failed. The run is retried, without a node that fails twice."""


class DeviceError(ClusterddpError):
    """The requested devices are not available. ``lacks_gpus``: the node has too few, but others may have enough."""

    def __init__(self, message: str, lacks_gpus: bool = False) -> None:
        super().__init__(message)
        self.lacks_gpus = lacks_gpus


class RunDirectoryError(ClusterddpError):
    """The run directory cannot be used: the run is held by a job, is over, or was recorded with other arguments."""


class SlurmError(ClusterddpError):
    """Slurm refused the request, or one of its commands failed."""


class SlurmUnavailable(SlurmError):
    """A Slurm command is not installed, or the controller does not answer."""


class SlurmInterrupted(SlurmUnavailable):
    """Ctrl-C came before Slurm answered."""

    exit_code = INTERRUPTED


class SubmissionForbidden(SlurmError):
    """The site does not let this host submit jobs."""


class SlurmMissing(SlurmUnavailable):
    """A Slurm command is not on PATH. A retry does not help."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        """``remedy``: what to do on a login node."""
        super().__init__(f"{problem}. {remedy}" if remedy else problem)
        self.problem = problem


class CheckpointError(ClusterddpError):
    """A checkpoint cannot be restored or written."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint does not fit the script, the ranks or the job definition. A restart would fail in the same way."""


class LastSaveFailed(CheckpointError):
    """The disk did not take the last checkpoint for as long as the ranks waited. A restart would repeat the steps since
    the newest checkpoint, only to find the same disk."""


class RunFailed(ClusterddpError):
    """The run failed, was cancelled or stopped. The message has the first failure. Raised by ``Handle.result()``."""


class Superseded(ClusterddpError):
    """A newer attempt of the run exists, so this one can no longer save."""


class Stopped(SystemExit):
    """Training was stopped at a step boundary, by a preemption for example. The run can be continued.

    Raised on all ranks at the same step, after the checkpoint is committed. As a SystemExit, it passes through
    ``except Exception``. A script that no supervisor started exits with code 75 (EX_TEMPFAIL, sysexits.h).

    Attributes:
        step: the step of the newest checkpoint, from which the run continues. None without one, or if the script saves
            by itself.
        reason: why the run was stopped.

    Example::

        try:
            train(run)
        except clusterddp.Stopped as stopped:
            print(f"stopped at step {stopped.step}: {stopped.reason}")
            raise
    """

    #: Called with each new one, in a rank (``RankProcess.note_stops``).
    on_raised: ClassVar[Callable[[Stopped], None] | None] = None

    def __init__(self, step: int | None, reason: str) -> None:
        super().__init__(STOPPED)
        self.step = step
        self.reason = reason
        if Stopped.on_raised is not None:
            Stopped.on_raised(self)


class StoppedAlone(Stopped):
    """This rank alone stops. Its exit code makes the launcher end the others."""


class Declined(SystemExit):
    """A submitit callable's ``checkpoint()`` returned None, so the run fails instead of being requeued."""


def exit_code(error: type[BaseException]) -> int:
    """Of a process that the error ends."""
    return int(getattr(error, "exit_code", STOPPED if issubclass(error, Stopped) else FAILED))
