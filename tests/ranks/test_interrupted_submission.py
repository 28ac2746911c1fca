"""Ctrl-C while sbatch runs: an answer is recorded, and a command without one ends and says what is unknown."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterddp.failures import node_memory
from clusterddp.history.failures import NodeLost
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor import lease
from tests.runs_on_disk import jobs_of

#: Submits a job without a question to the cluster. How long an answer is awaited after Ctrl-C is the first argument.
SUBMIT = """
import sys
from clusterddp import entry
from clusterddp.jobdef.job import Job
from clusterddp.runs import submission
from clusterddp.slurm import queue

queue._INTERRUPTED_S = float(sys.argv[1])
submission.fit_to_cluster = lambda job, required: job
job = Job(name="x", module="x", steps=10)
entry.exit_with(lambda: bool(submission.submit_to_slurm(job, sys.argv[2])) * 0)
"""


def interrupted(
    tmp_path: Path, answer: str, patience_s: float, at: str = "sbatch"
) -> tuple[RunDirectory, subprocess.CompletedProcess[str]]:
    """Submits a run. One of Slurm's commands first sends Ctrl-C to its parent process."""
    programs, run = tmp_path / "bin", RunDirectory(tmp_path / "run")
    programs.mkdir()
    for name, text in {"squeue": "exit 0", at: f"kill -INT $PPID\n{answer}"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", SUBMIT, str(patience_s), str(run)]
    return run, subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90)


@pytest.mark.parametrize(
    "sbatch",
    ["exec sleep 1000", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"],
    ids=["hangs", "is repeated"],
)
def test_ctrl_c_ends_a_submission_that_gets_no_answer(tmp_path: Path, sbatch: str) -> None:
    """The job may exist, so its run directory stays. The message says so, and how to submit it again."""
    run, done = interrupted(tmp_path, sbatch, 0.5)
    assert done.returncode == 130, done.stderr
    assert "may or may not have accepted" in done.stderr and f"submit --run-dir {run.quoted}" in done.stderr
    assert "Traceback" not in done.stderr
    assert run.batch_script.exists() and lease.holders(run) == []


def test_an_answer_that_comes_soon_after_ctrl_c_is_recorded(tmp_path: Path) -> None:
    run, done = interrupted(tmp_path, "echo 41", 60)
    assert done.returncode == 130, done.stderr
    assert jobs_of(lease.holders(run)) == ["41"]


def test_ctrl_c_ends_a_question_before_the_submission_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    """Two runs have failed on a node, so that Slurm is asked which nodes there are."""
    for name in "ab":
        lost = NodeLost(time=time.time(), node="n2", suspect="n2")
        node_memory.remember(RunDirectory(tmp_path / name), "7", lost)
    run, done = interrupted(tmp_path, "exec sleep 1000", 1000, at="scontrol")
    assert done.returncode == 130, done.stderr
    assert "may or may not" not in done.stderr and not run.path.exists()
