"""Preemption, time limits and scancel on a real Slurm at every moment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from clusterddp.history.words import NOT_CONTINUED
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.runs_on_disk import outcome_of
from tests.trainings import MOMENTS, Training, check_same_run, events_of, preempt_at_each
from tests.waiting import story, wait_for_step, wait_until

#: Rendezvous and the first step are in test_preemption_variants.py, an evaluation in ranks/test_resume.py.
TYPICAL = ["save", "last step", "after the end"]
EVERY = [pytest.param(grace, MOMENTS, id=f"all-{grace}", marks=pytest.mark.product) for grace in (20, 0)]


@pytest.mark.parametrize(("grace", "moments"), [pytest.param(20, TYPICAL, id="20"), *EVERY])
def test_a_run_preempted_at_every_moment_loses_and_repeats_nothing(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory, grace: int, moments: list[str]
) -> None:
    """One run, a preemption at a different moment of each attempt; the last one comes after the last step.

    Without a grace: test_preemption_variants.py, at two moments.
    """
    cluster.set_grace(grace)
    training = Training.submit(cluster, runs, "--moments", ",".join(moments))
    preempt_at_each(training, moments)
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training)
    redone = [event["redone"] for event in training.run.events() if event["event"] == "resumed" and "redone" in event]
    assert redone
    assert set(redone) == {0}


@pytest.mark.product  # ranks/test_local.py has a stop before they exist
def test_a_preemption_before_the_ranks_exist_ends_them_while_they_import(cluster: Cluster, runs: Path) -> None:
    """Slurm's TERM came before them. They had kept their nodes for the whole import, until the grace was over."""
    ready, go = runs / "ready", runs / "go"
    wait = f"touch {ready}; until test -e {go}; do sleep 0.1; done"
    options = ["--set", f"setup=['test -e {go} || {{ {wait}; }}']"]
    training = Training.submit(cluster, runs, "--moments", "import", options=options)
    training.wait(ready.exists, "the batch script")
    training.preempt()
    go.touch()
    training.wait(lambda: events_of(training.run, "requeued"), "the requeue")
    training.go(0)
    assert training.finish() == "completed", story(training.run)
    assert [event["cause"] for event in events_of(training.run, "requeued")] == ["preempted"]
    assert not events_of(training.run, "rank_failed"), story(training.run)


@pytest.mark.product  # test_preemption_variants.py has them under each way to track processes
def test_a_run_is_preempted_with_data_workers_alive_and_none_is_left(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """The signal does not kill them, and they do not outlive their rank."""
    training = Training.submit(cluster, runs, "--workers", "2", "--moments", "first step")
    training.wait_at_moment(0)
    training.preempt()
    training.go(0)
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training)
    left = [process for node in cluster.nodes for process in cluster.processes(node) if "train.py" in process.command()]
    assert left == []


def test_a_lowered_time_limit_is_noticed_and_the_run_continues_after_it(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """By the supervisor's timer or Slurm's own warning, whichever comes first; no step is lost."""
    options = ["--time", "30", "--set", "timeouts.notice_s=45"]  # of the shortest limit, a minute
    training = Training.submit(cluster, runs, "--moments", "first step", options=options)
    training.wait_at_moment(0)
    cluster.root(["scontrol", "update", f"JobId={training.job_id}", "TimeLimit=1"])
    training.wait(lambda: events_of(training.run, "signal"), "the notice", 90)
    training.go(0)
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training)
    assert events_of(training.run, "requeued")[0]["cause"] == "stopped before the time limit"


@pytest.mark.product  # test_first_failure.py and test_attempt.py have the limit
def test_a_run_whose_attempts_are_used_up_ends_as_failed_and_says_why(cluster: Cluster, runs: Path) -> None:
    """limits.attempts bounds what a run may take."""
    training = Training.submit(cluster, runs, "--moments", "first step", options=["--set", "limits.attempts=1"])
    training.wait_at_moment(0)
    training.preempt()
    training.go(0)
    assert training.finish() == "failed"
    assert (outcome_of(training.run) or {})["reason"] == "limits.attempts (1) reached. Last attempt: preempted"


# ---- resubmission


@pytest.mark.product  # test_world_size.py resubmits twice
def test_a_resubmitted_run_continues_in_a_new_job_without_a_hold(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """policy: resubmit. The old job ends and is not restarted."""
    training = Training.submit(cluster, runs, "--moments", "first step", options=["--set", "policy=resubmit"])
    training.wait_at_moment(0)
    training.preempt()
    training.go(0)
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training)
    new = str(events_of(training.run, "resubmitted")[0]["job"])
    assert new != training.job_id
    assert cluster.wait_job(new, {"COMPLETED"})["Restarts"] == "0"
    old = cluster.job(training.job_id)
    assert (old["JobState"], old["Restarts"]) in (("COMPLETED", "0"), ("PREEMPTED", "0"))


