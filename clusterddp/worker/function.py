"""A launched Python function: ``python -m clusterddp.worker -m clusterddp.function`` on every rank.

The function is pickled in the run's ``private/function.pkl``. The return value of each rank is written next to the
rank's record. Unpickling executes code, so a file is loaded only if no other user can have written it.

The ``checkpoint()`` of a callable (submitit's contract) is called on a preemption or a near time limit as submitit
does: on rank 0 only, in a signal handler of the main thread. It returns the function for the next attempts. Then rank 0
exits, and the launcher ends the other ranks. After an attempt that ended without this, by a crash or a lost node,
rank 0 of the next one calls it before the function, because it names a checkpoint, or a new file to meet in.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from submitit.core.utils import DelayedSubmission

from clusterddp import protocol
from clusterddp.errors import Declined, RunDirectoryError, Stopped, StoppedAlone, Superseded
from clusterddp.jobdef.job import FUNCTION
from clusterddp.reporter import say
from clusterddp.rundir.files import open_file, write_atomically
from clusterddp.rundir.files import status as status_of
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import rank_process
from clusterddp.worker.code_paths import of_this_attempt
from clusterddp.worker.signals import STOP_SIGNALS

MODULE = FUNCTION


def main() -> None:
    """Calls the function on one rank and writes its return value."""
    run, attempt = RunDirectory(os.environ[protocol.RUN_DIR]), int(os.environ[protocol.ATTEMPT])
    os.environ.update(submitit_variables(run))
    rank = int(os.environ["RANK"])
    call = PreemptibleCall(run, attempt, rank, load_function(function_of(run, attempt, rank)))
    value = call.carry_out()
    write_atomically(run.result_file(attempt, call.rank), cloudpickle.dumps(value), mode=0o600)


class PreemptibleCall:
    """One rank's call of the function. Without a ``checkpoint()``, signals act as on any script."""

    def __init__(self, run: RunDirectory, attempt: int, rank: int, delayed: DelayedSubmission) -> None:
        self.rank = rank
        self._run, self._attempt, self._delayed = run, attempt, delayed
        self._checkpoint = checkpoint_of(delayed)
        self._process = os.getpid()
        self._signalled = False

    def carry_out(self) -> Any:
        """The function's return value. Raises Stopped if it had to stop."""
        if self._checkpoint is not None:
            rank_process.current().deferred_stops.also(STOP_SIGNALS)
            for number in STOP_SIGNALS:
                signal.signal(number, self._on_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            return self._delayed.result()
        except Stopped as stopped:  # from a clusterddp training loop inside, which has saved; all ranks stop
            if self._checkpoint is not None and self.rank == 0 and not isinstance(stopped, StoppedAlone):
                self._keep_checkpoint()
            raise
        except Exception as error:
            if self._signalled and self.rank != 0:  # rank 0 has exited, so this rank's collective failed
                raise Stopped(None, "rank 0 has stopped") from error
            raise

    def _on_signal(self, number: int, _: object) -> None:
        """Rank 0 stops here. The other ranks continue: rank 0 may be waiting for them in a collective."""
        if os.getpid() != self._process or self._signalled:
            return  # in a forked worker, or a second signal
        self._signalled = True
        if self.rank == 0:
            self._keep_checkpoint()
            raise StoppedAlone(None, f"signal {signal.Signals(number).name.removeprefix('SIG')}")

    def _keep_checkpoint(self) -> None:
        following = continued(self._delayed)
        if self._run.superseded(self._attempt):
            raise Superseded(f"attempt {self._attempt} was superseded, so the result of checkpoint() is not saved")
        save_function(self._run.attempt_private(self._attempt) / "function.pkl", pickled(following))
        say("called checkpoint(). The next attempt calls the function that it returned")


def checkpoint_of(delayed: DelayedSubmission) -> Callable[..., DelayedSubmission | None] | None:
    """The ``checkpoint()`` of a callable, if it has one."""
    checkpoint = getattr(delayed.function, "checkpoint", None)
    return getattr(delayed.function, "__submitit_checkpoint__", checkpoint)


def continued(delayed: DelayedSubmission) -> DelayedSubmission:
    """Calls ``checkpoint()``. Raises Declined, and any exception of ``checkpoint()``."""
    checkpoint = checkpoint_of(delayed)
    assert checkpoint is not None
    following = checkpoint(*delayed.args, **delayed.kwargs)
    if following is None:
        raise Declined("checkpoint() returned None, so the run does not continue")
    return following


def function_of(run: RunDirectory, attempt: int, rank: int) -> Path:
    """The file of the function that an attempt calls. Rank 0 writes it if the previous attempt ended without a stop,
    and so did not call ``checkpoint()``."""
    newest, begun = newest_function(run, attempt), run.attempt_private(attempt) / "begun.pkl"
    before = [number for number in run.attempts() if number < attempt]
    if not before or newest.parent == run.attempt_private(before[-1]):
        return newest
    delayed = load_function(newest)
    if checkpoint_of(delayed) is None:
        return newest
    if rank == 0:
        say(f"attempt {before[-1]} ended without calling checkpoint(). Calling it now")
        save_function(begun, pickled(continued(delayed)))
    while begun.name not in os.listdir(begun.parent):  # lists the folder, because a shared disk caches absent files
        time.sleep(0.1)
    return begun


# --- files


def function_file(run: RunDirectory) -> Path:
    """The function as it was launched."""
    return run.private / "function.pkl"


def newest_function(run: RunDirectory, attempt: int) -> Path:
    """The function of ``attempt``: the result of the newest earlier ``checkpoint()``, else the function as launched."""
    earlier = [run.attempt_private(number) / "function.pkl" for number in run.attempts() if number < attempt]
    return next((path for path in reversed(earlier) if path.exists()), function_file(run))


def pickled(delayed: DelayedSubmission) -> bytes:
    """A pickled call, with this process's ``sys.path``, so that the ranks find the same modules."""
    return pickle.dumps((sys.path, cloudpickle.dumps(delayed)))


def save_function(path: Path, content: bytes) -> None:
    """Writes the result of ``pickled``."""
    write_atomically(path, content, mode=0o600)


def load_function(path: Path) -> DelayedSubmission:
    """Loads a call, and extends this process's ``sys.path``."""
    search_path, inner = load_private(path)
    search_path = [of_this_attempt(entry) for entry in search_path]
    sys.path.extend(entry for entry in search_path if entry not in sys.path)
    delayed: DelayedSubmission = pickle.loads(inner)
    return delayed


def load_private(path: Path) -> Any:
    """Unpickles a file. RunDirectoryError if another user may have written the file or its folder."""
    try:
        descriptor = open_file(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{path} is missing. Copy it from the original run, or launch a new run") from error
    with open(descriptor, "rb") as file:
        for name, status in ((path, os.fstat(descriptor)), (path.parent, status_of(path.parent))):
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise RunDirectoryError(
                    f"refusing to unpickle {name}, because it belongs to user {status.st_uid} and has mode "
                    f"{status.st_mode & 0o777:04o}. Expected user {os.geteuid()} and no access for others"
                )
        return pickle.load(file)


def submitit_variables(run: RunDirectory) -> dict[str, str]:
    """The variables for ``submitit.JobEnvironment()``, which finds the class in ``integrations/submitit.py`` by them.

    SUBMITIT_FOLDER is set already if one of submitit's executors submitted the run.
    """
    folder = os.environ.get("SUBMITIT_FOLDER", str(run.private / "submitit"))
    return {"SUBMITIT_EXECUTOR": "clusterddp", "SUBMITIT_FOLDER": folder}
