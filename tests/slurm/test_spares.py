"""Spare nodes on a real Slurm: a run whose node is lost, fails or is drained continues in the same job."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp.hostlist import expand
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from tests.cluster import Cluster, ClusterConfig
from tests.conftest import Clusters
from tests.slurm.test_world_size import SCRIPT, SHAPE, local, submit
from tests.trainings import STEPS, Training, check_same_run, events_of
from tests.waiting import story, wait_for_step

#: Four nodes for the run and a spare one, and a node that a new job can have instead.
CLUSTER = ClusterConfig(nodes=6, cpus=2, slurmdbd=False, slurmd_timeout=20, release=Clusters.standard.release)
INTERVAL = 5
SPARE = ["--spare-nodes", "1", "--set", f"checkpoint.every={INTERVAL} steps"]


def reasons(training: Training) -> list[str]:
    """Why ranks have moved."""
    return [event["why"] for event in events_of(training.run, "moved")]


def nodes_of(training: Training) -> list[list[str]]:
    """The nodes of each attempt's ranks."""
    return [expand(event["nodes"]) for event in events_of(training.run, "started")]


def check_continued(training: Training, reference: RunDirectory, *, steps: int = INTERVAL) -> None:
    """The run completed in one job, with the same bits, and has repeated few steps."""
    assert training.finish() == "completed", story(training.run)
    assert {event["job"] for event in events_of(training.run, "started")} == {training.job_id}
    assert all(event["redone"] <= steps for event in events_of(training.run, "resumed")), story(training.run)
    check_same_run(training.run, reference, redone=steps > 0)


def die(cluster: Cluster, node: str) -> None:
    """Its power fails: no connection is closed."""
    cluster.cut(node)
    cluster.kill_node(node)


def drain(training: Training, node: str, check: bool = True) -> str:
    """What ``clusterddp drain`` prints, or says of a refusal."""
    cluster = training.cluster
    command = [cluster.python, "-m", "clusterddp", "drain", training.run.path, node]
    done = cluster.run(command, cwd=cluster.source, check=check)
    return done.stdout if check else done.stderr


