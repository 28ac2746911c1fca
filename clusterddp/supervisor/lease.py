"""The lease of a run: at most one live job or process trains it, or waits to.

Two files name the holder: the submission that has not started an attempt yet, or none that is visible here
(``private/submitted.json``), and the newest attempt's supervisor (``private/attempt-N/holder.json``). A claim is void
if its holder has ended or released the run. It names the run that it was written for, so that it is void in a copy of
the run directory, too.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp.errors import RunDirectoryError
from clusterddp.process import process_namespace, process_start
from clusterddp.rundir.claims import (
    Claim,
    JobClaim,
    ProcessClaim,
    change_claim,
    create_claim,
    on_this_machine,
    process_alive,
    read_claim,
    same_holder,
    waiting_claim,
    write_claim,
)
from clusterddp.rundir.files import names_in, status, unlink
from clusterddp.rundir.ownership import owner_of
from clusterddp.rundir.run_directory import RunDirectory, make_private
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.commands import JobInfo

#: How long, in seconds, a process that submits a run counts as alive if it cannot be seen from here.
SUBMISSION_S = 600.0


@dataclass(frozen=True)
class Holder:
    """Who holds a run. As text: ``held by job 41 (RUNNING on n1,n2)``.

    ``job``: Slurm's record of the job. None for a process, and for a job that is unreachable from here. ``reachable``:
    whether the job or process is reachable from here, and so known to be alive.
    """

    claim: Claim
    job: JobInfo | None
    reachable: bool

    def __str__(self) -> str:
        claim, job = self.claim, self.job
        if isinstance(claim, ProcessClaim):
            where = "this machine" if self.reachable else f"{claim.host}, which cannot be reached from here"
            return f"held by process {claim.pid} on {where}"
        if job is None:
            return f"held by job {claim.job} of cluster {claim.cluster}, which cannot be reached from here"
        return f"held by job {claim.job} ({job.state}{f' on {job.nodes}' if job.nodes else ''})"


def of_job(job_id: str) -> JobClaim:
    """The claim of a Slurm job, with its cluster: job ids are unique only within one."""
    return JobClaim(job_id, slurm.cluster_name(os.environ))


def of_this_process() -> ProcessClaim:
    """The claim of a local supervisor, or of the loop of a local run."""
    pid = os.getpid()
    return ProcessClaim(socket.gethostname(), pid, process_namespace(), process_start(pid))


def submitted(run: RunDirectory, job_id: str) -> None:
    """Records that a submitted job holds the run until it starts an attempt."""
    write_claim(run.submitted_file, run, replace(of_job(job_id), time=time.time()))


def loop_started(run: RunDirectory) -> None:
    """Records that this process is the loop of a local run, which also holds the run between two attempts."""
    write_claim(run.loop_file, run, of_this_process())


def loop_ended(run: RunDirectory) -> None:
    """Records that the loop has ended."""
    write_claim(run.loop_file, run, replace(of_this_process(), let_go=True))


def local_loop_alive(run: RunDirectory) -> bool:
    """Whether the loop of a local run is alive, or may be on a machine that is unreachable from here."""
    loop = read_claim(run.loop_file, run)
    return isinstance(loop, ProcessClaim) and not loop.let_go and _process_holder(loop) is not None


def loop_here(run: RunDirectory) -> bool:
    """Whether another process of this machine is the loop of a local run."""
    loop = read_claim(run.loop_file, run)
    if not isinstance(loop, ProcessClaim) or loop.let_go or same_holder(loop, of_this_process()):
        return False
    return on_this_machine(loop) and process_alive(loop)


@contextmanager
def submitting(run: RunDirectory) -> Iterator[str | None]:
    """Lets one process at a time submit a job of the run, or start its loop. Yields who else does, in words, or None.

    The claims are numbered. Each is created exclusively, after those of processes that died, and counts if it is the
    newest.
    """
    make_private(run.private)
    mine = None
    while mine is None:
        claims = _submissions(run)
        if other := being_submitted(run, claims):
            yield other
            return
        number = max(claims, default=-1) + 1
        path = run.private / f"submitting-{number}.json"
        if not create_claim(path, run, of_this_process()):
            continue
        claims = _submissions(run)  # others may have come and gone since, and taken this number
        earlier = {other: claims[other] for other in claims if other != number}
        if max(claims, default=-1) == number and being_submitted(run, earlier) is None:
            mine = path
        elif number in claims:  # else another process has removed it
            unlink(path)
    try:
        for path in earlier.values():
            unlink(path)
        yield None
    finally:
        unlink(mine)


def being_submitted(run: RunDirectory, claims: Mapping[int, Path] | None = None) -> str | None:
    """Which process submits the run now, as a sentence. None if none does. ``claims``: if they are known already."""
    paths = (_submissions(run) if claims is None else claims).values()
    other = next(filter(None, (_submitted_by(run, path) for path in paths)), None)
    return f"{run} is being submitted by {other}" if other else None


def _submissions(run: RunDirectory) -> dict[int, Path]:
    try:
        names = [re.fullmatch(r"submitting-(\d+)\.json", name) for name in names_in(run.private)]
    except (FileNotFoundError, PermissionError):  # no run, or another user's
        return {}
    return {int(match[1]): run.private / match[0] for match in names if match}


def _submitted_by(run: RunDirectory, path: Path) -> str | None:
    """The process that claims to submit the run. None if it has ended."""
    try:
        recent = time.time() - status(path).st_mtime < SUBMISSION_S
        claim = read_claim(path, run)
    except FileNotFoundError:
        return None
    except RunDirectoryError:  # created, but not written yet
        return "another process" if recent else None
    if not isinstance(claim, ProcessClaim):
        return None
    alive = process_alive(claim) if reachable(claim) else recent
    return f"process {claim.pid} on {claim.host}" if alive else None


def take(run: RunDirectory, attempt: int, me: Claim) -> JobClaim | None:
    """An attempt's supervisor takes the lease. Returns the claim of the submission that led to it.

    The claim stays, with the attempt's number. It counts where the attempt is not visible yet.
    """
    write_claim(run.holder_file(attempt), run, me)
    pending = read_claim(run.submitted_file, run)
    if not isinstance(pending, JobClaim) or not same_holder(pending, me):
        return None
    if pending.attempt is not None:  # this job has started an attempt before
        change_claim(run.submitted_file, run, let_go=False)
        return None
    change_claim(run.submitted_file, run, let_go=False, attempt=attempt)
    return pending


def let_go(run: RunDirectory, attempt: int) -> None:
    """Releases an attempt's lease: its ranks have exited or are unreachable, even if Slurm still shows the job."""
    mine = read_claim(run.holder_file(attempt), run)
    if mine is None:
        return
    change_claim(run.holder_file(attempt), run, let_go=True)
    pending = read_claim(run.submitted_file, run)
    if pending is not None and same_holder(pending, mine):  # also if `submit` wrote it only after the job had started
        change_claim(run.submitted_file, run, let_go=True)


