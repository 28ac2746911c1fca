"""``stacks``, ``save``, ``stop`` and ``requeue`` from a login node of a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.trainings import STEPS, Training, check_same_run, events_of
from tests.waiting import story, wait_for_step

#: A login node that cannot reach the ports of the nodes, as behind a firewall.
CUT_OFF = (
    "import clusterddp.runs.request_client as asking; from clusterddp.cli.main import main; "
    "asking._reachable_name = lambda _: '127.0.0.1'; main()"
)


def test_a_run_in_the_queue_is_steered_from_the_login_node_and_keeps_its_bits(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """Stacks by both ways, a save, a requeue without a preemption, a stop that ends the job, a job that continues."""

    def output(*words: object, cut_off: bool = False) -> str:
        program = ["-c", CUT_OFF] if cut_off else ["-m", "clusterddp"]
        return cluster.run([cluster.python, *program, *words], cwd=cluster.source).stdout

    training = Training.submit(cluster, runs, "--pause", "2")
    run = training.run
    wait_for_step(run, 2)
    answer = json.loads(output("stacks", run, "--json", cut_off=True))
    assert sorted(rank for group in answer["stacks"] for rank in group["ranks"]) == [0, 1], answer
    assert "(n1" in output("stacks", run)
    saved = int(output("save", run).split()[1])
    assert (run.checkpoints / f"step-{saved:012d}.attempt-0.safetensors").exists()
    assert "is saved. The job is requeued" in output("requeue", run)
    assert "is already waiting in the queue" in output("requeue", run)
    training.wait(lambda: any(line["attempt"] == 1 for line in run.metrics()), "a step of attempt 1")
    assert "held until it is submitted again" in output("stop", run)
    assert cluster.wait_job(training.job_id, {"COMPLETED"})["Restarts"] == "1"
    assert "state     stopped (stopped by `clusterddp stop`)" in output("status", run)
    assert run.outcome() is None and run.attempts() == [0, 1], story(run)
    assert (run.newest_metrics() or {})["step"] < STEPS - 1
    training.hurry()
    training.job_id = Training.submit(cluster, runs, "--pause", "2").job_id
    assert training.finish() == "completed", story(run)
    check_same_run(run, uninterrupted_training)
    assert {event["redone"] for event in events_of(run, "resumed")} == {0}
