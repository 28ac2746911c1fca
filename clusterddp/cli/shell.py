"""``clusterddp shell``: a shell, a command or the rank's debugger, on the node of a rank, inside its job."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from clusterddp.errors import INTERRUPTED, RunDirectoryError, UsageError
from clusterddp.hostlist import expand
from clusterddp.jobdef.load import load_resolved
from clusterddp.process import module_command
from clusterddp.reporter import show
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import ONE_RUN, RunDirectory, open_run
from clusterddp.runs.requests import backwards, check_trains, find_address
from clusterddp.runs.run_status import state_of
from clusterddp.slurm import commands as slurm

#: Seconds between two looks at a run that has not started.
LOOK_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace, command: Sequence[str] | None) -> int:
    """Starts a step of the job on the rank's node, and returns its exit code."""
    if arguments.attach and command:
        raise UsageError("--attach opens the rank's debugger. Remove the command after --")
    run = open_run(arguments.run)
    check_trains(run, "shell")
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
            time.sleep(LOOK_S)
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
    python = load_resolved(run.job_file).python
    return _step(run, rank, [*module_command("clusterddp.worker.debugger", python), str(run), str(attempt), str(rank)])


def _step(run: RunDirectory, rank: int, command: list[str]) -> int:
    """Runs a command beside the ranks, with this terminal if there is one. It uses none of their resources."""
    attempt, address = find_address(run)
    if address.job is None:
        raise RunDirectoryError(f"{run} trains on {address.host} without a Slurm job. Open a shell there")
    job = load_resolved(run.job_file)
    nodes = next((event["nodes"] for event in backwards(run, attempt) if event["event"] == "started"), "")
    hosts = expand(nodes) if nodes else []
    if not 0 <= rank < len(hosts) * job.ranks_per_node:
        raise UsageError(f"--rank {rank}: {run} has ranks 0 to {len(hosts) * job.ranks_per_node - 1}")
    slurm.require("srun")
    options = ["--overlap", "--nodes=1", "--ntasks=1", "--mem=0", f"--nodelist={hosts[rank // job.ranks_per_node]}"]
    terminal = ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    return subprocess.call(
        ["srun", f"--jobid={address.job}", *options, *terminal, *command], env=slurm.scrub(os.environ)
    )
