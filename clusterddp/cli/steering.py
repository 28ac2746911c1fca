"""Commands for a running job: ``stop``, ``save``, ``drain``, ``requeue``, ``stacks``, ``cancel`` and ``shell``.

``save`` saves a checkpoint after the current step. ``stop``, ``drain`` and ``requeue`` also stop the ranks there: until
the run is submitted again, to continue in the same job without a node, or to requeue it. ``stacks`` shows where the
ranks are now, equal stacks together. ``cancel`` ends runs for good. ``shell`` opens a shell, a command or the rank's
debugger on the node of a rank, inside its job.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from clusterddp.checkpoint.store import of_run
from clusterddp.codec import plain
from clusterddp.errors import (
    FAILED,
    INTERRUPTED,
    ClusterddpError,
    LauncherEnvironmentError,
    RunDirectoryError,
    SlurmError,
    SlurmUnavailable,
    UsageError,
)
from clusterddp.failures import exclusion
from clusterddp.failures.stack_traces import NAMED, described, summary
from clusterddp.history.codec import sentence
from clusterddp.history.ends import AttemptEnd, Completed, Continues, Requeued, Restarted, Resubmitted, Stopped
from clusterddp.history.outcome import over_already
from clusterddp.history.words import at_step
from clusterddp.hostlist import expand, ranges, ranks_in
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.messages import requests
from clusterddp.process import module_command
from clusterddp.reporter import agreed, can_ask, counted, put, say, show, what_failed
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import ONE_RUN, RunDirectory, find_runs, names_exactly, open_run
from clusterddp.runs.request_client import (
    await_end,
    await_outcome,
    begin,
    check_trains,
    find_address,
    find_nodes,
    request,
    waiting_job,
)
from clusterddp.runs.run_status import state_of
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.configuration import usable_nodes


def add_stop_arguments(parser: argparse.ArgumentParser) -> None:
    """The argument of ``stop``, and of ``save``."""
    parser.add_argument("run", metavar="RUN", help=ONE_RUN)


add_save_arguments = add_stop_arguments


def run_stop(arguments: argparse.Namespace, _: object) -> int:
    """Stops the run, and prints how its attempt ended."""
    return _until_done(open_run(arguments.run), stop)


def run_save(arguments: argparse.Namespace, _: object) -> int:
    """Saves the run, and prints the checkpoint's step."""
    return _until_done(open_run(arguments.run), save)


