"""Ranks, nodes, cables and the controller fail under a training on a real Slurm; docs/design/faults.md lists all.

Four nodes without accounting, and a SlurmdTimeout of two minutes: waiting for Slurm to give up a node takes long.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp.hostlist import expand
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.conftest import Clusters
from tests.trainings import Training, check_same_run, events_of
from tests.waiting import story, wait_for_step, wait_until

CLUSTER = ClusterConfig(nodes=4, cpus=2, slurmdbd=False, slurmd_timeout=120, release=Clusters.standard.release)
OFTEN = ["--set", "checkpoint.every=5 steps"]


def log_of(training: Training) -> str:
    """What the supervisors of the run's first job said."""
    job_id = events_of(training.run, "submitted")[0]["job"]
    return (training.run.logs / f"job-{job_id}.log").read_text()


def follow_resubmission(training: Training) -> None:
    """Until the run continues in a new job, which is then watched."""
    training.wait(lambda: events_of(training.run, "resubmitted"), "the run to continue in a new job")
    training.job_id = str(events_of(training.run, "resubmitted")[-1]["job"])


def held_requeue(cluster: Cluster, runs: Path) -> Path:
    """A folder with a scontrol that waits before it requeues: until ``RUNS/away`` is there."""
    folder = runs / "bin"
    folder.mkdir()
    scontrol = folder / "scontrol"
    scontrol.write_text(
        f"""#!/bin/bash
if [ "$1" = requeue ]; then
    touch {runs}/requeueing
    until [ -e {runs}/away ]; do sleep 0.05; done
fi
exec "$(PATH=${{PATH#*:}} command -v scontrol)" "$@"
"""
    )
    scontrol.chmod(0o755)
    return folder


def test_an_unreachable_controller_and_a_restarted_slurmd_cost_nothing(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """The requeue is retried until it is answered; status retries, and then shows what the run's files say."""
    path = f"{held_requeue(cluster, runs)}:{cluster.environment['PATH']}"
    # Where the job in `high` starts only after the requeue, the attempts before that are short.
    moments = ",".join(["first step", *["last step"] * 4])
    training = Training.submit(cluster, runs, "--moments", moments, "--pause", "0.3", env={"PATH": path})
    training.wait_at_moment(0)
    high = training.preempt()
    training.go(0)
    wait_until(lambda: (runs / "requeueing").exists(), f"the requeue\n{story(training.run)}")
    cluster.stop_controller()
    (runs / "away").touch()
    wait_until(lambda: "retrying in 0.5 s" in log_of(training), "the requeue to fail", 30)
    cluster.start_controller()
    training.wait(lambda: cluster.job(high)["JobState"] == "COMPLETED", "the job in `high` to be over")
    # It may have started after the requeue only, and have preempted attempt 1, too.
    training.wait_for_a_step_of(len(events_of(training.run, "requeued")))
    cluster.stop_controller()
    command = [cluster.python, "-m", "clusterddp", "status", training.run.path]
    status = cluster.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    before = training.run.metrics()[-1]["step"]
    wait_for_step(training.run, before + 1)
    assert status.stderr is not None
    assert "retrying in 1 s: `squeue " in status.stderr.readline()
    cluster.start_controller()
    assert f"state     job {training.job_id} (RUNNING on n[1-2])" in status.communicate(timeout=60)[0]
    cluster.restart_slurmd("n2")
    for attempt in range(1, 5):
        training.go(attempt)
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training)


@pytest.mark.product
def test_a_node_whose_ranks_die_twice_is_not_used_a_third_time(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """Restarted in place once; then the run continues in a new job elsewhere, with a text for the administrator. A job
    that the user submits leaves the node out, too."""
    training = Training.submit(cluster, runs, "--pause", "0.2", options=OFTEN)
    for attempt, signum in enumerate((signal.SIGKILL, signal.SIGSEGV)):
        training.wait_for_a_step_of(attempt)
        (victim,) = training.ranks_on("n2")
        victim.kill(signum)
        training.wait_for_attempt(attempt + 1)
    follow_resubmission(training)
    training.wait_for_a_step_of(2)
    cluster.run([cluster.python, "-m", "clusterddp", "stop", training.run.path])
    assert cluster.wait_job(training.job_id, {"COMPLETED"})["ExcNodeList"] == "n2"
    training = Training.submit(cluster, runs, "--pause", "0.2", options=OFTEN)
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training, redone=True)
    nodes = [expand(event["nodes"]) for event in events_of(training.run, "started")]
    assert nodes[0] == nodes[1] == ["n1", "n2"]
    assert "n2" not in set().union(*nodes[2:])
    assert cluster.job(training.job_id)["ExcNodeList"] == "n2"
    log = log_of(training)
    assert "rank 1 (n2) was killed by SIGKILL. Unless you sent it" in log
    assert re.search(
        r"rank 1 \(n2\) was killed by signal 11 \(SIGSEGV\).*Fatal Python error: Segmentation fault", log, re.S
    )
    assert re.search(r"as a result: rank 0 \(n1\) ", log)
    shown = cluster.run([cluster.python, "-m", "clusterddp", "status", training.run.path]).stdout
    assert "the next jobs of this run exclude n2 (failed 2 times) for 24 hours" in shown
    assert "Node n2 caused 2 failures in one of our training runs:" in shown


