"""The batch step of ``submit --check-resume N`` on a cluster: makes the check in its job, and writes the result.

What it prints goes to the job's log, which the submitting command follows.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from clusterddp.cli.resume_check.check import result
from clusterddp.cli.resume_check.result_file import read_result, read_steps, write_result
from clusterddp.cli.resume_check.trials import AllocatedTrials
from clusterddp.entry import exit_with
from clusterddp.errors import STOPPED, ClusterddpError
from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.secrets import check_revealed
from clusterddp.reporter import show
from clusterddp.rundir.ownership import check_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.cause import Cause
from clusterddp.supervisor.main import prepare_process


def check(owner: RunDirectory) -> int:
    """The whole batch step; returns the exit code of the check."""
    prepare_process()
    if (made := read_result(owner.path)) is not None:  # Slurm has started the job once more
        return made[0]
    check_run(owner)
    job = load_resolved(owner.job_file)
    check_revealed(job, owner.job_file)
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    if restart != "0":
        show("resume check: the job was requeued; the check starts over")
    folder = owner.path / f"start-{int(restart)}"  # of what an earlier start has left, nothing is used
    folder.mkdir(mode=0o700)
    code, words = _result(AllocatedTrials(folder, replace(job, snapshot=False), owner), read_steps(owner.path))
    if Cause.REQUEUED.value in words and code == STOPPED:  # by an administrator: the next start is about to begin
        return code
    write_result(owner.path, code, words)
    return code


def _result(trials: AllocatedTrials, steps: int) -> tuple[int, str]:
    try:
        return 0, result(trials, steps)
    except ClusterddpError as error:
        return error.exit_code, str(error)


def main() -> None:
    """The command line: the job's folder."""
    owner = RunDirectory(sys.argv[-1])
    exit_with(lambda: check(owner), owner.private)


if __name__ == "__main__":
    main()
