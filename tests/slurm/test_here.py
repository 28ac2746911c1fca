"""``submit --here`` in the user's allocation: the ranks start there, and nothing restarts them."""

from __future__ import annotations

import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.trainings import events_of
from tests.waiting import story, wait_for_outcome, wait_for_step

#: Steps that wait rather than compute, so that there is time to interrupt them.
SCRIPT = ["tests/scripts/train.py", "--device", "cpu", "--", "--steps", 200, "--pause", 0.02]


def here(cluster: Cluster, run: RunDirectory, *words: object) -> list[str]:
    return [str(word) for word in (cluster.python, "-m", "clusterddp.submit", "--here", "--run-dir", run.path, *words)]


def salloc(cluster: Cluster, command: list[str], **options: object) -> subprocess.Popen[str]:
    """The command in an allocation of two nodes with a task each, as from a terminal."""
    words = ["salloc", "--partition=low", "--nodes=2", "--ntasks-per-node=1", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return cluster.popen(words, cwd=cluster.source, **pipes, **options)  # type: ignore[arg-type]


@pytest.mark.product  # the next test preempts an attempt here
def test_a_preempted_allocation_ends_the_attempt_and_the_next_one_resumes(cluster: Cluster, runs: Path) -> None:
    """All ranks save within the grace; Slurm starts nothing again, and the run is continued by hand, in a batch job."""
    run = RunDirectory(runs / "run")
    first = salloc(cluster, here(cluster, run, *SCRIPT))
    wait_for_step(run, 20)
    cluster.preempt(seconds=0.1)
    words, _ = first.communicate(timeout=60)
    assert first.returncode == 130, words
    assert f"Stopped. Continue with: clusterddp submit --here --run-dir {run}, or sbatch" in words
    (stopped,) = events_of(run, "stopped")
    assert stopped["cause"] == "preempted", story(run)
    assert run.outcome() is None
    cluster.run(["sbatch", "--parsable", run.batch_script])
    assert wait_for_outcome(run) == "completed", story(run)
    (resumed,) = events_of(run, "resumed")
    assert (resumed["step"], resumed["redone"]) == (stopped["step"], 0), story(run)


#: A user's own script. Its command line overrides two of its options.
OWN_SCRIPT = """#!/bin/bash
#SBATCH --partition=high -t 30
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --comment="the user's own" --nice=3
trap '' TERM
exec {command}
"""


@pytest.mark.product
def test_the_next_job_requests_what_the_users_own_script_and_its_command_line_did(cluster: Cluster, runs: Path) -> None:
    """``sbatch -p low -t 7 job.sh``, preempted, with ``policy: resubmit``."""
    run, script = RunDirectory(runs / "run"), runs / "job.sh"
    script.write_text(OWN_SCRIPT.format(command=shlex.join(here(cluster, run, "--set", "policy=resubmit", *SCRIPT))))
    typed = ["--parsable", "-p", "low", "-t", "7", f"--output={runs}/job.log", script]
    first = cluster.run(["sbatch", *typed], cwd=cluster.source).stdout.strip()
    wait_for_step(run, 20)
    cluster.preempt(seconds=0.1)
    assert wait_for_outcome(run) == "completed", story(run)
    (resubmitted,) = events_of(run, "resubmitted")
    before, after = cluster.job(first), cluster.job(resubmitted["job"])
    same = ("Partition", "Account", "QOS", "TimeLimit", "NumNodes", "NumTasks", "Comment", "Nice", "JobName")
    assert {field: after[field] for field in same} == {field: before[field] for field in same}
    assert (after["Partition"], after["TimeLimit"], after["Nice"]) == ("low", "00:07:00", "3")
    assert after["Comment"].startswith("the")


@pytest.mark.product  # test_local.py has Ctrl-C, the test above how an attempt ends here
def test_ctrl_c_saves_and_stops_and_the_same_command_continues(cluster: Cluster, runs: Path) -> None:
    """In one allocation: interrupted, continued, and completed."""
    run = RunDirectory(runs / "run")
    pid = runs / "pid"
    script = here(cluster, run, *SCRIPT)
    started = f"env --default-signal=INT {shlex.join(script)}"  # which bash ignores in what it starts with &
    twice = f"({started} & echo $! > {pid}; wait $!; echo code $?); {shlex.join(here(cluster, run))}"
    shell = salloc(cluster, ["bash", "-c", twice])
    wait_for_step(run, 20)
    cluster.run(["kill", f"-{signal.SIGINT.value}", pid.read_text().strip()])
    words, _ = shell.communicate(timeout=90)
    assert "Saving and stopping" in words and "code 130" in words, words
    assert shell.returncode == 0, words
    (stopped,) = events_of(run, "stopped")
    assert stopped["cause"] == "interrupted"
    (resumed,) = events_of(run, "resumed")
    assert (resumed["step"], resumed["redone"]) == (stopped["step"], 0), story(run)
    assert "finished at step 200" in words


@pytest.mark.product
def test_a_failed_training_gives_its_exit_code_and_can_be_tried_again_there(cluster: Cluster, runs: Path) -> None:
    """The user starts the run again in the same allocation."""
    script, run = runs / "once.py", RunDirectory(runs / "run")
    script.write_text("import os, sys\nsys.exit(7 if os.environ['CLUSTERDDP_ATTEMPT'] == '0' else 0)\n")
    command = shlex.join(here(cluster, run, script, "--device", "cpu"))
    shell = salloc(cluster, ["bash", "-c", f"{command}; echo code $?; {command}"])
    words, _ = shell.communicate(timeout=60)
    assert "code 7" in words and shell.returncode == 0, words
    assert run.attempts() == [0, 1]


@pytest.mark.parametrize(
    ("around", "words"),
    [
        ("", "this shell is not in an allocation (SLURM_JOB_ID is not set)"),
        ("srun --partition=low --ntasks=1", "this shell is a task of job"),
        ("salloc --partition=low --nodes=2 --ntasks=3", "expected the same number of tasks on every node"),
    ],
)
def test_a_shell_outside_an_allocation_is_refused(cluster: Cluster, runs: Path, around: str, words: str) -> None:
    """With what to do instead; nothing is written."""
    run = RunDirectory(runs / "run")
    command = [*around.split(), *here(cluster, run, "jobs/digits.py", "--device", "cpu")]
    refused = cluster.run(command, cwd=cluster.source, check=False)
    assert refused.returncode != 0
    assert words in refused.stderr and "Traceback" not in refused.stderr
    assert not run.path.exists()
