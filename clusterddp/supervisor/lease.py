"""The lease of a run: at most one live job or process trains it, or waits to.

Two files name the holder: the submission that has not started an attempt yet, or none that is visible here
(``private/submitted.json``), and the newest attempt's supervisor (``private/attempt-N/holder.json``). An entry is void
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
from pathlib import Path
from typing import Any

from clusterddp.errors import RunDirectoryError
from clusterddp.process import process_namespace, process_start
from clusterddp.rundir.claims import (
    create_claim,
    on_this_machine,
    process_alive,
    read_claim,
    waiting_claim,
    write_claim,
)
from clusterddp.rundir.files import names_in, status, unlink, write_json
from clusterddp.rundir.ownership import owner_of
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory, make_private
from clusterddp.slurm import commands as slurm

#: How long, in seconds, a process that submits a run counts as alive if it cannot be seen from here.
SUBMISSION_S = 600.0


def of_job(job_id: str) -> dict[str, Any]:
    """The entry of a Slurm job, with its cluster: job ids are unique only within one."""
    cluster = slurm.cluster_name(os.environ)
    return {"kind": "slurm", "job": job_id, **({"cluster": cluster} if cluster else {})}


def of_this_process() -> dict[str, Any]:
    """The entry of a local supervisor, or of the loop of a local run."""
    pid = os.getpid()
    return {
        "kind": "local",
        "host": socket.gethostname(),
        "machine": process_namespace(),
        "pid": pid,
        "process_start": process_start(pid),
    }


def submitted(run: RunDirectory, job_id: str) -> None:
    """Records that a submitted job holds the run until it starts an attempt."""
    write_claim(run.submitted_file, run, {**of_job(job_id), "time": time.time()})


def loop_started(run: RunDirectory) -> None:
    """Records that this process is the loop of a local run, which also holds the run between two attempts."""
    write_claim(run.loop_file, run, of_this_process())


def loop_ended(run: RunDirectory) -> None:
    """Records that the loop has ended."""
    write_claim(run.loop_file, run, {**of_this_process(), "let_go": True})


def local_loop_alive(run: RunDirectory) -> bool:
    """Whether the loop of a local run is alive, or may be on a machine that is unreachable from here."""
    loop = read_claim(run.loop_file, run)
    return loop is not None and not loop.get("let_go") and _held_by_process(loop) is not None


def loop_here(run: RunDirectory) -> bool:
    """Whether another process of this machine is the loop of a local run."""
    loop = read_claim(run.loop_file, run)
    mine = loop is None or loop.get("let_go") or _same(loop, of_this_process())
    return not mine and loop is not None and on_this_machine(loop) and process_alive(loop)


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
        entry = read_claim(path, run)
    except FileNotFoundError:
        return None
    except RunDirectoryError:  # created, but not written yet
        return "another process" if recent else None
    if entry is None:
        return None
    alive = process_alive(entry) if reachable(entry) else recent
    return f"process {entry['pid']} on {entry['host']}" if alive else None


def take(run: RunDirectory, attempt: int, me: Mapping[str, Any]) -> dict[str, Any] | None:
    """An attempt's supervisor takes the lease. Returns the entry of the submission that led to it.

    The entry stays, with the attempt's number. It counts where the attempt is not visible yet.
    """
    write_claim(run.holder_file(attempt), run, me)
    pending = read_claim(run.submitted_file, run)
    if pending is None or not _same(pending, me):
        return None
    write_claim(run.submitted_file, run, {"attempt": attempt, **pending, "let_go": False})
    return None if "attempt" in pending else pending


def let_go(run: RunDirectory, attempt: int) -> None:
    """Releases an attempt's lease: its ranks have exited or are unreachable, even if Slurm still shows the job."""
    entry = read_json(run.holder_file(attempt)) or {}
    write_json(run.holder_file(attempt), {**entry, "let_go": True}, mode=0o600)
    pending = read_json(run.submitted_file) or {}
    if pending and _same(pending, entry):  # also if `submit` wrote it only after the job had started
        write_json(run.submitted_file, {**pending, "let_go": True}, mode=0o600)


def let_go_unreachable(run: RunDirectory) -> None:
    """Releases the leases of holders that are unreachable from here, after the user confirmed that they have ended.

    One that is still running exits when it sees the next attempt.
    """
    for file in (run.submitted_file, *map(run.holder_file, run.attempts())):
        entry = read_claim(file, run)
        if entry is not None and not reachable(entry):
            write_claim(file, run, {**entry, "let_go": True})


