"""A sweep without Slurm: its members one after another on this machine."""

from __future__ import annotations

from contextlib import suppress

from clusterddp.cli.local import LocalRun
from clusterddp.cli.progress import Progress
from clusterddp.cli.submission import record_local
from clusterddp.cli.sweeps.plan import Plan, Sweep, listed
from clusterddp.errors import FAILED, INTERRUPTED, UNCONFIRMED
from clusterddp.reporter import show
from clusterddp.rundir.records import is_unconfirmed
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor import lease


def run_all(sweep: Sweep, plan: Plan) -> int:
    """Runs the members that the plan names; returns the exit code. The one that Ctrl-C stops is continued first."""
    failed, unconfirmed = [], []
    order = sorted(plan.submit, key=lambda name: plan.states[name] != "stopped")
    for number, name in enumerate(order, start=1):
        show(f"member {number} of {len(order)}: {name}")
        code = _run(sweep, name)
        if code == INTERRUPTED or code < 0:
            show("stopped; the same command continues")
            return INTERRUPTED
        outcome = sweep.folder.member(name).outcome()
        if outcome is not None and is_unconfirmed(outcome):  # not by the code, which may be the script's
            unconfirmed.append(name)
        elif code:
            failed.append(name)
    if unconfirmed:
        show(f"completed, but not confirmed: {listed(unconfirmed)}; `clusterddp status` says why")
    if failed:
        show(f"failed: {listed(failed)}; {sweep.retry_option.format('failed')} runs them again")
    failed_before = set(plan.in_state("failed")) - set(plan.submit)
    return FAILED if failed or failed_before else UNCONFIRMED if unconfirmed else 0


def _run(sweep: Sweep, name: str) -> int:
    """Runs one member to its end."""
    job, folder = sweep.jobs[name], sweep.folder
    run = record_local(job, str(folder.member(name)), sweep.plants.get(name))
    run.unmark_cancelled()
    try:
        with Progress(run, job.steps, every_s=job.progress) as progress:
            return LocalRun(run, job).loop(progress)
    finally:
        _loop_ended(run)


def _loop_ended(run: RunDirectory) -> None:
    with suppress(OSError):  # the disk is full: the entry names a process that no longer runs
        lease.loop_ended(run)