@pytest.mark.parametrize(
    "closes",
    [
        pytest.param(False, id="power failure"),
        pytest.param(True, id="reboot", marks=pytest.mark.product),  # test_spares.py has one
    ],
)
def test_a_dead_node_is_detected_and_the_run_continues_without_it(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory, closes: bool
) -> None:
    """Long before Slurm gives it up: its power fails, and no connection is closed, or it is rebooted, and all are."""
    training = Training.submit(cluster, runs, "--pause", "0.1", options=OFTEN)
    wait_for_step(training.run, 7)
    if not closes:
        cluster.cut("n2")
    cluster.kill_node("n2")
    wait_until(lambda: events_of(training.run, "node_lost"), f"the loss to be noticed\n{story(training.run)}", 30)
    wait_until(lambda: not training.ranks_on("n1"), f"the ranks on n1 to end\n{story(training.run)}", 60)
    follow_resubmission(training)
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training, redone=True)
    assert "attempt 0: node n2 no longer responds" in log_of(training)
    assert "n2" not in expand(events_of(training.run, "started")[1]["nodes"])
    assert events_of(training.run, "rank_failed")[0]["error"] == "was lost because node n2 no longer responds"


@pytest.mark.product
def test_two_nodes_that_die_at_once_are_both_recorded(cluster: Cluster, runs: Path) -> None:
    """The second falls silent after the first, while the ranks are told to exit and srun is being abandoned."""
    training = Training.submit(cluster, runs, "--pause", "0.3", options=[*OFTEN, "--nodes", "3"])
    wait_for_step(training.run, 7)
    cluster.cut("n2")
    time.sleep(1.5)  # how much later
    cluster.cut("n3")
    for node in ("n2", "n3"):
        cluster.kill_node(node)
    training.wait(lambda: events_of(training.run, "resubmitted"), "the run to continue in a new job")
    assert [event["node"] for event in events_of(training.run, "node_lost")] == ["n2", "n3"], story(training.run)
    assert re.search(r"also failed: rank \d \(n\d\) was lost because node n[23] no longer responds", log_of(training))
    (refused,) = events_of(training.run, "not_excluded")
    assert refused["reason"] == "without n2 and n3 the partition has 2 usable nodes, but the run needs 3"
    done = cluster.run([cluster.python, "-m", "clusterddp", "cancel", training.run.path], check=False)
    jobs = cluster.root(["scontrol", "show", "job"]).stdout + cluster.root(["sinfo", "-N", "-l"]).stdout
    assert done.returncode == 0, done.stdout + done.stderr + jobs


def test_a_cut_that_heals_a_slow_network_and_a_requeue_after_completion_cost_nothing(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """The ranks wait and continue: one attempt, no repeated step."""
    training = Training.submit(cluster, runs, "--pause", "0.1")
    wait_for_step(training.run, 3)
    cluster.cut("n2")
    time.sleep(4)  # the fault's length
    cluster.heal("n2")
    slow = "root tbf rate 300kbit burst 4kb latency 300ms".split()
    cluster.root(["tc", "qdisc", "add", "dev", cluster.cable("n2"), *slow])
    try:
        assert training.finish() == "completed", story(training.run)
    finally:
        cluster.root(["tc", "qdisc", "del", "dev", cluster.cable("n2"), "root"])
    check_same_run(training.run, uninterrupted_training)
    assert training.run.attempts() == [0]
    assert not events_of(training.run, "node_lost")
    cluster.wait_job(training.job_id, {"COMPLETED"})
    history = training.run.events()
    cluster.root(["scontrol", "requeue", training.job_id])  # a run that is over trains no more
    again = lambda: cluster.job(training.job_id)["Restarts"] == "1"  # noqa: E731
    training.wait(lambda: again() and cluster.job(training.job_id)["JobState"] == "COMPLETED", "the second end")
    assert (training.run.events(), training.run.attempts()) == (history, [0])
    assert "has already completed at step 40\n" in log_of(training)


@pytest.mark.product  # unit/test_verdict.py has srun's words
def test_a_rank_that_fills_its_jobs_memory_is_reported_as_out_of_memory_and_all_ranks_restart_in_place(
    clusters: Clusters, runs_on: Callable[[Cluster], Path], uninterrupted_training: RunDirectory
) -> None:
    """Slurm's limit is a cgroup's: the kernel kills the rank, and srun reports the cause."""
    cluster = clusters.get(dataclasses.replace(CLUSTER, memory_limits=True))
    try:
        training = Training.submit(cluster, runs_on(cluster), "--fill-at", "7", options=[*OFTEN, "--mem", "1500M"])
        assert training.finish() == "completed", story(training.run)
        told = "rank 1 (n2) was killed because the job ran out of memory. Request more with --mem"
        assert told in log_of(training)
        assert training.run.attempts() == [0, 1]
        assert len({event["job"] for event in events_of(training.run, "started")}) == 1
        check_same_run(training.run, uninterrupted_training, redone=True)
    finally:
        cluster.drain_jobs()
