"""The guard of a job that outlives its nodes: ``python -m clusterddp.supervisor.batch_host_guard RUN ATTEMPT PORT``.

If such a job loses its batch host, and the supervisor with it, Slurm leaves it RUNNING without a batch step until its
time limit, and reports no failure (seen on 22.05.8 and 26.05.5). A guard is a step on another node. There are two,
because one may be lost together with the supervisor. Each holds a connection to the supervisor's node. If that breaks
and Slurm takes the node out of the job, a guard requeues the job, as Slurm itself requeues a job without ``--no-kill``.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress

from clusterddp.errors import RunDirectoryError, SlurmError
from clusterddp.hostlist import expand
from clusterddp.process import module_command
from clusterddp.rundir.ownership import hold_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.commands import JobInfo
from clusterddp.slurm.run_states import ACTIVE
from clusterddp.worker.control_channel import keep_alive

#: Seconds between two looks for a newer attempt.
NEWER_ATTEMPT_CHECK_S = 2.0
#: The least and the most seconds between two queries of the controller.
QUERY_S = (20.0, 30.0)
#: srun takes options from these, which are the ranks'.
_OF_RANKS = ("SLURM_GPUS", "SLURM_GRES", "SLURM_NTASKS", "SLURM_CPUS_PER", "SLURM_TRES", "SLURM_MEM", "SLURM_DISTRIB")


def guard_command(run: str, attempt: int, address: str, node: str) -> list[str]:
    """The command that starts the guard on a node, beside the ranks."""
    step = [
        "srun",
        "--export=ALL",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        "--gres=none",
        f"--nodelist={node}",
    ]
    quiet = ["--quiet", "--input=none", "--output=none", "--error=none"]
    return [*step, *quiet, *module_command("clusterddp.supervisor.batch_host_guard"), run, str(attempt), address]


def guard_environment() -> dict[str, str]:
    """The environment of that command."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)}


def lost_batch_host(job: JobInfo | None, restarts: int) -> bool:
    """Whether the job, in this start of it, continues without its batch host."""
    if job is None or job.restarts != restarts or job.state not in ACTIVE or not (job.batch_host and job.nodes):
        return False
    return job.batch_host not in expand(job.nodes)


def await_break(host: str, port: int) -> None:
    """Returns once the connection to the supervisor's node is broken, or there is none."""
    with suppress(OSError), socket.create_connection((host, port), timeout=60) as connection:
        keep_alive(connection)
        connection.settimeout(None)
        connection.recv(1)


def watch(run: RunDirectory, attempt: int, job_id: str, restarts: int) -> None:
    """Requeues this start of the job once Slurm has taken its batch host out of it. Returns then, or when a newer
    attempt exists."""
    ask_at = time.monotonic() + random.uniform(*QUERY_S)
    while True:
        time.sleep(NEWER_ATTEMPT_CHECK_S)
        with suppress(OSError, SlurmError, RunDirectoryError):
            if run.superseded(attempt):
                return
            if time.monotonic() < ask_at:
                continue
            ask_at = time.monotonic() + random.uniform(*QUERY_S)
            if lost_batch_host(slurm.show_job(job_id), restarts):
                (slurm.cancel if run.cancelled else slurm.requeue)(job_id)
                return


def main() -> None:
    """Guards one attempt."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the job ends without waiting for this process
    run, attempt = RunDirectory(sys.argv[1]), int(sys.argv[2])
    host, _, port = sys.argv[3].rpartition(":")
    hold_run(run)
    await_break(host or os.environ["SLURM_LAUNCH_NODE_IPADDR"], int(port))
    watch(run, attempt, slurm.own_job_id(os.environ) or "", int(os.environ.get("SLURM_RESTART_COUNT", 0)))


if __name__ == "__main__":
    main()