def held_before(run: RunDirectory, attempt: int, me: Mapping[str, Any]) -> bool:
    """Whether the job or process with this entry held an attempt until its end."""
    entry = read_claim(run.holder_file(attempt), run)
    return entry is not None and not entry.get("let_go") and _same(entry, me)


def submitted_as(run: RunDirectory, me: Mapping[str, Any]) -> bool:
    """Whether this job is the run's newest submission on record, and has started no attempt."""
    claim = read_claim(run.submitted_file, run)
    return claim is not None and _same(claim, me) and "attempt" not in claim


def restarted(run: RunDirectory, me: Mapping[str, Any]) -> bool:
    """Whether Slurm has restarted the job of ``me`` since, and the restart has begun an attempt.

    A node that does not respond loses its job, and continues this process when it comes back.
    """
    claims = (read_claim(run.holder_file(number), run) for number in reversed(run.attempts()))
    newest = next(filter(None, claims), None)
    return newest is not None and _same(newest, me) and newest.get("restarts", 0) > me.get("restarts", 0)


def submitted_again(run: RunDirectory, attempt: int, me: Mapping[str, Any], since: float) -> str | None:
    """The job that ``wait --resubmit`` or a user submitted ``since`` this attempt's supervisor ``me`` began, and that
    has started no attempt as far as can be seen, or None. They do so only if the supervisor's own job has ended."""
    claim = waiting_claim(run, [attempt])
    if claim is None or claim["kind"] != "slurm" or _same(claim, me) or claim.get("time", 0.0) <= since:
        return None
    return str(claim["job"])


def started(run: RunDirectory, job_id: str) -> bool:
    """Whether the job has started an attempt."""
    claims = (read_claim(run.holder_file(number), run) for number in reversed(run.attempts()))
    return any(claim is not None and claim.get("job") == job_id for claim in claims)


def holders(run: RunDirectory) -> list[dict[str, Any]]:
    """Who may hold the run, the newest claim first. RunDirectoryError for another user's run."""
    try:
        # An attempt that is just being claimed has no entry yet: then the previous one counts.
        taken = ((number, read_claim(run.holder_file(number), run)) for number in reversed(run.attempts()))
        number, newest = next(((number, entry) for number, entry in taken if entry), (-1, {}))
        pending = waiting_claim(run, [number])
    except PermissionError as error:
        raise RunDirectoryError(f"{run} belongs to {owner_of(run.path)}, and only its owner can control it") from error
    return [entry for entry in (pending, newest) if entry and not entry.get("let_go")]


def held_by_other(run: RunDirectory, me: Mapping[str, Any] | None = None) -> str | None:
    """Who else holds the run, as ``held by job 41 (RUNNING on n1,n2)``. None if it is free.

    ``me``: this job's or process's own entry, which a requeued job finds.
    """
    for entry in holders(run):
        if me is not None and _same(entry, me):
            continue
        if held := _held_by_job(entry) if entry["kind"] == "slurm" else _held_by_process(entry):
            return held
    return None


def reachable(entry: Mapping[str, Any]) -> bool:
    """Whether a holder's state can be queried from here: it is on this machine, or on this cluster."""
    if entry["kind"] == "slurm":
        own, other = slurm.cluster_name(os.environ), entry.get("cluster")
        return None in (own, other) or own == other
    return on_this_machine(entry)


def _same(entry: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two entries name the same job or process. Older entries have no cluster and no machine."""
    if entry["kind"] != other["kind"]:
        return False
    keys = ("job", "cluster") if entry["kind"] == "slurm" else ("pid", "process_start", "machine")
    return all(entry[key] == other[key] for key in keys if key in entry and key in other)


def _held_by_job(entry: Mapping[str, Any]) -> str | None:
    job_id = entry["job"]
    if not reachable(entry):
        return f"held by job {job_id} of cluster {entry['cluster']}, which cannot be reached from here"
    job = slurm.show_job(job_id)
    if job is None or not job.live:
        return None
    return f"held by job {job_id} ({job.state}{f' on {job.nodes}' if job.nodes else ''})"


def _held_by_process(holder: Mapping[str, Any]) -> str | None:
    if not reachable(holder):
        return f"held by process {holder['pid']} on {holder['host']}, which cannot be reached from here"
    return f"held by process {holder['pid']} on this machine" if process_alive(holder) else None