def add_drain_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``drain``."""
    parser.add_argument("run", metavar="RUN", help=ONE_RUN)
    parser.add_argument("node", metavar="NODE", help="one of the run's nodes, such as n3")


def run_drain(arguments: argparse.Namespace, _: object) -> int:
    """Moves the run off the node, and prints how its attempt ended."""
    run = open_run(arguments.run)
    if run.outcome() is None:
        _refuse_local(run, "drain")
    return _until_done(run, partial(drain, node=arguments.node))


def _until_done(run: RunDirectory, work: Callable[[RunDirectory], int]) -> int:
    """Carries out the command, and returns its exit code. Ctrl-C ends only the wait."""
    try:
        return work(run)
    except KeyboardInterrupt:
        show(f"No longer waiting. The request may still take effect. Check with: clusterddp status {run.quoted}")
        return INTERRUPTED


def stop(run: RunDirectory) -> int:
    """Waits until the run is stopped. Returns 0 if all of its steps are saved."""
    end = _end(run, requests.Stop())
    if isinstance(end, Stopped):
        how = "--local --run-dir" if run.has_loop else "--run-dir"
        show(f"Continue it with: clusterddp submit {how} {run.quoted}")
    return _code(end, Stopped)


def save(run: RunDirectory) -> int:
    """Waits until the checkpoint is committed."""
    attempt, answer = request(run, requests.Save())
    if isinstance(answer, requests.Committed):
        put(f"Checkpoint {answer.step} is saved")
        return 0
    end = await_end(run, attempt)  # a stop that came first has also saved
    put(sentence(end) or "")
    return 0 if isinstance(end, Continues) and end.checkpoint is not None and end.checkpoint == end.step else FAILED


def drain(run: RunDirectory, node: str) -> int:
    """Waits until the run has stopped to continue without the node. Returns 0 if all of its steps are saved."""
    return _code(_end(run, requests.Drain(node)), Restarted, Requeued, Resubmitted)


def requeue(run: RunDirectory, nodes: Sequence[str] = ()) -> int:
    """Waits until the run has stopped to continue in a requeued job, or in a new one without ``nodes``."""
    end = _end(run, requests.Requeue(tuple(nodes)))
    return 0 if isinstance(end, (Requeued, Resubmitted, Completed)) else FAILED


def _end(run: RunDirectory, asked: requests.UserRequest) -> AttemptEnd:
    """Sends a request that ends the attempt. Returns the event of its end, and prints its sentence."""
    attempt, _ = request(run, asked)
    end = await_end(run, attempt)
    put(sentence(end) or "")
    return end


def _code(end: AttemptEnd, *expected: type[Continues]) -> int:
    """The exit code: 0 if the run is completed, or if the attempt ended as expected with all of its steps saved."""
    saved = isinstance(end, Continues) and end.checkpoint == (end.step or None)
    return 0 if isinstance(end, Completed) or (isinstance(end, expected) and saved) else FAILED


def add_requeue_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``requeue``."""
    parser.add_argument("run", metavar="RUN", help=ONE_RUN)
    parser.add_argument(
        "--exclude", metavar="NODES", help="continue in a new job without these nodes, such as n3 or n[3-4], for a day"
    )


def run_requeue(arguments: argparse.Namespace, _: object) -> int:
    """Requeues the run, and prints how its attempt ended."""
    run = open_run(arguments.run)
    try:
        nodes = expand(arguments.exclude or "")
    except LauncherEnvironmentError as error:
        raise UsageError(f"--exclude: {error}") from error
    if run.outcome() is None and (job := waiting_job(run)):
        return _already_waiting(run, job, arguments.exclude)
    if nodes and run.outcome() is None:
        check_nodes(run, load_resolved(run.job_file), nodes)
    return _until_done(run, partial(requeue, nodes=nodes))


def _already_waiting(run: RunDirectory, job: slurm.JobInfo, exclude: str | None) -> int:
    """Handles a run that is already in the queue. Slurm chooses its nodes when it starts."""
    if exclude:
        raise RunDirectoryError(
            f"{run} is waiting in the queue (job {job.job_id}, {job.reason}). Exclude nodes with: scontrol update "
            f"JobId={job.job_id} ExcNodeList={exclude}"
        )
    held = (
        f". To release Slurm's hold, use: clusterddp wait --resubmit {run.quoted}" if job.reason == "BeginTime" else ""
    )
    put(f"{run} is already waiting in the queue (job {job.job_id}, {job.reason}){held}")
    return 0


def _refuse_local(run: RunDirectory, what: str) -> None:
    """Raises UsageError for a run without Slurm. ``what``: the command or option that needs several nodes."""
    if run.has_loop:
        raise UsageError(f"{what}: {run} is a local run, which has no other nodes")


def check_nodes(run: RunDirectory, job: Job, nodes: list[str]) -> None:
    """Refuses, before the run stops, nodes that Slurm would refuse afterwards."""
    _refuse_local(run, "--exclude")
    for node in nodes:
        try:
            slurm.node_address(node)
        except SlurmUnavailable:
            raise
        except SlurmError as error:
            raise UsageError(f"--exclude: this cluster has no node {node!r}: {error}") from error
    if required := set(nodes).difference(exclusion.may_exclude(job, nodes)):
        names = ", ".join(sorted(required))
        raise UsageError(f"--exclude: {names} cannot be excluded, because the run's nodelist is {job.nodelist}")
    left = set(usable_nodes(job.partition)) - set(nodes) - set(expand(job.exclude or ""))
    needed = job.least_allocated
    if len(left) < needed:
        remain = counted(len(left), "usable node")
        raise UsageError(f"--exclude: {remain} would remain without {', '.join(nodes)}, but the run needs {needed}")


