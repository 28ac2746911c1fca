"""The supervisor: ``python -m clusterddp.supervisor RUN_DIRECTORY``, one process per attempt, no torch.

In a Slurm job it is the batch step: it starts the ranks with srun, hears their events, and when they are gone asks why,
requeues or writes the outcome, and ends at once, because a batch step that lingers keeps the nodes. Under ``--local`` a
loop starts the same program once per attempt. What differs are two objects: the launcher (start, wait) and the
controller (why, again).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from clusterddp.checkpoint.store import check_present, of_run
from clusterddp.entry import exit_with
from clusterddp.environment import in_batch_step
from clusterddp.errors import RunDirectoryError
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.secrets import check_revealed
from clusterddp.process import die_with_parent
from clusterddp.reporter import ignore_print_errors, say
from clusterddp.rundir.files import follow_folder, remove
from clusterddp.rundir.ownership import check_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.commands import scrub_own
from clusterddp.supervisor import lease
from clusterddp.supervisor.attempt import Attempt
from clusterddp.supervisor.controller import (
    AllocationController,
    Controller,
    LocalController,
    SlurmController,
    notice_file,
)
from clusterddp.supervisor.history import History
from clusterddp.supervisor.launcher import Launcher, LocalLauncher, SlurmLauncher
from clusterddp.supervisor.limits import exceeded
from clusterddp.supervisor.messages import at_step
from clusterddp.supervisor.recovery import RESTART
from clusterddp.supervisor.verdict import Action


def supervise_slurm(run_directory: str) -> int:
    """Runs one attempt in the batch step of a Slurm job, or in salloc's shell; returns the exit code."""
    prepare_process()
    run = RunDirectory(run_directory)
    _open_own_log(run)
    job = as_started(load_trusted(run), os.environ)
    if in_batch_step(os.environ):
        return supervise(run, job, lambda: SlurmLauncher(job), SlurmController(os.environ, run, job))
    notice_file(run).unlink(missing_ok=True)  # of an attempt before
    return supervise(run, job, lambda: SlurmLauncher(job), AllocationController(os.environ, run, job))


def _open_own_log(run: RunDirectory) -> None:
    """The job's log was made by Slurm, by the umask of who submitted."""
    with suppress(OSError):
        if Path("/proc/self/fd/1").readlink().parent == run.logs.resolve():
            follow_folder(1, run.logs)


def load_trusted(run: RunDirectory) -> Job:
    """The job to run, if nobody else can have written it, with its secrets. Raises RunDirectoryError."""
    check_run(run)
    job = load_resolved(run.job_file)
    check_revealed(job, run.job_file)
    return job


def as_started(job: Job, environ: Mapping[str, str]) -> Job:
    """The job with the number of nodes that Slurm gave it, where its definition leaves Slurm the choice.

    It goes on in a new job then: a requeued one waits for as many nodes as it had before (seen on 22.05.8).
    """
    if job.min_nodes is None:
        return job
    nodes = int(environ["SLURM_JOB_NUM_NODES"])
    return dataclasses.replace(job, nodes=nodes, policy=job.policy or "resubmit")


def supervise_local(run_directory: str, debug_rank: int | None) -> int:
    """Runs one attempt as processes of this machine; returns the exit code."""
    die_with_parent()
    prepare_process()
    run = RunDirectory(run_directory)
    job = load_trusted(run)
    if debug_rank is not None:
        signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the debugged rank's
        job = dataclasses.replace(job, watchdog=None)  # and whoever looks at it may take all day
    scrub_own()
    return supervise(run, job, lambda: LocalLauncher(job, debug_rank, notice_file(run).exists), LocalController(run))


def prepare_process() -> None:
    """TERM is ignored, here and by srun, which inherits it: the ranks need the supervisor while they save.

    USR2 and CONT, which a time-limit warning and a preemption may bring, do nothing here; being handled rather than
    ignored, they keep their meaning for srun. Every rank holds a connection, and a default of 1024 files is soon used.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for signum in (signal.SIGUSR2, signal.SIGCONT):
        signal.signal(signum, lambda *_: None)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # ends srun's step; what a shell has put in the background ignores it
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ignore_print_errors()  # the log is in the run directory, whose disk may be full


def supervise(run: RunDirectory, job: Job, launcher: Callable[[], Launcher], controller: Controller) -> int:
    """Supervises one attempt after another, as long as the ranks can be started anew here."""
    while (code := supervise_one(run, job, launcher(), controller)) == RESTART:
        pass
    return code


def supervise_one(run: RunDirectory, job: Job, launcher: Launcher, controller: Controller) -> int:
    """Claims the next attempt of a run that may go on, and supervises it."""
    code = finished(run, controller)
    if code is not None:
        return code
    held = lease.held_by_other(run, controller.holder())
    if held:
        raise RunDirectoryError(f"{run} is {held}; two jobs must not train one run")
    check_present(of_run(run))
    reason = exceeded(job, run.events(), time.time())
    number = run.create_attempt()
    if (run.outcome() or {}).get("state") == Action.FAIL.value:
        remove(run.outcome_file)  # whoever starts the run again has seen it
    elif reason is not None:
        History(run, number).conclude(Action.FAIL.value, reason)
        return 1
    me = controller.holder()
    submission = lease.take(run, number, me)
    if run.cancelled:  # since it was looked at: whoever cancelled may have seen no holder to end
        say(f"{run} was cancelled; it will not run again")
        code = 1
    else:
        code = Attempt(run, job, number, launcher, controller, submission).supervise()
    if me["kind"] == "local" and code != RESTART:
        with suppress(OSError):  # the next start finds no such process, at least on this machine
            lease.let_go(run, number)
    return code


def finished(run: RunDirectory, controller: Controller) -> int | None:
    """The exit code for a start that finds the run over; None when it may go on, as a failure may by someone's wish.

    Slurm 24.11 starts a job once more that had been requeued within a grace, however it ended then: nobody wished that.
    """
    outcome = run.outcome() or {}
    if outcome.get("state") == Action.COMPLETE.value:
        say(f"{run} has already completed{at_step(outcome['step'])}; nothing to do")
        return 0
    newest = run.newest_attempt()
    same_job = newest is not None and lease.held_before(run, newest, controller.holder())
    same_job = same_job and controller.starts_again  # else it was someone at a terminal
    if outcome.get("state") == Action.FAIL.value and same_job:
        say(f"{run} has already failed{at_step(outcome['step'])} in this job; a requeue does not restart it")
        return 1
    if run.cancelled or outcome.get("state") == Action.CANCEL.value:
        say(f"{run} was cancelled; it will not run again")
        return 1
    return None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m clusterddp.supervisor")
    parser.add_argument("run_directory")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--debug", type=int, default=None)
    arguments = parser.parse_args()

    def supervised() -> int:
        if arguments.local:
            return supervise_local(arguments.run_directory, arguments.debug)
        return supervise_slurm(arguments.run_directory)

    exit_with(supervised, RunDirectory(arguments.run_directory).private)
