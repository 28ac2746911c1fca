"""The supervisor: ``python -m clusterddp.supervisor RUN_DIRECTORY``, one process per attempt, no torch.

In a Slurm job it is the batch step: it starts the ranks with srun and handles their events. When they have exited it
asks Slurm why, requeues or writes the outcome, and exits at once, because a lingering batch step keeps the nodes. Under
``--local`` a loop starts the same program once per attempt, with another launcher and controller.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from clusterddp.checkpoint.store import of_run
from clusterddp.entry import exit_with
from clusterddp.environment import in_batch_step
from clusterddp.errors import RunDirectoryError
from clusterddp.failures.placement import Placement, as_placed, place
from clusterddp.history.ends import Completed, Failed, RunEnd, marked
from clusterddp.history.outcome import Outcome
from clusterddp.history.words import at_step
from clusterddp.jobdef import code_snapshot
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.secrets import check_revealed
from clusterddp.process import die_with_parent
from clusterddp.protocol import DEBUG_RANK
from clusterddp.reporter import ignore_print_errors, say
from clusterddp.rundir.claims import JobClaim, ProcessClaim
from clusterddp.rundir.deletion import delete_old_logs
from clusterddp.rundir.files import HIDDEN_S, exists, follow_folder, remove, unlink
from clusterddp.rundir.ownership import check_run, hold_run
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.commands import scrub_job_variables
from clusterddp.supervisor import completion_marker, lease
from clusterddp.supervisor.attempt import Attempt, last_line, nodes_of
from clusterddp.supervisor.controller import AllocationController, Controller, LocalController, SlurmController
from clusterddp.supervisor.history import History
from clusterddp.supervisor.hook import Hook
from clusterddp.supervisor.launcher import Launcher, LocalLauncher, SlurmLauncher, with_python
from clusterddp.supervisor.node_setup import NodeSetup
from clusterddp.supervisor.recovery import FIRST_PAUSE_S, RESTART
from clusterddp.supervisor.retry_limits import exceeded, stop_request
from clusterddp.worker.code_paths import mapped

#: What continues a run that a requeue does not.
BUT_SUBMIT = "but `clusterddp submit --run-dir` does"


def supervise_slurm(run_directory: str, output_above: bool = False) -> int:
    """Runs one attempt in the batch step of a Slurm job, or in salloc's shell. Returns the exit code.

    ``output_above``: see ``Controller``.
    """
    prepare_process()
    slurm.use_own_cluster()
    run = RunDirectory(run_directory)
    hold_run(run)
    _open_own_log(run)
    job = with_python(as_started(with_snapshot(run, load_trusted(run)), os.environ), os.environ)
    job = as_debugged(job, (read_json(run.debug_file) or {}).get("rank"))
    nodes = NodeSetup(run, job, os.environ)
    launcher = lambda job, placement: SlurmLauncher(job, placement, nodes)  # noqa: E731
    if in_batch_step(os.environ):
        return supervise(run, job, launcher, SlurmController(os.environ, run, job))
    unlink(run.notice_file)  # of a previous attempt
    allocation = AllocationController(os.environ, run, job)
    allocation.output_above = output_above
    return supervise(run, without_spares(job), launcher, allocation)


def _open_own_log(run: RunDirectory) -> None:
    """Gives the job's log, which Slurm created, its folder's mode."""
    with suppress(OSError):
        if Path("/proc/self/fd/1").readlink().parent == run.logs.resolve():
            follow_folder(1, run.logs)


def load_trusted(run: RunDirectory) -> Job:
    """The job definition, with its secrets. RunDirectoryError if another user can have written it."""
    check_run(run)
    job = load_resolved(run.job_file)
    check_revealed(job, run.job_file)
    return job


def with_snapshot(run: RunDirectory, job: Job) -> Job:
    """The job with its script in the snapshot of the code that the run was submitted with, if there is one."""
    snapshot = code_snapshot.present(run)
    if snapshot is None or job.script is None:
        return job
    script = Path(job.script)
    folder = mapped(str(script.parent), snapshot.checkout, str(snapshot.folder(run)))
    return dataclasses.replace(job, script=str(Path(folder, script.name)))


def as_started(job: Job, environ: Mapping[str, str]) -> Job:
    """The job with the number of nodes that Slurm allocated, if its definition gives a range.

    It then continues in a new job, because a requeued job waits for as many nodes as it had before (seen on 22.05.8).
    """
    if job.min_nodes is None:
        return job
    nodes = min(job.nodes, int(environ["SLURM_JOB_NUM_NODES"]))  # the others are spare
    return dataclasses.replace(job, nodes=nodes, policy=job.policy or "resubmit")


def without_spares(job: Job) -> Job:
    """The job where all nodes are given: on this machine, and in a user's own allocation."""
    return dataclasses.replace(job, spare_nodes=0)


