"""What an older version queued, recorded or started by its old names still works after an upgrade."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]
import pytest
from submitit.core.utils import DelayedSubmission

from clusterddp.rundir.files import write_atomically
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import function
from tests.histories import check_history
from tests.waiting import differing, final_state

PACKAGE = Path(__file__).resolve().parents[2] / "clusterddp"
OLDER = Path(__file__).resolve().parents[1] / "older"
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
    return bool((run.outcome() or {})["state"] == "completed")


def test_a_job_queued_by_the_version_before_completes(run: RunDirectory, tmp_path: Path) -> None:
    """Its batch script and its job.yaml stay as they were written."""
    (tmp_path / "train.py").write_text("print('trained')\n")
    write_atomically(run.job_file, JOB.format(program=f"script: {tmp_path}/train.py"))
    assert completes(run)
    assert (run.attempt_logs(0) / "rank-0.out").read_text() == "trained\n"


def test_a_function_launched_by_the_version_before_completes(run: RunDirectory) -> None:
    """Its job names the module that is still recorded for functions: another name would be another job."""
    assert function.MODULE == "clusterddp.function"
    write_atomically(run.job_file, JOB.format(program="module: clusterddp.function"))
    function.save_function(function.function_file(run), function.pickled(DelayedSubmission(lambda: 42)))
    assert completes(run)
    assert cloudpickle.loads(function.result_file(run, 0, 0).read_bytes()) == 42


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A copy of what 0.1 wrote: ``run`` (2 local ranks, stopped after 6 of 12 steps), ``checkpoints`` (of 5 steps)."""
    folder = tmp_path / "older"
    shutil.copytree(OLDER, folder)
    for path in folder.rglob("*"):  # git keeps no modes, and a checkout may be writable by the group
        path.chmod(0o700 if path.is_dir() else 0o600)
    job = folder / "run" / "job.yaml"
    job.write_text(job.read_text().replace("/tmp/older/", f"{folder}/"))
    return folder


def local(run: Path, *more: str | Path) -> RunDirectory:
    """Starts or continues a local run, to its end."""
    command = [sys.executable, "-m", "clusterddp", "submit", "--local", "--run-dir", str(run)]
    subprocess.run([*command, *map(str, more)], check=True, timeout=200)
    return RunDirectory(run)


def test_a_run_of_the_version_before_resumes_exactly(older: Path) -> None:
    """To the last bit: it ends as one that the present version trains without an interruption, in the same order."""
    resumed = local(older / "run")
    script = (older / "train.py").read_text().replace("batch_size=4", "batch_size=4, order=orders.shuffled(version=1)")
    (older / "whole.py").write_text(
        script.replace("import clusterddp", "import clusterddp\nfrom clusterddp import orders")
    )
    whole = local(older / "whole", "--device", "cpu", "--gpus", "2", older / "whole.py", "--", "12")
    assert [event["step"] for event in resumed.events() if event["event"] == "resumed"] == [6]
    assert [(line["step"], line["loss"], line["drawn"]) for line in resumed.metrics()] == [
        (line["step"], line["loss"], line["drawn"]) for line in whole.metrics()
    ]
    assert differing(final_state(resumed), final_state(whole)) == []
    check_history(resumed.events())
    outcome = {"state": "completed", "step": 12, "attempts": 2, "reason": "all ranks finished"}
    assert resumed.outcome() == outcome


def test_a_checkpoint_of_the_version_before_resumes_exactly(older: Path) -> None:
    """One without a run, by ``CheckpointFolder``."""
    for folder in ("checkpoints", "whole"):
        command = [sys.executable, str(older / "train.py"), "9", str(older / folder)]
        subprocess.run(command, check=True, timeout=200)
    resumed, whole = RunDirectory(older / "checkpoints"), RunDirectory(older / "whole")
    assert (resumed.resumed(1) or {})["step"] == 5
    assert differing(final_state(resumed), final_state(whole)) == []


def test_the_old_entry_point_of_a_rank_still_works() -> None:
    """A supervisor that was running during the upgrade restarts its ranks by it."""
    old, new = (ast.parse((PACKAGE / name).read_text()).body[1:] for name in ("rank.py", "worker/__main__.py"))
    assert [ast.dump(node) for node in old] == [ast.dump(node) for node in new]