@pytest.mark.product  # test_faults.py loses a node as silently, the next one moves
def test_ranks_of_a_lost_node_continue_on_the_spare_one_in_the_same_job(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """Its cable is cut: its ranks live on until they see the next attempt. Slurm takes it from the job later."""
    training = Training.submit(cluster, runs, "--pause", "0.2", options=SPARE)
    wait_for_step(training.run, 7)
    cluster.cut("n2")
    training.wait(lambda: len(nodes_of(training)) == 2, "attempt 1", 40)
    training.wait(lambda: not training.ranks_on("n2"), "the ranks on n2 to end")
    check_continued(training, uninterrupted_training)
    assert nodes_of(training) == [["n1", "n2"], ["n1", "n3"]]
    assert reasons(training) == ["node n2 is lost, so the ranks continue on the spare node n3"]


@pytest.mark.product  # the next test moves to a spare node, test_faults.py loses one
def test_a_node_whose_processes_end_is_left_without_an_attempt_in_between(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """As in a reboot: the connections are closed. A restart there would wait until Slurm gives the node up."""
    training = Training.submit(cluster, runs, "--pause", "0.2", options=SPARE)
    wait_for_step(training.run, 7)
    cluster.kill_node("n2")
    training.wait(lambda: len(nodes_of(training)) == 2, "attempt 1", 40)
    check_continued(training, uninterrupted_training)
    assert nodes_of(training) == [["n1", "n2"], ["n1", "n3"]]
    assert reasons(training) == ["node n2 is lost, so the ranks continue on the spare node n3"]


def test_a_drained_node_is_left_without_repeating_a_step(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """All ranks stop after the same step. Without a further spare node the order is refused, and training continues."""
    training = Training.submit(cluster, runs, "--pause", "2", options=SPARE)
    wait_for_step(training.run, 2)
    assert "not drained: no rank runs on n3, only on n1, n2" in drain(training, "n3", check=False)
    assert "estarting all ranks in place" in drain(training, "n1")  # rank 0's, and the supervisor's
    training.wait_for_a_step_of(1)
    refused = drain(training, "n2", check=False)
    assert "not drained: the job has 1 node left, but the run needs 2. `clusterddp requeue" in refused
    training.hurry()
    check_continued(training, uninterrupted_training, steps=0)
    assert nodes_of(training) == [["n1", "n2"], ["n2", "n3"]]


@pytest.mark.product
def test_a_node_that_hangs_is_left_for_the_spare_one(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """Its ranks are stopped, with their heartbeats; Slurm still gets answers from it."""
    hangs = [*SPARE, "--set", "watchdog.step_s=4"]
    training = Training.submit(cluster, runs, "--pause", "0.2", options=hangs)
    wait_for_step(training.run, 10)  # the attempt is past its start, for which the watchdog waits longer
    for rank in training.ranks_on("n2"):
        rank.kill(signal.SIGSTOP)
    check_continued(training, uninterrupted_training)
    assert nodes_of(training) == [["n1", "n2"], ["n1", "n3"]]
    assert reasons(training) == ["node n2 hangs, so the ranks continue on the spare node n3"]


@pytest.mark.product
@pytest.mark.parametrize("spares", [1, 0], ids=["spare", "none"])
@pytest.mark.parametrize("reboots", [False, True], ids=["slurmstepd", "reboot"])
def test_a_node_whose_step_slurm_does_not_see_end_is_left_once_srun_has_waited_for_it(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory, spares: int, reboots: bool
) -> None:
    """slurmstepd was killed, or the whole node, which boots before Slurm gives it up. After 5 s in place of a minute.

    Its slurmd answers, and slurmctld never learns that the step has ended there. Without a spare node the job is
    requeued, so that no step is left.
    """
    site = runs / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import clusterddp.supervisor.decide as decide\ndecide.STEP_S = 5.0\n")
    options = ["--spare-nodes", str(spares), "--set", f"checkpoint.every={INTERVAL} steps"]
    env = {"PYTHONPATH": f"{site}:{cluster.source}"}
    training = Training.submit(cluster, runs, "--pause", "0.2", options=options, env=env)
    wait_for_step(training.run, 7)
    if reboots:
        cluster.kill_node("n2")
        cluster.restart_slurmd("n2")
    else:
        for process in cluster.processes("n2"):
            if process.command().startswith("slurmstepd") or process in training.ranks_on("n2"):
                process.kill()
    training.wait(lambda: len(nodes_of(training)) == 2, "attempt 1", 40)
    check_continued(training, uninterrupted_training)
    last = ["n1", "n3"] if spares else ["n1", "n2"]
    assert nodes_of(training) == [["n1", "n2"], ["n1", "n2"], last]
    (busy,) = (event for event in training.run.events() if event.get("cause") == Cause.NODES_BUSY.value)
    assert busy["event"] == ("restarted" if spares else "requeued"), story(training.run)


@pytest.mark.product
def test_a_node_whose_rank_fails_twice_is_left_for_the_spare_one(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """The first time all ranks restart on the same nodes."""
    training = Training.submit(cluster, runs, "--pause", "0.2", options=SPARE)
    for attempt in range(2):
        training.wait_for_a_step_of(attempt)
        training.ranks_on("n2")[0].kill(signal.SIGKILL)
        training.wait_for_attempt(attempt + 1)
    check_continued(training, uninterrupted_training)
    assert nodes_of(training) == [["n1", "n2"], ["n1", "n2"], ["n1", "n3"]]
    assert reasons(training) == ["node n2 failed repeatedly in this run, so the ranks continue on the spare node n3"]


@pytest.mark.product
def test_a_dead_spare_node_is_passed_over(cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory) -> None:
    """It dies first, and Slurm has noticed. Then a node with ranks dies: its power fails."""
    options = [*SPARE, "--spare-nodes", "2"]
    training = Training.submit(cluster, runs, "--moments", "last step", options=options)
    wait_for_step(training.run, 2)
    die(cluster, "n3")
    state = ["sinfo", "--noheader", "--nodes=n3", "--format=%T"]
    training.wait(lambda: "*" in cluster.root(state).stdout, "n3 to be known as dead")
    die(cluster, "n2")
    check_continued(training, uninterrupted_training)
    assert nodes_of(training) == [["n1", "n2"], ["n1", "n4"]]
    why = "node n2 is lost and the spare node n3 cannot be used, so the ranks continue on the spare node n4"
    assert reasons(training) == [why]


@pytest.mark.product
def test_two_nodes_that_die_at_once_are_replaced_by_two_spare_ones(cluster: Cluster, runs: Path) -> None:
    """In one restart, unless the second is noticed only while the ranks start again."""
    options = [*SPARE, "--nodes", "3", "--spare-nodes", "2"]
    training = Training.submit(cluster, runs, "--pause", "0.2", options=options)
    wait_for_step(training.run, 7)
    for node in ("n2", "n3"):
        die(cluster, node)
    assert training.finish() == "completed", story(training.run)
    assert {event["job"] for event in events_of(training.run, "started")} == {training.job_id}
    assert nodes_of(training)[-1] == ["n1", "n4", "n5"]
    assert [line["step"] for line in training.run.metrics()] == list(range(STEPS))


@pytest.mark.product
def test_without_a_spare_node_that_is_left_the_run_continues_in_a_new_job(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """A node and the spare one die at once: that the spare one is dead is seen when no rank starts there."""
    training = Training.submit(cluster, runs, "--pause", "0.2", options=SPARE)
    wait_for_step(training.run, 7)
    for node in ("n2", "n3"):
        die(cluster, node)
    training.wait(lambda: events_of(training.run, "resubmitted"), "a new job", 90)
    training.job_id = str(events_of(training.run, "resubmitted")[-1]["job"])
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training, redone=True)
    assert not {"n2", "n3"} & {*nodes_of(training)[-1]}


@pytest.mark.parametrize(
    ("lose", "lost"),
    [
        pytest.param(Cluster.cut, ["n1"], marks=pytest.mark.product, id="cut off"),
        pytest.param(die, ["n1"], id="dead"),
        pytest.param(die, ["n1", "n2"], marks=pytest.mark.product, id="dead together with a guard's node"),
    ],
)
def test_a_job_that_loses_its_batch_host_is_requeued(
    cluster: Cluster,
    runs: Path,
    uninterrupted_training: RunDirectory,
    lose: Callable[[Cluster, str], None],
    lost: list[str],
) -> None:
    """Slurm leaves it RUNNING on the other nodes, without a batch step; a guard on one of them requeues it."""
    training = Training.submit(cluster, runs, "--pause", "0.2", options=SPARE)
    wait_for_step(training.run, 7)
    for node in lost:
        lose(cluster, node)
    training.wait(lambda: 1 in training.run.attempts(), "attempt 1", 150)
    training.wait(lambda: not training.ranks_on("n1"), "the ranks on n1 to end", 60)
    check_continued(training, uninterrupted_training)
    assert cluster.job(training.job_id)["Restarts"] == "1"
    assert not {*lost} & {*nodes_of(training)[1]}


@pytest.mark.product
def test_a_run_with_a_range_of_nodes_continues_on_fewer_and_grows_again_in_its_next_job(
    cluster: Cluster, runs: Path, tmp_path: Path
) -> None:
    """In the same job at first, with the same global batches in the same order: the losses agree but for rounding."""
    reference, run = RunDirectory(tmp_path / "reference"), RunDirectory(runs / "run")
    alone = local(reference, SCRIPT, "--nodes", "2", *SHAPE, "--", "--batch-size", "12")
    assert alone.returncode == 0, alone.stderr
    often = ["--set", f"checkpoint.every={INTERVAL} steps"]
    training = Training(cluster, runs, run, submit(cluster, run, "2-3", "--pause", "0.1", options=often))
    wait_for_step(run, 7)
    cluster.cut("n2")
    training.wait_for_a_step_of(1)
    assert {event["job"] for event in events_of(run, "started")} == {training.job_id}
    assert reasons(training) == ["node n2 is lost, so the run continues on 2 nodes"]
    cluster.run([cluster.python, "-m", "clusterddp", "requeue", run.path], cwd=cluster.source)
    training.job_id = str(events_of(run, "resubmitted")[-1]["job"])
    assert training.finish() == "completed", story(run)
    assert [event["ranks"] for event in events_of(run, "started")] == [3, 2, 3]
    assert events_of(run, "resumed")[0]["redone"] <= INTERVAL
    losses, wanted = ([(line["step"], line["loss"]) for line in one.metrics()] for one in (run, reference))
    assert losses == [(step, pytest.approx(loss, rel=1e-4)) for step, loss in wanted]
