"""Sends a user's request to the supervisor that trains a run, and returns its answer or raises why there is none.

A request is one TCP connection with JSON lines to the supervisor, whose address and token are in the run directory.
``supervisor/user_requests.py`` decides what follows. If the login node cannot reach the supervisor's node, a job step
sends the request from there (``python -m clusterddp.runs.request_client RUN ATTEMPT REQUEST``) and prints the
answers.

``cancel_run`` ends a run permanently. It asks Slurm or the local processes, not the supervisor.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TypeAlias, TypeVar

from clusterddp.codec import Misfit
from clusterddp.entry import exit_with
from clusterddp.errors import RunDirectoryError, SlurmError
from clusterddp.history.beginnings import Started
from clusterddp.history.codec import decode
from clusterddp.history.ends import AttemptEnd, Cancelled, Requeued, Stopped
from clusterddp.history.event import Event
from clusterddp.history.outcome import Outcome, over_already
from clusterddp.history.words import BY_SLURM
from clusterddp.hostlist import expand
from clusterddp.messages.requests import (
    LastAnswer,
    News,
    Refused,
    Stop,
    UserRequest,
    answer_line,
    read_answer,
    read_request,
    request_line,
)
from clusterddp.process import module_command, signal_ranks
from clusterddp.reporter import show
from clusterddp.rundir.claims import Claim, JobClaim, process_alive
from clusterddp.rundir.control_address import Address, read_address
from clusterddp.rundir.json_lines import read_backwards
from clusterddp.rundir.ownership import hold_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import EVENT
from clusterddp.runs.run_status import state_of
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.commands import JobInfo
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor import lease
from clusterddp.supervisor.controller import give_notice
from clusterddp.supervisor.history import History
from clusterddp.worker.control_channel import encoded, keep_alive, send_line

Answer: TypeAlias = News | LastAnswer
Found = TypeVar("Found")
#: Seconds for a connection to be accepted. Behind a firewall there is no answer.
CONNECT_S = 3.0
#: Seconds between two looks at the run's files, and between two queries of Slurm.
FILE_CHECK_S, QUERY_S = 0.1, 1.0
#: Seconds for an attempt that is starting to record its address, and for one whose ranks have exited, or that is
#: cancelled, to end.
START_S, END_S = 10.0, 60.0


def ask(address: Address, host: str, asked: UserRequest) -> Iterator[Answer]:
    """Sends a request to the supervisor at ``host``, and yields its answers as they come.

    Ends after the last one, or when the supervisor has exited. OSError if the connection cannot be opened or breaks,
    RunDirectoryError for an answer of another version.
    """
    with socket.create_connection((host, address.port), timeout=CONNECT_S) as connection:
        keep_alive(connection)
        connection.settimeout(None)
        send_line(connection, {"token": address.token, **request_line(asked)})
        with connection.makefile("rb") as lines:
            for line in lines:
                yield _answer(line)


def _answer(line: bytes | str) -> Answer:
    try:
        return read_answer(json.loads(line))
    except (ValueError, Misfit) as error:
        raise RunDirectoryError(
            f"cannot read the supervisor's answer {line[:80]!r}: {error}. Its clusterddp may be another version"
        ) from error


def relay(run_directory: str, attempt: int, line: str) -> int:
    """Prints the answers to a request, from the supervisor's own node."""
    address = read_address(RunDirectory(run_directory), attempt)
    if address is None:
        raise RunDirectoryError(f"attempt {attempt} of {run_directory} has no supervisor that accepts requests")
    try:
        for answer in ask(address, "127.0.0.1", read_request(json.loads(line))):
            print(encoded(answer_line(answer)).decode(), end="", flush=True)
    except OSError as error:
        raise RunDirectoryError(f"no answer at port {address.port} of this node: {error.strerror or error}") from error
    return 0


def request(run: RunDirectory, asked: UserRequest) -> tuple[int, LastAnswer | None]:
    """The number of the attempt that trains the run, and its supervisor's last answer to a request.

    Shows the supervisor's messages meanwhile. It is None if the supervisor exited without one. Raises
    RunDirectoryError if no process or job trains the run, or if the supervisor refuses.
    """
    check_trains(run, asked)
    attempt, address = find_address(run)
    for answer in _answers(run, attempt, address, asked):
        match answer:
            case News(text):
                show(f"{run.path.name}: {text}")
            case Refused(why):
                raise RunDirectoryError(f"{run}: {why}")
            case _:
                return attempt, answer
    return attempt, None


