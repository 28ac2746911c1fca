"""What a script does to its own process, on a real Slurm: a preemption stays a preemption."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.ranks.test_child_processes import TRAINING
from tests.runs_on_disk import outcome_of
from tests.waiting import story, wait_for_outcome, wait_for_step, wait_until

SCRIPT = f"""
import multiprocessing, signal, sys, time
{TRAINING}
if sys.argv[1] == "pool":
    kept = multiprocessing.get_context("fork").Pool(2)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
for batch in run.steps(8):
    train(batch)
    while run.step == 4 and ctx.attempt == 0 and not ctx._agreement.reason:  # no public name: ranks have not agreed yet
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("proctrack", "what"),
    [
        pytest.param("linuxproc", "pool", marks=pytest.mark.product),  # ranks/test_child_processes.py has pools locally
        pytest.param("cgroup", "pool", marks=pytest.mark.product),
        pytest.param("cgroup", "handler", marks=pytest.mark.product),  # ranks/test_signals.py has it without Slurm
    ],
)
def test_an_open_pool_delays_no_preemption_and_a_script_handler_does_not_end_the_run(
    clusters: Any, runs_on: Any, proctrack: str, what: str
) -> None:
    """Under linuxproc the pool's processes get the TERM, too. The handler exits with code 0: still requeued."""
    cluster = clusters.get(dataclasses.replace(clusters.standard, proctrack=proctrack))
    cluster.set_grace(20)
    folder = runs_on(cluster)
    script, run = folder / "script.py", RunDirectory(folder / "run")
    script.write_text(SCRIPT)
    script.chmod(0o644)
    shape = ["--nodes", "2", "--gpus", "1", "--device", "cpu", "--partition", "low", "--run-dir", run.path]
    cluster.run([cluster.python, "-m", "clusterddp.submit", script, *shape, "--", what], cwd=cluster.source)
    wait_for_step(run, 3)
    cluster.preempt(seconds=1)
    assert wait_for_outcome(run) == "completed", story(run)
    events = {event["event"]: event for event in run.events() if event["attempt"] == 0}
    assert "requeued" in events and events["requeued"]["cause"] == "preempted", story(run)
    # The ranks wait in step 4, and may make one more before all have agreed; the handler's ranks save nothing.
    assert events["requeued"].get("checkpoint") in ((5, 6) if what == "pool" else (None,)), story(run)
    assert (outcome_of(run) or {})["attempts"] == 2
    cluster.drain_jobs()


def test_a_rank_that_saves_after_a_notice_outlives_its_peers(clusters: Any, runs_on: Any) -> None:
    """Rank 1 dies of the TERM; srun ends no peers, and the run continues after rank 0's own save."""
    cluster = clusters.get(clusters.standard)
    cluster.set_grace(30)
    folder = runs_on(cluster)
    run = RunDirectory(folder / "run")
    shape = ["--nodes", "2", "--gpus", "1", "--device", "cpu", "--partition", "low", "--run-dir", run.path]
    script = ["tests/scripts/saving_alone.py", *shape, "--", "12"]
    cluster.run([cluster.python, "-m", "clusterddp.submit", *script], cwd=cluster.source)
    wait_until(lambda: len(list(run.path.glob("ready-*"))) == 2, "both ranks")
    cluster.preempt(seconds=1)
    assert wait_for_outcome(run) == "completed", story(run)
    assert (run.path / "own.txt").read_text() == "first half, second half", story(run)
    assert [event["event"] for event in run.events() if "cause" in event] == ["requeued"], story(run)
    cluster.drain_jobs()


SUBMITS = f"""
import os, subprocess, sys
{TRAINING}
CHILD = "import clusterddp; ctx = clusterddp.init(); print('rank', ctx.rank, 'of', ctx.world_size)"
for batch in run.steps(8):
    train(batch)
    if run.step == 2 and ctx.is_main:
        for number, launcher in enumerate(("", "srun --ntasks=1 ")):
            command = f"{{launcher}}{{sys.executable}} -c \\"{{CHILD}}\\""
            output = os.path.join(sys.argv[1], f"submitted-{{number}}.out")
            subprocess.run(["sbatch", "--partition=low", "--output", output, "--wrap", command], check=True)
"""


@pytest.mark.product
def test_a_job_that_a_rank_submits_is_no_rank_of_the_run(cluster: Any, runs_on: Any) -> None:
    """It inherits RANK and, in its batch step (22.05), the rank's SLURM_STEP_* variables."""
    folder = runs_on(cluster)
    script, run = folder / "submits.py", RunDirectory(folder / "run")
    script.write_text(SUBMITS)
    script.chmod(0o644)
    shape = ["--nodes", "1", "--gpus", "2", "--device", "cpu", "--partition", "low", "--run-dir", run.path]
    cluster.run([cluster.python, "-m", "clusterddp.submit", script, *shape, "--", folder], cwd=cluster.source)
    assert wait_for_outcome(run) == "completed", story(run)
    wait_until(lambda: not cluster.run(["squeue", "--noheader"]).stdout, "the end of the submitted jobs")
    batch_step, step = ((folder / f"submitted-{number}.out").read_text() for number in (0, 1))
    assert "is the batch shell of job" in batch_step and "rank 0 of 1\n" in step