def let_go_unreachable(run: RunDirectory) -> None:
    """Releases the leases of holders that are unreachable from here, after the user confirmed that they have ended.

    One that is still running exits when it sees the next attempt.
    """
    for file in (run.submitted_file, *map(run.holder_file, run.attempts())):
        claim = read_claim(file, run)
        if claim is not None and not reachable(claim):
            change_claim(file, run, let_go=True)


def held_before(run: RunDirectory, attempt: int, me: Claim) -> bool:
    """Whether the job or process with this claim held an attempt until its end."""
    claim = read_claim(run.holder_file(attempt), run)
    return claim is not None and not claim.let_go and same_holder(claim, me)


def submitted_as(run: RunDirectory, me: Claim) -> bool:
    """Whether this job is the run's newest submission on record, and has started no attempt."""
    claim = read_claim(run.submitted_file, run)
    return claim is not None and same_holder(claim, me) and claim.attempt is None


def restarted(run: RunDirectory, me: JobClaim) -> bool:
    """Whether Slurm has restarted the job of ``me`` since, and the restart has begun an attempt.

    A node that does not respond loses its job, and continues this process when it comes back.
    """
    claims = (read_claim(run.holder_file(number), run) for number in reversed(run.attempts()))
    newest = next(filter(None, claims), None)
    if not isinstance(newest, JobClaim) or not same_holder(newest, me):
        return False
    return (newest.restarts or 0) > (me.restarts or 0)


def submitted_again(run: RunDirectory, attempt: int, me: Claim, since: float) -> str | None:
    """The job that ``wait --resubmit`` or a user submitted ``since`` this attempt's supervisor ``me`` began, and that
    has started no attempt as far as can be seen, or None. They do so only if the supervisor's own job has ended."""
    claim = waiting_claim(run, [attempt])
    if not isinstance(claim, JobClaim) or same_holder(claim, me):
        return None
    return claim.job if claim.time is not None and claim.time > since else None


def started(run: RunDirectory, job_id: str) -> bool:
    """Whether the job has started an attempt."""
    claims = (read_claim(run.holder_file(number), run) for number in reversed(run.attempts()))
    return any(isinstance(claim, JobClaim) and claim.job == job_id for claim in claims)


def holders(run: RunDirectory) -> list[Claim]:
    """Who may hold the run, the newest claim first. RunDirectoryError for another user's run."""
    try:
        # An attempt that is just being claimed has no claim yet: then the previous one counts.
        taken = ((number, read_claim(run.holder_file(number), run)) for number in reversed(run.attempts()))
        number, newest = next(((number, claim) for number, claim in taken if claim), (-1, None))
        pending = waiting_claim(run, [number])
    except PermissionError as error:
        raise RunDirectoryError(f"{run} belongs to {owner_of(run.path)}, and only its owner can control it") from error
    return [claim for claim in (pending, newest) if claim is not None and not claim.let_go]


def held_by_other(run: RunDirectory, me: Claim | None = None) -> Holder | None:
    """Who else holds the run. None if it is free.

    ``me``: this job's or process's own claim, which a requeued job finds.
    """
    for claim in holders(run):
        if me is not None and same_holder(claim, me):
            continue
        holder = _job_holder(claim) if isinstance(claim, JobClaim) else _process_holder(claim)
        if holder is not None:
            return holder
    return None


def reachable(claim: Claim) -> bool:
    """Whether a holder's state can be queried from here: it is on this machine, or on this cluster."""
    if isinstance(claim, JobClaim):
        return claim.may_be_of(slurm.cluster_name(os.environ))
    return on_this_machine(claim)


def _job_holder(claim: JobClaim) -> Holder | None:
    """The job of a claim, unless it has ended."""
    if not reachable(claim):
        return Holder(claim, None, reachable=False)
    job = slurm.show_job(claim.job)
    return Holder(claim, job, reachable=True) if job is not None and job.live else None


def _process_holder(claim: ProcessClaim) -> Holder | None:
    """The process of a claim, unless it has ended."""
    if not reachable(claim):
        return Holder(claim, None, reachable=False)
    return Holder(claim, None, reachable=True) if process_alive(claim) else None
