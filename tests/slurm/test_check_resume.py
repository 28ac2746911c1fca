"""``submit --check-resume`` on a cluster: in a job, in an allocation, and in a step of one."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import Cluster

CHECK = ("-m", "clusterddp", "submit", "--device", "cpu", "--check-resume")


def words(cluster: Cluster, steps: int, *shape: str, pause: float = 0.0, partition: str = "low") -> list[str]:
    """The command, on two nodes of a partition."""
    where = ["--partition", partition, "--nodes", "2", "--gpus", "1", *shape]
    script = ["tests/scripts/train.py", "--", "--steps", "40", "--pause", str(pause)]
    return [str(cluster.python), *CHECK, str(steps), *where, *script]


def test_the_check_runs_in_a_job_and_says_the_same_as_on_one_machine(cluster: Cluster, runs: Path) -> None:
    """On two nodes. Neither a run nor a job is left, and none is submitted to a partition that does not exist."""
    env = {"CLUSTERDDP_RUNS": str(runs)}
    refused = cluster.run(words(cluster, 6, partition="lwo"), cwd=cluster.source, env=env, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no partition 'lwo' on this cluster; available: cancel, high, low" in refused.stderr
    done = cluster.run(words(cluster, 6), cwd=cluster.source, env=env, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    assert f"submitted as job {job}" in done.stderr and f"job {job} runs on n[1-2]" in done.stderr
    assert "resume check: the same steps, interrupted after 2 and 4" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("no difference in 6 steps and two resumes (after 2 and 4 steps)")
    assert "on 2 ranks" in done.stderr.splitlines()[-1]
    assert list(runs.iterdir()) == []


def cancel(cluster: Cluster, job: str, process: subprocess.Popen[str]) -> None:
    cluster.run(["scancel", job])


def interrupt(cluster: Cluster, job: str, process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


def preempt(cluster: Cluster, job: str, process: subprocess.Popen[str]) -> None:
    cluster.preempt(seconds=1, nodes=3)


def preempt_at_once(cluster: Cluster, job: str, process: subprocess.Popen[str]) -> None:
    cluster.set_grace(0)
    preempt(cluster, job, process)


def wait_for_the_limit(cluster: Cluster, job: str, process: subprocess.Popen[str]) -> None:
    """A minute, from which the notice is taken."""


def training(cluster: Cluster, runs: Path, command: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A check, and its job, whose ranks train."""
    env, pipe = {"CLUSTERDDP_RUNS": str(runs)}, subprocess.PIPE
    process = cluster.popen(command, cwd=cluster.source, env=env, stdout=pipe, stderr=pipe)
    assert process.stdout is not None and process.stderr is not None
    job = process.stdout.readline().strip()
    trains = ".check-*/start-0/uninterrupted-steps/rank-1.jsonl"
    cluster.wait_for(job, lambda _: any(runs.glob(trains)), "to train")
    return process, job


UNFINISHED = "clusterddp: the check did not finish, and nothing was found out: "
BY_PREEMPTION = "; start it again, if there is one in a partition or QOS"


@pytest.mark.product
@pytest.mark.parametrize(
    ("act", "code", "said"),
    [
        (cancel, 75, f"{UNFINISHED}(job JOB was )?cancelled; start it again"),
        (interrupt, 130, "clusterddp: interrupted: job JOB is cancelled, and nothing was found out"),
        (preempt, 75, f"{UNFINISHED}preempted{BY_PREEMPTION}"),
        (preempt_at_once, 75, f"{UNFINISHED}(job JOB was preempted|preempted without grace){BY_PREEMPTION}"),
        (wait_for_the_limit, 75, f"{UNFINISHED}stopped before the time limit; start it again with a longer --time"),
    ],
)
def test_a_check_that_is_ended_says_so_and_leaves_nothing(
    cluster: Cluster,
    runs: Path,
    act: Callable[[Cluster, str, subprocess.Popen[str]], None],
    code: int,
    said: str,
) -> None:
    """Once its ranks train; by the job itself, if it has the time for that. The job does not run again."""
    limit = "1" if act is wait_for_the_limit else "5"
    process, job = training(cluster, runs, words(cluster, 39, "--time", limit, pause=3.0))
    act(cluster, job, process)
    try:
        lines = process.communicate(timeout=150)[1].splitlines()
    finally:
        process.kill()
    assert process.returncode == code, lines
    assert re.match(said.replace("JOB", job), lines[-1]), lines
    assert list(runs.iterdir()) == []
    assert cluster.wait_job(job, {"CANCELLED", "PREEMPTED", "FAILED", "TIMEOUT"})["Restarts"] == "0"


@pytest.mark.product
def test_a_check_that_an_administrator_requeues_starts_over(cluster: Cluster, runs: Path) -> None:
    process, job = training(cluster, runs, words(cluster, 6, pause=1.0))
    cluster.root(["scontrol", "update", f"jobid={job}", "requeue=1"])
    cluster.root(["scontrol", "requeue", job])
    try:
        said = process.communicate(timeout=150)[1]
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "resume check: the job was requeued; the check starts over" in said
    assert "no difference in 6 steps" in said.splitlines()[-1]
    assert list(runs.iterdir()) == []


@pytest.mark.product
@pytest.mark.parametrize("how", [("--local",), ("--here",)], ids=str)
def test_the_check_runs_in_an_allocation(cluster: Cluster, runs: Path, how: tuple[str, ...]) -> None:
    """In a step of it, which is how a local check gets a node's GPUs; and on all of its nodes."""
    if how == ("--local",):
        start = ["srun", "--partition=low", "--nodes=1", "--ntasks=1"]
    else:
        start = ["salloc", "--partition=low", "--nodes=2", "--ntasks-per-node=1"]
    check = [*start, cluster.python, *CHECK, "6", *how, "tests/scripts/train.py", "--", "--steps", 40]
    done = cluster.run(check, cwd=cluster.source, env={"CLUSTERDDP_RUNS": str(runs)}, timeout=180, check=False)
    assert (done.returncode, "no difference in 6 steps" in done.stderr) == (0, True), done.stderr
    assert ("on 2 ranks" in done.stderr) is (how == ("--here",))
    assert list(runs.iterdir()) == []
