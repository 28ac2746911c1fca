"""Recording a run: chooses and claims its directory, and writes its job there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from clusterddp.errors import RunDirectoryError, SlurmError, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.secrets import secrets_file, without_secrets
from clusterddp.rundir.files import make_folder, remove, write_atomically, write_json
from clusterddp.rundir.find import runs_folder
from clusterddp.rundir.ownership import check_own, check_place, check_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.lease import being_submitted, held_by_other, loop_here, submitting

#: Adds content to a run directory that is about to be recorded.
Plant = Callable[[RunDirectory], None]


def choose_run_directory(run_dir: str | None, job: Job) -> RunDirectory:
    """``run_dir``, if given, else NAME-N under $CLUSTERDDP_RUNS or ./runs, with the first free N."""
    if run_dir:
        return RunDirectory(run_dir)
    parent = runs_folder(os.environ)
    return RunDirectory(next(path for n in count() if not os.path.lexists(path := parent / f"{job.name}-{n}")))


def claim(run_dir: str | None, job: Job) -> tuple[RunDirectory, bool]:
    """The run directory, and whether this process has just created it.

    RunDirectoryError, and nothing is changed, if another user has put something there.
    """
    while True:
        run = choose_run_directory(run_dir, job)
        try:
            make_folder(run.path, exist_ok=False, mode=0o700)  # nobody else may put anything there first
            return run, True
        except FileExistsError:
            check_place(run.path)
            if run_dir:
                return run, False
        except OSError as error:
            raise UsageError(f"cannot create {run} ({error.strerror}): choose another --run-dir") from error


def check_not_held(run: RunDirectory, me: Mapping[str, Any] | None = None) -> None:
    """Refuses a run that another job or process than ``me`` trains: a run has one job at a time."""
    if held := held_by_other(run, me):
        if "cannot be reached from here" in held:
            remedy = "if it has ended, continue the run with --take-over; if it is still training, it will then exit"
        else:
            remedy = (
                f"follow it with `clusterddp watch {run.quoted}`, or save and stop it with "
                f"`clusterddp tell {run.quoted} stop` and submit it again"
            )
        raise RunDirectoryError(f"{run} is {held}: {remedy}")


def check_not_submitted(run: RunDirectory) -> None:
    """Refuses a run that another process submits at this moment."""
    if other := being_submitted(run):
        raise _busy(run, other)


def _busy(run: RunDirectory, other: str) -> RunDirectoryError:
    return RunDirectoryError(f"{other}; see the run with `clusterddp status {run.quoted}`")


@contextmanager
def alone(run: RunDirectory, created: bool) -> Iterator[None]:
    """While this process submits the run or starts its loop, no other does. RunDirectoryError if another one is doing
    so, or a job or process trains the run. ``created``: as for ``recorded``."""
    check_own(run.path, closed=True)
    with ExitStack() as claims:
        try:
            other = claims.enter_context(submitting(run))
        except OSError:  # such as a full disk
            if created:
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        if other:
            raise _busy(run, other)
        check_not_held(run)
        if run.outcome() is None and loop_here(run):
            raise RunDirectoryError(f"{run} is held by a local run on this machine; stop it with Ctrl-C first")
        yield


@contextmanager
def recorded(run: RunDirectory, job: Job, created: bool, plant: Plant | None = None) -> Iterator[None]:
    """Records the job in the run directory, and restores the directory if Slurm refuses the job in the body.

    ``created``: whether this process created the directory, and may remove it. ``plant`` adds other content. The
    outcome of a run that continues (failed, or completed and extended) is removed. After any other error in the body
    nothing is undone: the job may exist.
    """
    files = (secrets_file(run.job_file), run.job_file, run.batch_script, run.outcome_file, run.code_file)
    before = {path: path.read_bytes() for path in files if path.exists()}
    shown, secrets = without_secrets(job)
    try:
        run.create(share=job.share)
        check_run(run)  # of existing content, in a folder that others could write
        if plant:
            plant(run)
        write_json(secrets_file(run.job_file), secrets)
        write_atomically(run.job_file, shown.to_yaml())
        remove(run.outcome_file)
    except BaseException:
        with suppress(OSError):  # such as the full disk that the error is about
            _undo(run, created, before, files)
        raise
    try:
        yield
    except SlurmError:
        _undo(run, created, before, files)
        raise


def _undo(run: RunDirectory, created: bool, before: Mapping[Path, bytes], files: Iterable[Path]) -> None:
    """Restores the files of a run directory, or removes a directory that was created: no run has started in it."""
    if created:
        shutil.rmtree(run.path)
        return
    for path in files:
        held = path.read_bytes() if path.exists() else None
        if path not in before:
            path.unlink(missing_ok=True)
        elif held != before[path]:
            write_atomically(path, before[path])