def add_stacks_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``stacks``."""
    parser.add_argument("run", metavar="RUN", help=ONE_RUN)
    parser.add_argument("--rank", default="all", metavar="R", help="ranks such as 0,3-5 (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_stacks(arguments: argparse.Namespace, _: object) -> int:
    """Prints the stacks. The exit code is 1 if no rank has answered."""
    ranks = arguments.rank
    if ranks != "all":
        try:
            ranks_in(ranks)
        except ValueError as error:
            raise UsageError(f"--rank {ranks}: {error}, or all") from error
    run = open_run(arguments.run)
    _, answer = request(run, requests.Stacks(None if ranks == "all" else ranks))
    if not isinstance(answer, requests.RankStacks):
        raise RunDirectoryError(
            f"the supervisor of {run} has exited. See the run's state with: clusterddp status {run.quoted}"
        )
    if arguments.json:
        print(json.dumps(vars(answer), default=plain))
    else:
        put(stacks_text(answer))
    return 0 if answer.stacks else FAILED


def stacks_text(answer: requests.RankStacks) -> str:
    """A summary, each group of equal stacks, and the ranks without an answer."""
    lines = [summary(answer.stacks)]
    for group in answer.stacks:
        lines += ["", *described(group)]
    missing = []
    if silent := answer.unanswered:
        shown = [f"{rank} ({answer.hosts.get(str(rank), 'unknown')})" for rank in silent[:NAMED]]
        more = f" and {len(silent) - NAMED} more" if len(silent) > NAMED else ""
        missing.append(
            f"{counted(len(silent), 'rank')} did not answer: {', '.join(shown)}{more}. A rank cannot answer while it "
            "is stopped, or in C code that holds Python's GIL"
        )
    if starting := answer.starting:
        missing.append(f"still starting: {ranges(starting)}")
    if exited := answer.exited:
        missing.append(f"exited: {ranges(exited)}")
    return "\n".join([*lines, *(["", *missing] if missing else [])])


def add_cancel_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cancel``."""
    parser.add_argument("run", nargs="+", metavar="RUN", help="run directories, folders of runs, or quoted patterns")
    parser.add_argument("--yes", action="store_true", help="cancel several runs, or those of a folder, without asking")


def run_cancel(arguments: argparse.Namespace, _: object) -> int:
    """Cancels the runs, and prints the final state of each. Returns 0 if all are over."""
    runs = find_runs(arguments.run)
    live, unreadable = [], False
    for run in runs:
        try:
            outcome = run.outcome()
        except (ClusterddpError, OSError) as error:
            if len(runs) == 1:
                raise
            unreadable = True
            say(f"{run} was not cancelled: {what_failed(error)}")
            continue
        if outcome is None:
            live.append(run)
        else:
            put(over_already(run, outcome))
    named = len(runs) == 1 and names_exactly(arguments.run[0], runs[0])
    if live and not named and not arguments.yes and not _confirmed(live):
        show("no run was cancelled")
        return FAILED
    return 0 if _cancel(live) and not unreadable else FAILED


def _confirmed(runs: Sequence[RunDirectory]) -> bool:
    """Lists the runs and asks. Without a terminal, ``--yes`` is required."""
    if not can_ask():
        raise UsageError(
            f"cancel: cannot ask whether to cancel {counted(len(runs), 'run')}, because there is no terminal. Add --yes"
        )
    for run in runs:
        show(str(run))
    return agreed(f"cancel {counted(len(runs), 'run')} permanently?")