def as_debugged(job: Job, rank: int | None) -> Job:
    """The job with a rank in a debugger, for which the others wait without a hang. Sets the ranks' environment, too."""
    if rank is None:
        return job
    os.environ[DEBUG_RANK] = str(rank)
    return job.debugged()


def supervise_local(run_directory: str, debug_rank: int | None, output_above: bool = False) -> int:
    """Runs one attempt as processes of this machine. Returns the exit code."""
    die_with_parent()
    prepare_process()
    run = RunDirectory(run_directory)
    hold_run(run)
    job = with_python(with_snapshot(run, load_trusted(run)), os.environ)
    job = dataclasses.replace(job, srun={})  # without srun, there is no image either
    if debug_rank is not None:
        signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the debugged rank
    scrub_job_variables()
    job = as_debugged(job, debug_rank)
    launcher = lambda job, _: LocalLauncher(job, debug_rank, partial(exists, run.notice_file))  # noqa: E731
    controller = LocalController(run)
    controller.output_above = output_above
    return supervise(run, without_spares(job), launcher, controller)


def prepare_process() -> None:
    """Sets this process's signals and limits. TERM is ignored, also by srun: ranks need the supervisor while they save.

    USR2 and CONT, from a time-limit warning and a preemption, have no effect. They are handled rather than ignored, so
    that srun does not inherit that. Every rank has a connection: the default limit of 1024 open files may be too low.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for signum in (signal.SIGUSR2, signal.SIGCONT):
        signal.signal(signum, lambda *_: None)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # terminates srun's step; ignored in a shell's background jobs
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ignore_print_errors()  # the log is in the run directory, whose disk may be full


def supervise(
    run: RunDirectory, job: Job, launcher: Callable[[Job, Placement], Launcher], controller: Controller
) -> int:
    """Supervises one attempt after another, while the ranks are restarted in place.

    ``launcher`` makes that of an attempt, which may have other nodes than the one before, and fewer.
    """
    code = RESTART
    try:
        while code == RESTART:
            code = supervise_one(run, job, launcher, controller)
    finally:
        if code:
            controller.before_exit()
    return code


def supervise_one(
    run: RunDirectory, job: Job, launcher: Callable[[Job, Placement], Launcher], controller: Controller
) -> int:
    """Claims the next attempt of a run that is not over, and supervises it."""
    if (code := finished(run, controller, run.outcome())) is not None:
        return code
    me = controller.holder()
    # If this job ended because the controller is busy, the run would stop. So it asks until the controller answers.
    if other := slurm.patiently(partial(lease.held_by_other, run, me), math.inf, FIRST_PAUSE_S):
        raise RunDirectoryError(f"{run} is {other}. Two jobs must not train the same run")
    # Another job may have completed it, which ended while the controller was asked.
    if (code := finished(run, controller, run.outcome())) is not None:
        return code
    of_run(run).check_present(within_s=HIDDEN_S)
    history = run.history()
    reason = exceeded(job, history, time.time())
    is_done, found = completion_marker.look(run, job, history)
    if isinstance(me, JobClaim) and lease.restarted(run, me):
        say(f"Slurm has restarted job {me.job} since it started this process, so this process exits")
        return 1
    number = run.create_attempt()
    outcome = run.outcome()  # read once: a node may freeze between any two looks, and another job complete the run
    if (code := finished(run, controller, outcome, number)) is not None:
        return code
    if again := outcome is not None:
        remove(run.outcome_file)  # the user who restarts the run has seen it
    if is_done:
        return conclude(run, job, number, Completed, marked(found))
    if reason is not None and not again:
        return conclude(run, job, number, Failed, reason)
    submission = lease.take(run, number, me)
    if run.cancelled:  # after the check above: `clusterddp cancel` may have found no holder
        say(f"{run} was cancelled and will not run again")
        code = 1
    else:
        # In a thread, because thousands of ranks have thousands of files, and they need not wait for that.
        threading.Thread(target=delete_old_logs, args=(run, job.keep_logs), daemon=True).start()
        placement = place(job, nodes_of(controller), run.history(), controller.describe(), time.time())
        job = as_placed(job, placement)
        ranks = launcher(job, placement)
        code = Attempt(run, job, number, ranks, controller, submission, placement).supervise()
    if isinstance(me, ProcessClaim) and code != RESTART:
        with suppress(OSError):  # the next start on this machine sees that the process has ended
            lease.let_go(run, number)
    return code


def conclude(run: RunDirectory, job: Job, number: int, end: type[RunEnd], reason: str) -> int:
    """Ends the run with an attempt that starts no ranks. Returns the exit code."""
    history, hook = History(run, number), Hook(run, job, number)
    history.listener = hook.notify
    # The supervisor whose ranks finished may have died with its node before it recorded their last steps.
    line = last_line(run) if end is Completed else {}
    history.conclude(end, reason, step=line["step"] + 1 if line else None)
    hook.finish()
    return 0 if end is Completed else 1


def finished(
    run: RunDirectory, controller: Controller, outcome: Outcome | None, claimed: int | None = None
) -> int | None:
    """The exit code if the run is over. None if it may continue, as one that failed, or whose completion is not
    confirmed, may on a user's request. ``outcome``: the run's, as it was read. ``claimed``: the attempt that this
    process has claimed. The one before it is the run's last.

    Slurm 24.11 restarts a job that had been requeued within a grace period, however it ended. That is no request.
    """
    newest = run.newest_attempt() if claimed is None else claimed - 1
    same_job = newest is not None and lease.held_before(run, newest, controller.holder())
    by_slurm = same_job and controller.starts_again
    if outcome is not None and outcome.completed and (by_slurm or not outcome.unconfirmed):
        say(f"{run} has already completed{at_step(outcome.step)}")
        return 0
    if outcome is not None and outcome.failed and by_slurm:  # else a user restarted it
        say(f"{run} failed{at_step(outcome.step)} in this job. A requeue does not restart it, {BUT_SUBMIT}")
        return 1
    if run.cancelled or (outcome is not None and outcome.cancelled):
        say(f"{run} was cancelled and will not run again")
        return 1
    if outcome is None and (stop := stop_request(run.history())) is not None:
        if by_slurm and stop.attempt == newest:
            say(f"{run} was stopped by `clusterddp stop`. A requeue does not continue it, {BUT_SUBMIT}")
            return controller.leave_code
        if not lease.submitted_as(run, controller.holder()):  # but by a supervisor that was killed, or by hand
            submitted_at = slurm.patiently(controller.submitted_at, math.inf, FIRST_PAUSE_S)
            if submitted_at is not None and submitted_at < stop.time:
                say(f"{run} was stopped by `clusterddp stop`. An older job does not continue it, {BUT_SUBMIT}")
                return controller.leave_code
    return None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m clusterddp.supervisor")
    parser.add_argument("run_directory")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--debug", type=int, default=None)
    parser.add_argument("--output-above", action="store_true")
    arguments = parser.parse_args()
    path, above = arguments.run_directory, arguments.output_above
    local, own = partial(supervise_local, path, arguments.debug, above), partial(supervise_slurm, path, above)
    work = local if arguments.local else own
    exit_with(work, RunDirectory(path).private)
