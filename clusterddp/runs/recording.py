"""The recording of a submission in its run directory: one process at a time, and undone if Slurm refuses the job.

With ``submit --fork``, a new run starts from a checkpoint of another run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.sharded.folder import ShardedCheckpoint
from clusterddp.checkpoint.store import Checkpoints, choose
from clusterddp.errors import (
    CheckpointError,
    RunDirectoryError,
    SlurmError,
    SlurmMissing,
    SlurmUnavailable,
    UsageError,
)
from clusterddp.history.beginnings import Forked
from clusterddp.history.codec import encode, sentence
from clusterddp.jobdef import code_snapshot
from clusterddp.jobdef.checkout import checkout_of
from clusterddp.jobdef.code_snapshot import Code
from clusterddp.jobdef.differences import list_differences
from clusterddp.jobdef.job import FUNCTION, Job, Keep
from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.secrets import secrets_file, without_secrets
from clusterddp.reporter import show
from clusterddp.rundir.claims import Claim
from clusterddp.rundir.deletion import delete_entry
from clusterddp.rundir.files import (
    append_line,
    copy_file,
    exists,
    make_folder,
    names_in,
    read_bytes,
    remove,
    symlink,
    unlink,
    write_atomically,
    write_json,
)
from clusterddp.rundir.ownership import check_owner, check_place, check_run, hold_run, warn_of_replaceable
from clusterddp.rundir.package import write_package
from clusterddp.rundir.run_directory import RunDirectory, open_run, runs_folder
from clusterddp.slurm import commands as slurm
from clusterddp.staging import Packed
from clusterddp.supervisor.lease import being_submitted, held_by_other, loop_here, submitting


def parse(text: str) -> tuple[RunDirectory, int | Literal["best"] | None]:
    """The run and the step (None: its newest checkpoint) of ``RUN``, ``RUN@STEP`` or ``RUN@best``.

    Raises RunDirectoryError if there is no such run.
    """
    path, at, step = text.rpartition("@")
    if not at or not (step.isdecimal() or step == "best") or RunDirectory(text).exists():
        path, step = text, ""
    try:
        run = open_run(path)
    except RunDirectoryError as error:
        raise RunDirectoryError(f"--fork {text}: {error} (expected RUN, RUN@STEP or RUN@best)") from error
    return run, "best" if step == "best" else int(step) if step else None


def copy_checkpoint(text: str, into: RunDirectory) -> str:
    """Copies the checkpoint into a new run, as the checkpoint of an attempt 0 that never trained. Returns a message."""
    run, step = parse(text)
    source = choose(run, step, load_resolved(run.job_file).checkpoint.keep if step == "best" else Keep())
    number = into.create_attempt()
    checkpoints = Checkpoints(into, number, Keep())
    checkpoints.record_resume(None)
    try:
        if isinstance(source, ShardedCheckpoint):
            copy = checkpoints.sharded(source.step)
            source.copy_to(copy)
            copy.verify()
        else:
            temporary = checkpoints.temporary(source.step)
            copy_file(source.path, temporary)
            Checkpoint(temporary, source.step, number).verify()
            checkpoints.commit(temporary, source.step)
    except OSError as error:
        raise CheckpointError(f"cannot copy {source.path} into {into}: {error.strerror}") from error
    event = Forked(time=time.time(), attempt=number, step=source.step, source=str(run))
    append_line(into.events_file, encode(event))
    return sentence(event) or ""


@dataclass(frozen=True)
class Content:
    """What a submission writes into the run directory beside the job definition."""

    function: bytes | None = None
    """A launched function and its arguments, pickled."""
    source: Path | None = None
    """The file that defines the function: the code of the run is that file's repository."""
    fork: str | None = None
    """``RUN``, ``RUN@STEP`` or ``RUN@best``: the checkpoint that a new run starts from."""
    debug_rank: int | None = None
    """The rank that runs in the user's terminal: ``submit --debug``."""
    hydra_output: Path | None = None
    """The output folder of a member of a Hydra multirun."""
    environment: Packed | None = None
    """The environment that the nodes get, packed."""
    code: Code | None = None
    """None: keep the code that the run has."""