def _cancel(runs: Sequence[RunDirectory]) -> bool:
    """Ends all runs before it waits for any. Prints how each ended, and returns whether all did."""
    failed: list[RunDirectory] = []
    for work in (begin, _report):
        for run in runs:
            try:
                if run not in failed:
                    work(run)
            except ClusterddpError as error:
                failed.append(run)
                begun = isinstance(error, SlurmError) and run.cancelled
                say(f"{run} will not start again, but has not ended: {error}. Cancel it again" if begun else str(error))
            except OSError as error:  # such as another user's run or a full disk: the other runs are still cancelled
                if len(runs) == 1:
                    raise
                failed.append(run)
                say(f"{run} was not cancelled: {what_failed(error)}")
    return not failed


def _report(run: RunDirectory) -> None:
    final = await_outcome(run)
    put(f"{run}: {final.state}{at_step(final.step)}. The run will not start again")
    if of_run(run).candidates():
        show(f"To continue from its newest checkpoint in a new run, use: clusterddp submit --fork {run.quoted}")


#: Seconds between two looks at a run that has not started.
START_CHECK_S = 1.0


def add_shell_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``shell``."""
    parser.add_argument("run", metavar="RUN", help=ONE_RUN)
    parser.add_argument(
        "--rank", type=int, default=0, metavar="R", help="the rank on whose node to open the shell (default: 0)"
    )
    parser.add_argument(
        "--attach",
        action="store_true",
        help="attach to breakpoint() in the rank that --debug named at submission",
    )


def run_shell(arguments: argparse.Namespace, command: Sequence[str] | None) -> int:
    """Starts a step of the job on the rank's node, and returns its exit code."""
    if arguments.attach and command:
        raise UsageError("--attach opens the rank's debugger. Remove the command after --")
    run = open_run(arguments.run)
    check_trains(run)
    if arguments.attach:
        return _attach(run, arguments.rank)
    return _step(run, arguments.rank, list(command or [os.environ.get("SHELL", "/bin/sh")]))


def debug(run: RunDirectory, rank: int) -> int:
    """Waits until the job has started, then attaches to the rank. For ``submit --debug``."""
    how = f"clusterddp shell {run.quoted} --rank {rank} --attach"
    if not sys.stdin.isatty():
        show(f"Once the job has started, attach to rank {rank} with: {how}")
        return 0
    before = run.newest_attempt()
    show(f"Waiting for the job to start. Press Ctrl-C to stop waiting, and attach later with: {how}")
    try:
        while run.newest_attempt() == before:
            if (state := state_of(run))[0] in ("completed", "failed", "cancelled"):
                raise RunDirectoryError(f"{run}: {state[1]}")
            time.sleep(START_CHECK_S)
        return _attach(run, rank)
    except KeyboardInterrupt:
        return INTERRUPTED


def _attach(run: RunDirectory, rank: int) -> int:
    if (read_json(run.debug_file) or {}).get("rank") != rank:
        raise RunDirectoryError(
            f"{run} was not submitted with --debug {rank}, so rank {rank} does not wait in breakpoint(). "
            f"Submit it again with: clusterddp submit --run-dir {run.quoted} --debug {rank}"
        )
    attempt, _ = find_address(run)
    return _step(run, rank, [*module_command("clusterddp.worker.debugger"), str(run), str(attempt), str(rank)])


def _step(run: RunDirectory, rank: int, command: list[str]) -> int:
    """Runs a command beside the ranks, with this terminal if there is one. It uses none of their resources."""
    attempt, address = find_address(run)
    if address.job is None:
        raise RunDirectoryError(f"{run} trains on {address.host} without a Slurm job. Open a shell there")
    job = load_resolved(run.job_file)
    hosts = find_nodes(run, attempt)
    if not 0 <= rank < len(hosts) * job.ranks_per_node:
        ranks = counted(len(hosts) * job.ranks_per_node, "rank")
        raise UsageError(f"--rank {rank}: {run} has {ranks}, numbered from 0")
    slurm.require("srun")
    options = ["--overlap", "--nodes=1", "--ntasks=1", "--mem=0", f"--nodelist={hosts[rank // job.ranks_per_node]}"]
    terminal = ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    return subprocess.call(
        ["srun", f"--jobid={address.job}", *options, *terminal, *command], env=slurm.scrub(os.environ)
    )
