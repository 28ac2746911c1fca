"""The supervisor as a process: what it inherits, what it writes to, and when it refuses to start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from clusterddp.jobdef.job import Job
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor import lease
from clusterddp.supervisor.controller import give_notice
from tests.runs_on_disk import outcome_of


def test_a_log_that_cannot_be_written_does_not_end_the_supervisor(run: RunDirectory, tmp_path: Path) -> None:
    """A full disk: the failed rank's box is lost, and the ranks are still restarted, to the end."""
    script = tmp_path / "once.py"
    script.write_text("import os\nif os.environ['CLUSTERDDP_ATTEMPT'] == '0':\n    os._exit(1)\n")
    run.create()
    run.job_file.write_text(Job(name="x", script=str(script), device="cpu").to_yaml())
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "clusterddp.supervisor", str(run), "--local"]
        assert subprocess.run(command, stdout=full, stderr=full, timeout=60, check=False).returncode == 0
    assert (outcome_of(run) or {})["state"] == "completed"
    assert run.attempts() == [0, 1]


def test_a_batch_job_that_is_refused_leaves_the_notice_of_the_attempt_that_holds_the_run(run: RunDirectory) -> None:
    """The local command has just written why the ranks are to stop."""
    run.create()
    run.job_file.write_text(Job(name="x", module="x", device="cpu").to_yaml())
    lease.take(run, run.create_attempt(), lease.of_this_process())
    give_notice(run, Cause.INTERRUPTED)
    environment = {**os.environ, "SLURM_JOB_ID": "41", "SLURM_PROCID": "0"}
    command = [sys.executable, "-m", "clusterddp.supervisor", str(run)]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (refused.returncode, "held by process" in refused.stderr) == (1, True), refused.stderr
    assert run.notice_file.exists()


def test_a_supervisor_that_a_shell_has_put_in_the_background_can_end_srun() -> None:
    """Such a shell has QUIT ignored, which srun would inherit."""
    code = "from clusterddp.supervisor import main as s; s.prepare_process(); print(s.signal.getsignal(3).name)"
    command = ["sh", "-c", '"$0" -c "$1" & wait', sys.executable, code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "SIG_DFL\n"