ONLY_JOB = Content()


def present_code(job: Job, run_dir: str | None, source: Path | None = None, *, batch: bool = False) -> Code | None:
    """The code for a run that is submitted now: a snapshot of the job's repository, or the repository as it is.

    Lists the repository and checks its size before anything is written. A ``batch`` job waits and may be requeued, so
    it gets a snapshot by default. ``source``: the file of a launched function. Returns None for a function that
    continues without being launched again: it is pickled in the run and keeps its code.
    """
    if job.module == FUNCTION and source is None:
        return None
    wanted = batch if job.snapshot is None else job.snapshot
    runs = [runs_folder(os.environ), *([Path(run_dir)] if run_dir else [])]
    return Code(checkout_of(job, runs, source) if wanted else None)


def choose_run_directory(run_dir: str | None, job: Job) -> RunDirectory:
    """``run_dir``, if given, else NAME-N under $CLUSTERDDP_RUNS or ./runs, with the first free N."""
    if run_dir:
        return RunDirectory(run_dir)
    parent = runs_folder(os.environ)
    return RunDirectory(next(path for n in count() if not os.path.lexists(path := parent / f"{job.name}-{n}")))


def claim(run_dir: str | None, job: Job) -> tuple[RunDirectory, bool]:
    """The run directory, and whether this process has just created it.

    Raises RunDirectoryError, without a change, if another user has put something there.
    """
    while True:
        run = choose_run_directory(run_dir, job)
        try:
            make_folder(run.path, exist_ok=False, mode=0o700)  # before another user can put something there
            hold_run(run)
            warn_of_replaceable(run.path)
            return run, True
        except FileExistsError:
            check_place(run.path)
            if run_dir:
                hold_run(run)
                return run, False
        except OSError as error:
            raise UsageError(f"could not create {run}: {error.strerror}. Choose a different --run-dir") from error


def check_not_held(run: RunDirectory, me: Claim | None = None) -> None:
    """Refuses a run that a job or process other than ``me`` trains. A run has one job at a time."""
    if holder := slurm.patiently(partial(held_by_other, run, me)):
        if not holder.reachable:
            remedy = (
                "If that job or process has ended, continue the run with --take-over. If it is still training, "
                "--take-over makes it exit"
            )
        elif holder.job is not None and holder.job.state == "PENDING":  # `stop` needs a running job
            remedy = (
                f"Follow it with `clusterddp wait --resubmit {run.quoted}`, or end the job with "
                f"`scancel {holder.job.job_id}` and submit the run again"
            )
        else:
            remedy = (
                f"Follow it with `clusterddp wait --resubmit {run.quoted}`, or save and stop it with "
                f"`clusterddp stop {run.quoted}` and submit it again"
            )
        raise RunDirectoryError(f"{run} is {holder}. {remedy}")


def check_not_submitted(run: RunDirectory) -> None:
    """Refuses a run that another process submits at this moment."""
    if other := being_submitted(run):
        raise _busy(run, other)


def _busy(run: RunDirectory, other: str) -> RunDirectoryError:
    return RunDirectoryError(f"{other}. See the run's state with: clusterddp status {run.quoted}")


@contextmanager
def exclusively(run: RunDirectory, created: bool) -> Iterator[None]:
    """Keeps other processes from submitting the run or starting its loop. Raises RunDirectoryError if one is doing so,
    or if a job or process trains the run. ``created``: as for ``recorded``. A new
    directory without a record, as after Ctrl-C or on a full disk, is removed."""
    check_owner(run.path, closed=True)
    with ExitStack() as claims:
        with _removed_without_job(run, created):
            other = claims.enter_context(submitting(run))
        if other:
            raise _busy(run, other)
        check_not_held(run)
        if run.outcome() is None and loop_here(run):
            raise RunDirectoryError(f"{run} is held by a local run on this machine. Stop it with Ctrl-C first")
        with _removed_without_job(run, created):
            yield


