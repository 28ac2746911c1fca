"""A sweep on a real Slurm: job arrays whose tasks are runs."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clusterddp.report.booking import book
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.conftest import Clusters
from tests.histories import view
from tests.runs_on_disk import outcome_of
from tests.trainings import events_of
from tests.waiting import differing, final_state, story, wait_for_outcome, wait_for_step, wait_until

SCRIPT = """\
import pathlib, sys, time
seed, marks = int(sys.argv[2]), pathlib.Path(__file__).parent
(marks / f"started-{seed}").touch()
while seed == 0 and not (marks / "go").exists():
    time.sleep(0.05)
sys.exit(3 if seed == 1 else 0)
"""


def sweep(cluster: Cluster, folder: Path, seeds: str, *options: str) -> tuple[list[str], str]:
    """Runs the command; the ids of the arrays that it submitted, and what it said."""
    words = [
        "submit",
        folder / "train.py",
        "--device",
        "cpu",
        "--run-dir",
        folder / "runs",
        "--sweep",
        f"args.seed={seeds}",
    ]
    done = cluster.run([cluster.python, "-m", "clusterddp", *words, *options], cwd=cluster.source)
    return done.stdout.split(), done.stderr


def member(folder: Path, seed: int) -> RunDirectory:
    return RunDirectory(folder / "runs" / f"seed={seed}")


def wait_for_end(folder: Path, *seeds: int) -> list[str]:
    """The states of members that are to end."""
    outcomes = [lambda seed=seed: outcome_of(member(folder, seed)) for seed in seeds]
    for seed, outcome in zip(seeds, outcomes, strict=True):
        try:
            wait_until(outcome, f"member {seed} to end", timeout=60)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{story(member(folder, seed))}") from None
    return [str((outcome() or {})["state"]) for outcome in outcomes]


def test_the_same_command_submits_only_what_is_left(cluster: Cluster, runs: Path) -> None:
    """One member fails, one is cancelled in the queue with scancel, one is added."""
    (runs / "train.py").write_text(SCRIPT)
    (array,), said = sweep(cluster, runs, "0..3", "--max-running", "1")
    assert "4 members: 4 new" in said
    wait_until((runs / "started-0").exists, "the first member")
    cluster.run(["scancel", f"{array}_3"])
    state = cluster.run([cluster.python, "-m", "clusterddp", "status", member(runs, 3)], cwd=cluster.source).stdout
    assert re.search("state +stopped|CANCELLED", state), state
    again, said = sweep(cluster, runs, "0..2")
    assert (again, "3 members: 3 queued or running" in said) == ([], True), said
    (runs / "go").touch()
    assert wait_for_end(runs, 0, 1, 2) == ["completed", "failed", "completed"]
    (second,), said = sweep(cluster, runs, "0..4")
    assert "5 members: 1 new, 1 never started, 2 completed, 1 failed" in said
    assert "failed: seed=1. To submit failed members again, use --retry failed" in said
    assert wait_for_end(runs, 3, 4) == ["completed", "completed"]
    assert [run.attempts() for run in (member(runs, seed) for seed in range(5))] == [[0]] * 5
    held = read_json(member(runs, 4).holder_file(0))
    assert held is not None and held["job"] == f"{second}_1"
    assert (member(runs, 4).logs / f"job-{second}_1.log").exists()
    waited = book(view(member(runs, 2).events()), time.time()).seconds()  # for the two before it
    assert waited["limited"] > 0 and not waited["held"], member(runs, 2).events()


# ---- the product's: many members, and all that can happen to them

#: Each trains with its own learning rate and seed; the two with 0 raise an exception.
LRS = ["0", *(f"{number}e-4" for number in range(1, 12))]


def of_all(cluster: Cluster, folder: Path, *options: str) -> list[str]:
    """The command of a sweep of 24 members."""
    pause = ["--", "--pause", "0.05"]
    words = ["tests/scripts/swept.py", "--device", "cpu", "--run-dir", str(folder / "runs"), "--time", "10"]
    values = ["--sweep", f"lr={','.join(LRS)}", "--sweep", "seed=0..1", "--set", "checkpoint.every=10 steps"]
    return [str(cluster.python), "-m", "clusterddp", "submit", *words, *values, *options, *pause]


def members(folder: Path) -> dict[str, RunDirectory]:
    return {
        name: RunDirectory(folder / "runs" / name) for name in (f"lr={lr},seed={seed}" for lr in LRS for seed in "01")
    }


@pytest.fixture(scope="module")
def undisturbed(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDirectory]:
    """The same members, one after another on this machine."""
    cluster = clusters.get(Clusters.standard)
    folder = Path(tempfile.mkdtemp(dir=cluster.scratch))
    os.chown(folder, cluster.uid, -1)
    done = cluster.run(of_all(cluster, folder, "--local"), cwd=cluster.source, check=False, timeout=280)
    assert done.returncode == 1 and "failed: lr=0,seed=0 lr=0,seed=1; --retry failed" in done.stderr, done.stderr
    kept = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(folder / "runs", kept / "runs")  # the cluster's folders are deleted with it
    return members(kept)


def disturb(cluster: Cluster, over: Callable[[], bool]) -> int:
    """Preempts nodes at random moments until all is over, and restarts the controller once; how often it preempted."""
    preempted, deadline = 0, time.monotonic() + 600
    while not over():
        assert time.monotonic() < deadline, cluster.root(["squeue", "--all", "--array"]).stdout
        time.sleep(random.uniform(4, 10))
        cluster.preempt(seconds=0.1, nodes=random.randint(1, 3))
        preempted += 1
        if preempted == 5:
            cluster.stop_controller()
            cluster.start_controller()
    return preempted


@pytest.mark.product
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("largest", [1001, 10])
def test_members_that_are_preempted_at_random_end_as_their_undisturbed_selves(
    clusters: Clusters,
    runs_on: Callable[[Cluster], Path],
    undisturbed: dict[str, RunDirectory],
    largest: int,
    record_property: Callable[[str, object], None],
) -> None:
    """24 members; two fail and are named, one is cancelled in the queue; the same command then does what is left."""
    cluster = clusters.get(replace(Clusters.standard, max_array_size=largest))
    folder = runs_on(cluster)
    ids = cluster.run(of_all(cluster, folder, "--max-running", "6"), cwd=cluster.source).stdout.split()
    assert len(ids) == (1 if largest > 24 else 3)
    last = cluster.root(["squeue", "--noheader", "--array", "--states=PENDING", "--format=%i"]).stdout.split()[-1]
    cluster.run(["scancel", last])
    runs = members(folder)
    preempted = disturb(cluster, lambda: sum(run.outcome() is not None for run in runs.values()) >= 23)
    (left,) = [name for name, run in runs.items() if run.outcome() is None]
    assert runs[left].attempts() == []
    again = cluster.run(of_all(cluster, folder), cwd=cluster.source)
    assert len(again.stdout.split()) == 1 and "Submitted 1 member as job" in again.stderr, again.stderr
    assert "24 members: 1 never started, 21 completed, 2 failed" in again.stderr, again.stderr
    assert "failed: lr=0,seed=0 lr=0,seed=1. To submit failed members again, use --retry failed" in again.stderr
    wait_for_outcome(runs[left])
    attempts = {name: len(run.attempts()) for name, run in runs.items()}
    record_property("figures", f"{preempted} preemptions, {sum(attempts.values())} attempts of {len(runs)} members")
    print(f"{preempted} preemptions; attempts: {attempts}")
    for name, run in runs.items():
        outcome, expected = outcome_of(run) or {}, outcome_of(undisturbed[name]) or {}
        assert (outcome["state"], outcome["step"]) == (expected["state"], expected["step"]), f"{name}\n{story(run)}"
        assert [line["loss"] for line in run.metrics()] == [line["loss"] for line in undisturbed[name].metrics()], name
        if outcome["state"] == "completed":
            assert differing(final_state(run), final_state(undisturbed[name])) == [], name
    nothing = cluster.run(of_all(cluster, folder), cwd=cluster.source)
    assert nothing.stdout == "" and "22 completed, 2 failed" in nothing.stderr


@pytest.mark.product
def test_tasks_are_resubmitted_watched_and_cancelled_as_any_job(
    clusters: Clusters, runs_on: Callable[[Cluster], Path]
) -> None:
    """A preempted member continues as a job of its own where the definition asks for that, else as the same task, whose
    hold `wait --resubmit` lifts. A member that is cancelled, queued or training, takes no other with it."""
    cluster = clusters.get(replace(Clusters.standard, cred_expire=120))  # a hold that does not end before it is lifted
    cluster.set_grace(20)
    runs = runs_on(cluster)
    words = [
        "tests/scripts/swept.py",
        "--device",
        "cpu",
        "--run-dir",
        runs / "runs",
        "--sweep",
        "lr=1e-4,2e-4,3e-4,4e-4,5e-4",
    ]
    clusterddp = [cluster.python, "-m", "clusterddp"]
    shape = ["--set", "policy=resubmit", "--max-running", "3", "--", "--pause", "0.25"]
    (array,) = cluster.run([*clusterddp, "submit", *words, *shape], cwd=cluster.source).stdout.split()
    found = [RunDirectory(runs / "runs" / f"lr={number}e-4") for number in range(1, 6)]
    waits = cluster.run([*clusterddp, "status", found[3].path], cwd=cluster.source).stdout
    assert f"job {array}_3 (PENDING)" in waits, waits
    cluster.run([*clusterddp, "cancel", "--yes", found[3].path, found[0].path], cwd=cluster.source, timeout=120)
    wait_for_step(found[1], 3)
    cluster.preempt(seconds=0.1)
    for run in (found[1], found[2], found[4]):
        assert wait_for_outcome(run) == "completed", story(run)
    assert [(outcome_of(run) or {})["state"] for run in (found[0], found[3])] == ["cancelled"] * 2
    (new,) = {event["job"] for event in events_of(found[1], "resubmitted")}
    assert re.fullmatch(r"\d+", new) and new != array
    again = [*words[:4], runs / "again", "--sweep", "lr=1e-4,2e-4", "--", "--pause", "0.1"]
    (array,) = cluster.run([*clusterddp, "submit", *again], cwd=cluster.source).stdout.split()
    watched = [RunDirectory(runs / "again" / f"lr={number}e-4") for number in (1, 2)]
    wait_for_step(watched[0], 3)
    cluster.preempt(seconds=0.1)
    seen = cluster.run([*clusterddp, "wait", "--resubmit", runs / "again"], cwd=cluster.source, timeout=120)
    assert re.search(rf"lifted Slurm's hold on job {array}_[01] after the requeue", seen.stderr), seen.stderr
    assert [wait_for_outcome(run) for run in watched] == ["completed"] * 2
    assert len(events_of(watched[0], "requeued")) == 1 and watched[0].attempts() == [0, 1]
    cluster.drain_jobs()
