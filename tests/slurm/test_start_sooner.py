"""What lets a job start sooner, on a real Slurm: estimates for several partitions and limits, and a shorter limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.trainings import Training, check_same_run, events_of
from tests.waiting import story

pytestmark = pytest.mark.product


def test_estimates_of_each_partition_and_limit_submit_nothing(cluster: Cluster, runs: Path) -> None:
    """Nodes that are taken for an hour are expected to be free after that."""
    taken = ["sbatch", "--parsable", "--partition=off", "--exclusive", f"--nodes={len(cluster.nodes)}", "--time=60"]
    job = cluster.run([*taken, "--output=/dev/null", "--wrap=sleep 600"]).stdout.strip()
    cluster.wait_job(job, {"RUNNING"})
    command = [cluster.python, "-m", "clusterddp", "submit", "tests/scripts/train.py", "--device", "cpu", "--when"]
    options = ["-p", "low,off,nosuch", "--time", "30", "--set", "time_min=10", "--run-dir", runs / "run"]
    refused = cluster.run([*command, *options], cwd=cluster.source, check=False)
    assert refused.returncode != 0 and refused.stdout == ""  # such a partition is known to be a mistake
    options[1] = "low,off"
    said = cluster.run([*command, *options], cwd=cluster.source).stdout.splitlines()
    assert [line.partition(": ")[0] for line in said] == [
        f"{name}, 0-00:{minutes}:00" for name in ("low", "off") for minutes in (30, 10)
    ]
    assert all("in 59 min" in line or "in 60 min" in line for line in said), said
    assert cluster.run(["squeue", "--noheader", "--format=%A"]).stdout.split() == [job]
    assert list(runs.iterdir()) == []


@pytest.fixture
def reserved(cluster: Cluster) -> Iterator[str]:
    """All nodes are reserved from two and a half minutes on."""
    name = "later"
    values = ["StartTime=now+150", "Duration=60", "Nodes=ALL", "Users=root", "Flags=IGNORE_JOBS"]
    cluster.root(["scontrol", "create", "reservation", f"ReservationName={name}", *values])
    yield name
    cluster.root(["scontrol", "delete", f"ReservationName={name}"], check=False)


def test_a_run_with_the_shortest_limit_that_slurm_may_give_stops_in_time_and_continues(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory, reserved: str
) -> None:
    """With its limit of 30 minutes, it would start after the reservation. Slurm starts it before, with less."""
    options = ["--time", "30", "--set", "time_min=2", "--set", "timeouts.notice_s=60"]
    training = Training.submit(cluster, runs, "--moments", "first step", options=options)
    training.wait_at_moment(0)
    assert cluster.job(training.job_id)["TimeLimit"] == "00:02:00"
    training.wait(lambda: events_of(training.run, "signal"), "the notice", 150)
    training.go(0)
    training.wait(lambda: events_of(training.run, "requeued"), "a requeue")
    cluster.root(["scontrol", "delete", f"ReservationName={reserved}"])
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training)
    assert events_of(training.run, "requeued")[0]["cause"] == "stopped before the time limit"