@contextmanager
def _removed_without_job(run: RunDirectory, created: bool) -> Iterator[None]:
    """Removes a new run directory, in which no job is recorded, if the body raises."""
    try:
        yield
    except BaseException:
        if created and not exists(run.job_file):
            with suppress(OSError):
                _remove(run)
        raise


@contextmanager
def recorded(run: RunDirectory, job: Job, created: bool, content: Content = ONLY_JOB) -> Iterator[None]:
    """Records the job in the run directory, and restores the directory if Slurm refuses the job in the body.

    ``created``: whether this process created the directory, and may remove it. The outcome of a run that continues
    (failed, or completed and extended) is removed. After any other error in the body, the records stay, because the job
    may exist.
    """
    files = (
        secrets_file(run.job_file),
        run.job_file,
        run.batch_script,
        run.outcome_file,
        run.code_file,
        run.environment_file,
    )
    before = {path: read_bytes(path) for path in files if exists(path)}
    if not created:
        _check_not_completed(run, job)
    shown, secrets = without_secrets(job)
    try:
        run.create(share=job.share)
        check_run(run)  # of existing content, in a folder that others could write
        _write(run, content)
        if job.python_of_ranks is not None:
            write_package(run)
        write_json(secrets_file(run.job_file), secrets)
        write_atomically(run.job_file, shown.to_yaml())
        if run.outcome_file in before:  # one that a shared disk hides here is for the next attempt to judge
            remove(run.outcome_file)
    except BaseException:
        with suppress(OSError):  # such as the full disk that the error is about
            _undo(run, created, before, files)
        raise
    try:
        yield
    except SlurmError as error:
        if isinstance(error, SlurmUnavailable) and not isinstance(error, SlurmMissing):
            unknown = SlurmUnavailable(
                f"Slurm may or may not have accepted the job of {run}: {error}. Look for it with `squeue --me`. If it "
                f"is not there, submit it again with: clusterddp submit --run-dir {run.quoted}"
            )
            unknown.exit_code = error.exit_code
            raise unknown from error
        _undo(run, created, before, files)
        raise


def _check_not_completed(run: RunDirectory, job: Job) -> None:
    """Refuses a run that has completed since the command planned to continue it, so that its outcome stays."""
    if has_completed(run) and not list_differences(load_resolved(run.job_file), job):
        raise RunDirectoryError(f"{run} has completed since this command began, so it was not submitted again")


def has_completed(run: RunDirectory) -> bool:
    """Whether the run has completed, and the completion was confirmed."""
    outcome = run.outcome()
    return outcome is not None and outcome.completed and not outcome.unconfirmed


def _write(run: RunDirectory, content: Content) -> None:
    if content.function is not None:
        from clusterddp.worker.function import function_file, save_function

        save_function(function_file(run), content.function)
    if content.fork:
        show(copy_checkpoint(content.fork, run))
    if content.debug_rank is not None:
        write_json(run.debug_file, {"rank": content.debug_rank}, mode=0o600)
    if content.hydra_output is not None:  # the folder has the same name as that of any run
        with suppress(FileExistsError):
            symlink(run.hydra, os.path.relpath(content.hydra_output, run.path))
    if content.environment is not None:
        write_json(run.environment_file, asdict(content.environment), mode=0o600)
    write_code(run, content.code)


def write_code(run: RunDirectory, code: Code | None) -> None:
    """Makes the run use the code, if there is any to write, and prints what has changed."""
    if code is not None and (text := code_snapshot.use(run, code)):
        show(text)


def _undo(run: RunDirectory, created: bool, before: Mapping[Path, bytes], files: Iterable[Path]) -> None:
    """Restores the files of a run directory, or removes a new directory, in which no run has started."""
    if created:
        _remove(run)
        return
    for path in files:
        held = read_bytes(path) if exists(path) else None
        if path not in before:
            unlink(path)
        elif held != before[path]:
            write_atomically(path, before[path])


def _remove(run: RunDirectory) -> None:
    """Removes a directory that this process has created. If another user has renamed it, it stays, without content."""
    for name in names_in(run.path):
        delete_entry(run.path / name)
    run.path.rmdir()
