"""What an older version queued, recorded or started by its old names still works after an upgrade."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
from submitit.core.utils import DelayedSubmission

from clusterddp.rundir.files import write_atomically
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import function

PACKAGE = Path(__file__).resolve().parents[2] / "clusterddp"
#: What 0.1 recorded for one local rank on a CPU.
JOB = """\
job_name: old
{program}
nodes: 1
gpus_per_node: 1
gpus_per_rank: 1
device: cpu
seed: 0
checkpoint:
  every: 300 seconds
  keep: 3
timeouts:
  start_s: 1800.0
  step_s: 1800.0
  notice_s: 120.0
watchdog:
  step_s: 600.0
  start_s: 1800.0
  on_hang: restart
lift_hold: true
share: private
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def completes(run: RunDirectory) -> bool:
    """Runs what the last line of 0.1's batch script names, without Slurm."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-u", "-m", "clusterddp.launch.supervisor", str(run), "--local"]
    subprocess.run(command, check=True, env=environment, timeout=120)
    return (run.outcome() or {})["state"] == "completed"


def test_a_job_queued_by_the_version_before_completes(run: RunDirectory, tmp_path: Path) -> None:
    """Its batch script and its job.yaml stay as they were written."""
    (tmp_path / "train.py").write_text("print('trained')\n")
    write_atomically(run.job_file, JOB.format(program=f"script: {tmp_path}/train.py"))
    assert completes(run)
    assert (run.attempt_logs(0) / "rank-0.out").read_text() == "trained\n"


def test_a_function_launched_by_the_version_before_completes(run: RunDirectory) -> None:
    """Its job names the module by which functions are recorded to this day: other words would be another job."""
    assert function.MODULE == "clusterddp.function"
    write_atomically(run.job_file, JOB.format(program="module: clusterddp.function"))
    function.save_function(function.function_file(run), function.pickled(DelayedSubmission(lambda: 42)))
    assert completes(run)
    assert cloudpickle.loads(function.result_file(run, 0, 0).read_bytes()) == 42


def test_the_old_name_of_a_rank_starts_the_same() -> None:
    """A supervisor that was running during the upgrade restarts its ranks by it."""
    old, new = (ast.parse((PACKAGE / name).read_text()).body[1:] for name in ("rank.py", "worker/__main__.py"))
    assert [ast.dump(node) for node in old] == [ast.dump(node) for node in new]