#: A site's wrapper of sbatch.
ON_LOGIN_NODES = """#!/bin/sh
case $(hostname) in n[0-9]*) echo "sbatch is not available on compute nodes" >&2; exit 1 ;; esac
exec {sbatch} "$@"
"""


@pytest.mark.product
def test_where_nodes_may_not_submit_jobs_the_run_requeues_its_job_instead(cluster: Cluster, runs: Path) -> None:
    """It tries it once, despite ``policy: resubmit``."""
    wrapper = runs / "sbatch"
    wrapper.write_text(ON_LOGIN_NODES.format(sbatch=shutil.which("sbatch", path=cluster.search_path)))
    wrapper.chmod(0o755)
    path, policy = {"PATH": f"{runs}:{cluster.search_path}"}, ["--set", "policy=resubmit"]
    training = Training.submit(cluster, runs, "--moments", "first step,save", options=policy, env=path)
    for moment in range(2):
        training.wait_at_moment(moment)
        training.preempt()
        training.go(moment)
    assert training.finish() == "completed", story(training.run)
    (refused,) = events_of(training.run, "resubmission_refused")
    assert refused["forbidden"], story(training.run)
    assert len(events_of(training.run, "requeued")) == 2


@pytest.mark.product
@pytest.mark.parametrize("grace", [20, 0])
def test_a_run_that_is_not_to_continue_ends_with_its_job_and_can_be_submitted_again(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory, grace: int
) -> None:
    """``continue: false``, preempted. No outcome, exit code 0 within the grace, and `wait` says that it is stopped."""
    cluster.set_grace(grace)
    training = Training.submit(cluster, runs, "--moments", "first step", options=["--set", "continue=false"])
    training.wait_at_moment(0)
    training.preempt()
    training.go(0)
    command = [cluster.python, "-m", "clusterddp", "wait", "--resubmit", training.run.path]
    assert cluster.run(command, check=False).returncode == 12, story(training.run)
    (stopped,) = events_of(training.run, "stopped")
    assert (stopped["then"], outcome_of(training.run)) == (NOT_CONTINUED, None), story(training.run)
    job = cluster.wait_job(training.job_id, {"COMPLETED", "PREEMPTED"})
    assert job["Restarts"] == "0" and (not grace or job["ExitCode"] == "0:0")
    again = [cluster.python, "-m", "clusterddp.submit", "--run-dir", training.run.path]
    cluster.run(again, cwd=cluster.source)
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training)


@pytest.mark.parametrize("grace", [pytest.param(20, marks=pytest.mark.product), 0])
def test_where_preemption_cancels_the_run_is_resubmitted(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory, grace: int
) -> None:
    """PreemptMode=CANCEL: the job never runs again, the run does, in a new job as announced."""
    cluster.root(["scontrol", "update", "partitionname=cancel", f"gracetime={grace}"])
    training = Training.submit(cluster, runs, "--moments", "first step", options=["-p", "cancel"])
    training.wait_at_moment(0)
    training.preempt()
    training.go(0)
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training)
    assert len(training.run.attempts()) == 2
    assert [event["job"] != training.job_id for event in events_of(training.run, "resubmitted")] == [True]