def check_trains(run: RunDirectory, asked: UserRequest | None = None) -> None:
    """Raises RunDirectoryError, with the reason, unless a process or a job that has started trains the run.

    ``asked``: what for. None: for something else.
    """
    if outcome := run.outcome():
        options = "--local --run-dir" if run.has_loop else "--run-dir"
        how = f". Continue with: clusterddp submit {options} {run.quoted}" if outcome.failed else ""
        raise RunDirectoryError(f"{over_already(run, outcome)}, so it is not running{how}")
    if job := waiting_job(run):
        may_start = isinstance(asked, Stop) and job.reason != "JobHeldUser"
        hold = f". To keep it from starting, use: scontrol hold {job.job_id}" if may_start else ""
        raise RunDirectoryError(
            f"{run} is waiting in the queue (job {job.job_id}, {job.reason}) and has no ranks yet{hold}"
        )
    for claim in lease.holders(run):
        if not lease.reachable(claim):
            where = f"on cluster {claim.cluster}" if isinstance(claim, JobClaim) else f"on {claim.host}"
            raise RunDirectoryError(f"{run} is {lease.held_by_other(run)}. Run this command {where}")
    deadline = time.monotonic() + START_S
    try:
        while (held := lease.held_by_other(run)) is None and lease.local_loop_alive(run):  # between two attempts
            if time.monotonic() > deadline:
                break
            time.sleep(FILE_CHECK_S)
    except SlurmError as error:
        show(f"{error}. Asking the supervisor anyway")
        return
    if held is None:
        raise RunDirectoryError(f"{run} is not running: {state_of(run)[1]}")


def waiting_job(run: RunDirectory, query_s: float = QUERY_S) -> JobInfo | None:
    """The run's pending job, or None if there is none, or its state is unknown.

    If the job is being requeued, asks every ``query_s`` seconds until Slurm has finished its batch step and epilog.
    """
    deadline, said = time.monotonic() + END_S, False
    while True:
        job = _live_job(run)
        if job is None or job.state == "PENDING":
            return job
        if not is_requeued(run) or time.monotonic() > deadline:
            return None
        if not said:
            show(f"{run.path.name}: job {job.job_id} is being requeued ({job.state}). Waiting until it is in the queue")
            said = True
        time.sleep(query_s)


def _live_job(run: RunDirectory) -> JobInfo | None:
    for claim in lease.holders(run):
        if isinstance(claim, JobClaim) and lease.reachable(claim):
            try:
                job = slurm.show_job(claim.job)
            except SlurmError:
                return None
            if job is not None and job.live:
                return job
    return None


def is_requeued(run: RunDirectory) -> bool:
    """Whether the newest attempt ended with a requeue of its job, according to the history."""
    if (newest := run.newest_attempt()) is None:
        return False
    last = islice(backwards(run, newest), 10)  # late reports of ranks may follow its end
    return any(isinstance(event, Requeued) or (isinstance(event, Stopped) and event.then == BY_SLURM) for event in last)


def find_address(run: RunDirectory) -> tuple[int, Address]:
    """The newest attempt and the address of its supervisor. Waits for an attempt that is just starting."""

    def find() -> tuple[int, Address] | None:
        newest = run.newest_attempt()
        address = None if newest is None else read_address(run, newest)
        return None if newest is None or address is None else (newest, address)

    return _await_start(run, find)


def find_nodes(run: RunDirectory, attempt: int) -> list[str]:
    """The nodes of an attempt, in the order of its ranks. They are recorded some time after the address."""
    found = _await_start(run, lambda: next((one for one in backwards(run, attempt) if isinstance(one, Started)), None))
    return expand(found.nodes) if found.nodes else []


def _await_start(run: RunDirectory, find: Callable[[], Found | None]) -> Found:
    deadline = time.monotonic() + START_S
    while (found := find()) is None:
        if time.monotonic() > deadline:
            raise RunDirectoryError(f"{run}: the job has started, but its supervisor has not. Try again in a minute")
        time.sleep(FILE_CHECK_S)
    return found


def backwards(run: RunDirectory, attempt: int) -> Iterator[Event]:
    """An attempt's events, the newest first."""
    for event in map(decode, read_backwards(run.events_file, EVENT)):
        if event.attempt < attempt:
            return
        if event.attempt == attempt:
            yield event


def _answers(run: RunDirectory, attempt: int, address: Address, asked: UserRequest) -> Iterator[Answer]:
    """The supervisor's answers, through a job step if it cannot be reached directly."""
    said = False
    try:
        for answer in ask(address, _reachable_name(address), asked):
            said = True
            yield answer
    except OSError as error:
        if said:  # the supervisor's node is lost, or the supervisor was killed
            return
        if address.job is None:
            where = f"{address.host}, port {address.port}"
            raise RunDirectoryError(f"{run}: the supervisor does not answer at {where}: {error}. Try again") from error
        yield from _through_a_step(run, attempt, address, json.dumps(request_line(asked)), error)


