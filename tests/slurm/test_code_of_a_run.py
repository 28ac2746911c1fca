"""A job's code stays that of its submission, in the queue and across a requeue; its hook is told of the preemption."""

from __future__ import annotations

import json
from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.trainings import Training
from tests.waiting import story

TRAIN = (
    "import os, time, net\nprint(net.VALUE, flush=True)\nos.environ['CLUSTERDDP_ATTEMPT'] == '0' and time.sleep(90)\n"
)


def test_editing_the_checkout_changes_neither_a_queued_nor_a_requeued_run(cluster: Cluster, runs: Path) -> None:
    """Submitted held; edited before it starts, and again before it is preempted. The hook survives until it is told."""
    repository, told = runs / "repository", runs / "told"
    cluster.run(["git", "init", "-q", repository])
    write = lambda name, text: cluster.run(["tee", repository / name], input=text)  # noqa: E731
    write("train.py", TRAIN)
    write("net.py", "VALUE = 'submitted'")
    training = Training(cluster, runs, RunDirectory(runs / "run"))
    options = "train.py --device cpu --partition low --sbatch hold=true".split()
    command = [cluster.python, "-m", "clusterddp.submit", *options, "--run-dir", training.run.path]
    submitted = cluster.run([*command, "--set", f"hook=cat >> {told}"], cwd=repository)
    assert "code: no commit + 2 changed files, snapshot code/" in submitted.stderr
    training.job_id = submitted.stdout.strip()
    printed = lambda attempt: training.run.attempt_logs(attempt) / "rank-0.out"  # noqa: E731

    write("net.py", "VALUE = 'edited in the queue'")
    cluster.root(["scontrol", "release", training.job_id])
    training.wait(lambda: printed(0).exists() and printed(0).read_text(), "the first attempt to print")
    write("net.py", "VALUE = 'edited before the requeue'")
    training.preempt()
    assert training.finish() == "completed", story(training.run)
    training.wait(lambda: '"completed"' in told.read_text(), "the hook to be told of the end")

    # If the job in `high` starts after the requeue only, it preempts attempt 1 before that prints anything.
    last = training.run.newest_attempt()
    assert last and [printed(attempt).read_text() for attempt in (0, last)] == ["submitted\n", "submitted\n"]
    events = [json.loads(line) for line in told.read_text().splitlines()]
    preempted = [("preempted", attempt) for attempt in range(last)]
    assert [(event["event"], event["attempt"]) for event in events] == [*preempted, ("completed", last)]
    shown = cluster.run([cluster.python, "-m", "clusterddp", "status", training.run.path], cwd=runs).stdout
    assert "code      no commit + 2 changed files, snapshot code/" in shown
    assert "The code has changed" not in shown