@pytest.mark.product  # ranks/test_deadline.py has the deadline
def test_a_step_that_outlasts_the_grace_costs_the_steps_since_the_last_checkpoint_and_no_more(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """The ranks exit before they would be killed, their stacks are in the log, and the job is requeued."""
    cluster.set_grace(10)
    training = Training.submit(cluster, runs, "--moments", "last step")
    training.wait_at_moment(0)
    training.preempt()
    assert training.finish() == "completed", story(training.run)
    assert "exiting with checkpoint 20" in (training.run.attempt_logs(0) / "rank-0.err").read_text()
    assert [event["redone"] for event in events_of(training.run, "resumed")] == [19]
    assert training.run.metrics()[-1]["loss"] == uninterrupted_training.metrics()[-1]["loss"]


# ---- scancel


def never_again(training: Training, outcome: str | None) -> None:
    """The job is over, and no further attempt was made."""
    attempts = training.run.attempts()
    training.cluster.wait_job(training.job_id, {"CANCELLED"})
    assert (outcome_of(training.run) or {}).get("state") == outcome, story(training.run)
    assert training.run.attempts() == attempts
    assert training.cluster.run(["squeue", "-h", "-u", training.cluster.user, "-p", "low"]).stdout == ""


def test_scancel_in_the_hold_is_final(cluster: Cluster, runs: Path) -> None:
    """Requeued, pending, cancelled: it does not start when the hold ends."""
    training = Training.submit(cluster, runs, "--moments", "first step")
    training.wait_at_moment(0)
    high = training.preempt()
    training.go(0)
    cluster.wait_for(training.job_id, lambda job: job.get("Restarts") == "1", "to be requeued")
    cluster.run(["scancel", training.job_id])
    cluster.wait_job(high, {"COMPLETED"})
    never_again(training, None)
    shown = cluster.run([cluster.python, "-m", "clusterddp", "status", training.run.path]).stdout
    assert f"(job {training.job_id} ended: CANCELLED)" in shown


@pytest.mark.product  # the test above has one in the hold, test_main_job.py one in training
def test_scancel_within_the_grace_is_final(cluster: Cluster, runs: Path) -> None:
    """The ranks still save when it comes: the supervisor requeues nothing."""
    training = Training.submit(cluster, runs, "--moments", "first step")
    training.wait_at_moment(0)
    training.preempt()
    cluster.run(["scancel", training.job_id])
    cluster.wait_for(training.job_id, lambda job: job.get("JobState") != "RUNNING", "to be cancelled")
    training.go(0)
    never_again(training, None)
    assert [event["step"] for event in events_of(training.run, "checkpoint")] == [1]


@pytest.mark.product  # the other moments here; test_main_job.py has the save
def test_scancel_during_a_save_is_final_and_the_save_is_kept(cluster: Cluster, runs: Path) -> None:
    """The periodic checkpoint is being written when it comes."""
    training = Training.submit(cluster, runs, "--moments", "save")
    training.wait_at_moment(0)
    cluster.run(["scancel", training.job_id])
    cluster.wait_for(training.job_id, lambda job: job.get("JobState") != "RUNNING", "to be cancelled")
    training.go(0)
    wait_until(lambda: outcome_of(training.run), f"the outcome\n{story(training.run)}", 30)
    never_again(training, "cancelled")
    assert 20 in [event["step"] for event in events_of(training.run, "checkpoint")]


@pytest.mark.product  # the simulation has it, the tests above the other moments
def test_scancel_while_the_run_is_being_resubmitted_ends_the_new_job_too(cluster: Cluster, runs: Path) -> None:
    """sbatch is slow, and the scancel comes while it runs."""
    sbatch = runs / "sbatch"
    sbatch.write_text(
        f"""#!/bin/bash
if [[ "$*" == *--dependency* ]]; then
    touch {runs}/resubmitting
    until [ -e {runs}/cancelled ]; do sleep 0.05; done
fi
exec "$(PATH=${{PATH#*:}} command -v sbatch)" "$@"
"""
    )
    sbatch.chmod(0o755)
    path = f"{runs}:{cluster.environment['PATH']}"
    training = Training.submit(
        cluster, runs, "--moments", "first step", options=["--set", "policy=resubmit"], env={"PATH": path}
    )
    training.wait_at_moment(0)
    training.preempt()
    training.go(0)
    wait_until(lambda: (runs / "resubmitting").exists(), f"the resubmission\n{story(training.run)}")
    cluster.run(["scancel", training.job_id])
    cluster.wait_for(training.job_id, lambda job: job.get("JobState") != "RUNNING", "to be cancelled")
    (runs / "cancelled").touch()
    wait_until(lambda: outcome_of(training.run), f"the outcome\n{story(training.run)}", 30)
    never_again(training, "cancelled")


@pytest.mark.product  # test_many_runs.py cancels a run, test_main_job.py has its save
def test_clusterddp_cancel_of_a_training_run_saves_and_ends_it(cluster: Cluster, runs: Path) -> None:
    """The command returns when it is over, and says at which step."""
    training = Training.submit(cluster, runs, "--pause", "0.05", "--steps", "100000")
    wait_for_step(training.run, 10)
    said = cluster.run([cluster.python, "-m", "clusterddp", "cancel", training.run.path]).stdout
    outcome = json.loads(training.run.outcome_file.read_text())
    assert outcome["state"] == "cancelled"
    assert f"cancelled at step {outcome['step']}. The run will not start again" in said
    never_again(training, "cancelled")
