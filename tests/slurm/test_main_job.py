"""The main job, on a real Slurm: a preempted training is requeued and ends like an undisturbed one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import WAITED
from clusterddp.history.codec import sentence
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.histories import event_of
from tests.runs_on_disk import outcome_of
from tests.waiting import differing, final_state, story, wait_for_outcome, wait_for_step, wait_until

STEPS = 200
SCRIPT = ["tests/scripts/train.py"]


def submit(cluster: Cluster, run: RunDirectory, *options: str, check: bool = True) -> Any:
    command = [cluster.python, "-m", "clusterddp.submit", "--run-dir", run.path, *options]
    return cluster.run(command, cwd=cluster.source, check=check)


def arguments(steps: int = STEPS) -> list[str]:
    """Of the script, whose steps wait rather than compute, so that there is time to interrupt them."""
    return ["--steps", str(steps), "--pause", "0.02"]


def job(steps: int = STEPS) -> list[str]:
    return [*SCRIPT, *"--nodes 2 --gpus 1 --device cpu --partition low --".split(), *arguments(steps)]


@pytest.fixture(scope="module")
def uninterrupted(clusters: Any) -> RunDirectory:
    """The run without any preemption, on the same cluster."""
    cluster = clusters.get(clusters.standard)
    run = RunDirectory(cluster.scratch / "uninterrupted")
    submit(cluster, run, *job())
    assert wait_for_outcome(run) == "completed", story(run)
    return run


def check_each_step_once(run: RunDirectory) -> None:
    assert [line["step"] for line in run.metrics()] == list(range(STEPS)), story(run)
    every_line = sorted(line["step"] for line in read_lines(run.metrics_file))
    assert every_line == list(range(STEPS)), "steps were redone"


def check_same_run(run: RunDirectory, reference: RunDirectory) -> None:
    """Every step exactly once, the same losses, the same weights and optimizer to the last bit."""
    check_each_step_once(run)
    assert [line["loss"] for line in run.metrics()] == [line["loss"] for line in reference.metrics()]
    assert differing(final_state(run), final_state(reference)) == []


def preempt_in_training(cluster: Cluster, run: RunDirectory, at_step: int) -> str:
    """Waits until the run is in its steps, then lets a job in `high` take the nodes for a moment."""
    wait_for_step(run, at_step)
    return cluster.preempt(seconds=1)


@pytest.mark.product  # test_preemption.py preempts a run at every moment, and compares as much
@pytest.mark.parametrize("grace", [20, 0])
def test_a_preempted_run_is_requeued_and_is_the_same_run(
    cluster: Cluster, runs: Path, uninterrupted: RunDirectory, grace: int
) -> None:
    """The main promise: requeued automatically, each step exactly once, the weights equal to the last bit."""
    cluster.set_grace(grace)
    run = RunDirectory(runs / "run")
    job_id = submit(cluster, run, *job()).stdout.strip()
    preempt_in_training(cluster, run, 20)
    assert wait_for_outcome(run) == "completed", story(run)
    outcome = outcome_of(run)
    assert outcome is not None
    assert (outcome["step"], outcome["attempts"]) == (STEPS, 2), story(run)
    ended_once(cluster, job_id, run)
    check_same_run(run, uninterrupted)


def ended_once(cluster: Cluster, job_id: str, run: RunDirectory) -> None:
    """The job is over after its second start; 24.11 starts it a third time, which finds the outcome and does nothing.

    From 24.05 on, a requeue within the grace leaves a mark on the job, and its next end counts as preempted, too.
    """
    cluster.wait_job(job_id, {"COMPLETED"})
    assert run.attempts() == [0, 1]


def test_a_scancelled_run_ends_and_never_runs_again(cluster: Cluster, runs: Path) -> None:
    """Saved, over, and not restarted: neither by Slurm, nor by hand, nor by submitting it again."""
    run = RunDirectory(runs / "run")
    job_id = submit(cluster, run, *job(100_000)).stdout.strip()
    wait_for_step(run, 20)
    cluster.run(["scancel", job_id])
    assert wait_for_outcome(run) == "cancelled", story(run)
    assert cluster.wait_job(job_id, {"CANCELLED"})["Restarts"] == "0"
    again = submit(cluster, run, check=False)
    assert again.returncode == 1
    assert "was cancelled" in again.stderr
    by_hand = cluster.run(["sbatch", "--parsable", run.batch_script]).stdout.strip()
    cluster.wait_job(by_hand, {"FAILED"})
    assert run.attempts() == [0]


def test_clusterddp_cancel_ends_a_pending_run_for_good(cluster: Cluster, runs: Path) -> None:
    """No supervisor is there to write the outcome, so the command does."""
    blocker = cluster.preempt(seconds=300)
    cluster.wait_job(blocker, {"RUNNING"})
    run = RunDirectory(runs / "run")
    job_id = submit(cluster, run, *job()).stdout.strip()
    cluster.run([cluster.python, "-m", "clusterddp", "cancel", run.path])
    assert cluster.wait_job(job_id, {"CANCELLED"})
    outcome = outcome_of(run)
    assert outcome is not None
    assert (outcome["state"], outcome["attempts"]) == ("cancelled", 0)


@pytest.mark.product  # test_fencing.py starts the file of a run by hand
def test_job_sbatch_by_hand_starts_continues_and_completes_the_run(
    cluster: Cluster, runs: Path, uninterrupted: RunDirectory
) -> None:
    """The file that submit writes suffices: here it continues a run that was stopped by a signal."""
    run = RunDirectory(runs / "run")
    job_id = submit(cluster, run, *job()).stdout.strip()
    wait_for_step(run, 20)
    cluster.run(["scancel", "--signal=USR2", job_id])
    cluster.wait_job(job_id, {"COMPLETED"})
    assert run.outcome() is None, story(run)
    by_hand = cluster.run(["sbatch", "--parsable", run.batch_script], cwd="/").stdout.strip()
    preempt_in_training(cluster, run, 60)
    assert wait_for_outcome(run) == "completed", story(run)
    cluster.wait_job(by_hand, {"COMPLETED"})
    check_same_run(run, uninterrupted)


def sbatch_template(cluster: Cluster, run: RunDirectory, *script: str) -> str:
    options = ["--partition=low", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1"]
    variables = f"--export=ALL,RUN={run.path},DEVICE=cpu,PYTHON={cluster.python}"
    log = f"--output={run.path.parent}/job.log"
    command = ["sbatch", "--parsable", *options, variables, log, "slurm/train.sbatch", *script]
    return cluster.run(command, cwd=cluster.source).stdout.strip()


@pytest.mark.product  # test_here.py preempts a user's own script, the next test has the template
def test_the_template_survives_a_preemption(cluster: Cluster, runs: Path) -> None:
    """For those who submit by hand: by the same supervisor."""
    run = RunDirectory(runs / "run")
    job_id = sbatch_template(cluster, run, *SCRIPT, *arguments())
    preempt_in_training(cluster, run, 20)
    assert wait_for_outcome(run) == "completed", story(run)
    ended_once(cluster, job_id, run)
    check_each_step_once(run)


def test_the_template_ends_with_the_trainings_exit_code(cluster: Cluster, runs: Path) -> None:
    """A script that exits with 7 makes the job fail with 7."""
    script = runs / "seven.py"
    script.write_text("import sys\nsys.exit(7)\n")
    job_id = sbatch_template(cluster, RunDirectory(runs / "run"), str(script))
    assert cluster.wait_job(job_id, {"FAILED"})["ExitCode"] == "7:0"


@pytest.mark.product  # the next test has a script without torch
@pytest.mark.parametrize("grace", [20, 0])
def test_a_script_that_does_not_use_clusterddp_is_restarted(cluster: Cluster, runs: Path, grace: int) -> None:
    """TERM ends it; the supervisor requeues the job, and the script resumes from its own file."""
    cluster.set_grace(grace)
    run = RunDirectory(runs / "run")
    definition = runs / "plain.yaml"
    script = cluster.source / "tests" / "scripts" / "plain_ddp.py"
    definition.write_text(
        f"{{script: {script}, args: [{runs}/own.pt, 60, 0.1], "
        f"resume: {{checkpoint: {runs}/own.pt, args: [--again]}}, "
        "nodes: 2, gpus_per_node: 1, device: cpu, partition: low}"
    )
    submit(cluster, run, str(definition))
    wait_until(lambda: (runs / "own.pt").exists(), f"the script's first save\n{story(run)}")
    cluster.preempt(seconds=1)
    assert wait_for_outcome(run) == "completed", story(run)
    assert run.attempts() == [0, 1]
    first, second = ((run.attempt_logs(attempt) / "rank-1.out").read_text() for attempt in (0, 1))
    assert "rank 1 (local 0) of 2 starts at step 0 with []" in first
    assert "rank 1 is done" not in first
    assert "with ['--again']" in second
    assert "starts at step 0" not in second
    assert "rank 1 is done" in second


def test_a_script_resumes_from_its_own_checkpoint_once_it_has_one(cluster: Cluster, runs: Path) -> None:
    """Preempted before its first checkpoint, it starts from the beginning; preempted again, it continues."""
    cluster.set_grace(20)
    run = RunDirectory(runs / "run")
    script = str(cluster.source / "tests" / "scripts" / "like_repositories.py")
    shape = ["--nodes", "2", "--gpus", "1", "--device", "cpu", "-p", "low", "--preset", "nanogpt"]
    submit(cluster, run, script, *shape, "--", "--wait", "0:5,1:15")
    for place in ("reached-0-5", "reached-1-15"):
        wait_until((run.path / "out" / place).exists, f"{place}\n{story(run)}")
        cluster.preempt(seconds=1)
    assert wait_for_outcome(run) == "completed", story(run)
    assert run.attempts() == [0, 1, 2], story(run)
    resumes = [sentence(event_of(event)) or "" for event in run.events() if event["event"] == "own_resume"]
    assert resumes[0] == (
        "attempt 1: no complete checkpoint matches out/ckpt.pt. The script starts from the beginning. If it has saved "
        "a checkpoint, correct `resume.checkpoint` and submit with --change"
    )
    assert resumes[1].startswith("attempt 2: the newest checkpoint of the script is out/ckpt.pt, saved ")
    assert [event["file"] for event in run.events() if event["event"] == "own_checkpoint_read"] == ["out/ckpt.pt"]
    assert "starts at step 10\ndone with weight 30" in (run.attempt_logs(2) / "rank-0.out").read_text()


def test_a_job_that_ends_before_its_supervisor_starts_says_why(cluster: Cluster, runs: Path) -> None:
    """Its log has the reason: the interpreter is not on the nodes, say."""
    run = RunDirectory(runs / "early")
    job_id = submit(cluster, run, "--set", "setup=[exec /nowhere/python]", *job()).stdout.strip()
    cluster.wait_job(job_id, {"FAILED"})
    words = f"job {job_id} ended (FAILED) before it started the supervisor"
    for command, code in ((["status"], 0), (["wait", "--resubmit"], WAITED["failed"])):
        done = cluster.run([cluster.python, "-m", "clusterddp", *command, run.path], check=False)
        assert done.returncode == code and words in done.stdout + done.stderr
        assert "/nowhere/python: " in done.stdout + done.stderr
    assert "/nowhere/python: " in cluster.run([cluster.python, "-m", "clusterddp", "logs", run.path]).stdout


@pytest.mark.product  # test_fencing.py has the refusal, and its words
def test_a_run_that_another_job_holds_is_refused_with_its_name(cluster: Cluster, runs: Path) -> None:
    """The message names the holder, its state and its nodes."""
    run = RunDirectory(runs / "run")
    job_id = submit(cluster, run, *job(100_000)).stdout.strip()
    wait_for_step(run, 10)
    cluster.wait_job(job_id, {"RUNNING"})  # ranks may train while it is still CONFIGURING
    refused = submit(cluster, run, check=False)
    assert refused.returncode == 1
    assert f"held by job {job_id} (RUNNING on n[1-2])" in refused.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["jobs/digits.yaml", "-p", "lwo"], "no partition 'lwo' on this cluster. Available: cancel, high, low, off"),
        (["jobs/digits.yaml", "--device", "cuda", "--gpus", "8"], "at most 2 GPUs per node"),
        (["jobs/digits.yaml", "--nodes", "9"], "has 3 nodes, fewer than --nodes 9"),
        (["jobs/digit.yaml"], "jobs/digit.yaml"),
        (["train.py"], "script 'train.py' not found"),
        (["jobs/digits.yaml", "--set", "partitoin=low"], "Did you mean 'partition'"),
        (["jobs/digits.yaml", "--account", "nobody"], "account"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_sentence_and_leaves_nothing(
    cluster: Cluster, runs: Path, options: list[str], words: str
) -> None:
    """Nothing submitted, nothing written, exit code not 0, no traceback."""
    run = RunDirectory(runs / "run")
    refused = submit(cluster, run, *options, check=False)
    assert refused.returncode != 0
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not run.path.exists()
    assert cluster.run(["squeue", "-h"]).stdout == ""


def test_what_an_interactive_job_set_does_not_leak_into_the_new_one(cluster: Cluster, runs: Path) -> None:
    """Submitted from inside an allocation of one node and task, it still gets two nodes and four ranks."""
    run = RunDirectory(runs / "run")
    script = runs / "names.py"
    script.write_text("import os\nprint(*(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')))\n")
    shape = "--nodes 2 --gpus 2 --device cpu --partition low".split()
    words = [cluster.python, "-m", "clusterddp.submit", "--run-dir", run.path, script, *shape]
    command = shlex.join(map(str, words))
    cluster.run(["salloc", "-Q", "-N1", "-n1", "-p", "low", "--mem=1G", "bash", "-c", command], cwd=cluster.source)
    assert wait_for_outcome(run) == "completed", story(run)
    logs = {path.name: path.read_text() for path in run.attempt_logs(0).glob("rank-*.out")}
    assert logs == {f"rank-{rank}.out": f"{rank} {rank % 2} 4\n" for rank in range(4)}