def _reachable_name(address: Address) -> str:
    """The address by which Slurm reaches the supervisor's node: its name may be unknown here."""
    if address.job is None:
        return address.host
    try:
        return slurm.node_address(address.host)
    except SlurmError:
        return address.host


def _through_a_step(run: RunDirectory, attempt: int, address: Address, line: str, direct: OSError) -> Iterator[Answer]:
    slurm.require("srun")
    command = [*step_command(address), str(run), str(attempt), line]
    with subprocess.Popen(
        command,
        env=slurm.for_parsing(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C ends the step
    ) as step:
        assert step.stdout is not None and step.stderr is not None
        try:
            said = False
            for line in step.stdout:
                said = True
                yield _answer(line)
            problem = step.stderr.read().strip().splitlines()
        finally:
            step.terminate()
    if not said:
        why = problem[-1] if problem else f"srun exited with code {step.returncode}"
        raise RunDirectoryError(
            f"{run}: the supervisor is unreachable on {address.host}, port {address.port} ({direct}), and also from a "
            f"step of job {address.job} ({why}). Try again, or see clusterddp status {run.quoted}"
        )


def step_command(address: Address) -> list[str]:
    """srun's command line for a step on the supervisor's node that takes no resources from the ranks."""
    options = ("--overlap", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=0", "--gres=none", "--unbuffered")
    where = (f"--jobid={address.job}", f"--nodelist={address.host}", "--chdir=/")
    return ["srun", *where, *options, "--export=ALL", *module_command("clusterddp.runs.request_client")]


def await_end(run: RunDirectory, attempt: int) -> AttemptEnd:
    """The event that ended an attempt whose ranks have exited.

    RunDirectoryError if there is none after a minute: the supervisor may be waiting for Slurm's controller.
    """
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        for event in backwards(run, attempt):
            if isinstance(event, AttemptEnd):
                return event
        time.sleep(FILE_CHECK_S)
    raise RunDirectoryError(
        f"{run}: all ranks have exited, but attempt {attempt} has not ended. Its supervisor is waiting for Slurm, or "
        f"was killed. See the run's state with: clusterddp status {run.quoted}"
    )


def cancel_run(run: RunDirectory) -> Outcome:
    """Marks the run as cancelled, to keep it from starting again, ends its job or processes, and waits.

    Returns the outcome.
    """
    begin(run)
    return await_outcome(run)


def begin(run: RunDirectory) -> None:
    """Marks the run as cancelled, and ends its job or processes."""
    for claim in lease.holders(run):
        if isinstance(claim, JobClaim) and not lease.reachable(claim):
            raise RunDirectoryError(f"{run} is {lease.held_by_other(run)}. Cancel it on that cluster")
    hold_run(run)
    run.mark_cancelled()
    for claim in lease.holders(run):
        _end_holder(claim, run)


def await_outcome(run: RunDirectory) -> Outcome:
    """Waits until no job or process trains the run. Returns the outcome."""
    deadline = time.monotonic() + END_S
    while (
        (holder := slurm.patiently(partial(lease.held_by_other, run)))
        and time.monotonic() < deadline
        and any(map(lease.reachable, lease.holders(run)))
    ):
        time.sleep(FILE_CHECK_S)
    if holder:
        text = f"{run} is cancelled and will not start again, but is still {holder}"
        raise RunDirectoryError(f"{text}, which is ending" if holder.reachable else text)
    if run.outcome() is None:  # no supervisor wrote it: the run was queued, or was killed
        History(run, max(run.attempts(), default=0), printed=False).conclude(Cancelled, "cancelled")
    return run.outcome() or Outcome(Cancelled.name, "cancelled")  # on a full disk, the mark must suffice


def _end_holder(claim: Claim, run: RunDirectory) -> None:
    """Ends a job, or signals a local run, unless it has ended already."""
    if isinstance(claim, JobClaim):
        slurm.patiently(partial(_end_job, claim.job))
    elif lease.reachable(claim) and process_alive(claim):
        give_notice(run, Cause.CANCELLED)
        signal_ranks(claim.pid, signal.SIGTERM)


def _end_job(job_id: str) -> None:
    job = slurm.show_job(job_id)
    if job is not None and job.live:
        slurm.cancel(job_id)


if __name__ == "__main__":
    exit_with(lambda: relay(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
