"""Preemptions and other faults at random moments, and what became of every step, sample and bit: ``make soak``.

On the test cluster, tests/scripts/train.py is trained again and again on two nodes. Each run is interrupted four to
eight times, 0 to 6 s after an attempt's start, so that imports, rendezvous, restores, steps and saves are all hit. Jobs
in `high` preempt it: now and then before there are ranks, two at once, or with a second TERM on top. Ranks are killed
and stopped, slurmctld and slurmd restarted, cables pulled and nodes switched off (``faults.py``).

When a run is over its recorded history is compared with an uninterrupted run's: each step counts once, each sample once
per epoch, none redone after a preemption and few after the rest, the same losses, the same weights and optimizer to the
last bit, one outcome, no process left.

CLUSTERDDP_SOAK_RUNS says how many runs each of Slurm's ways to track processes gets. A run follows from ``--seed`` and
its number: ``make soak SOAK="--seed 7 -k cgroup-003"`` makes one again. What a failed run has left is in build/soak.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.conftest import Clusters
from tests.interruptions import HighJob, TooLong, keep, lifting, submit_training, term_sent, until
from tests.soak import faults
from tests.soak.faults import Fault, Maker
from tests.soak.judging import STEPS, Injected, judge
from tests.trainings import lift_hold, ranks_of
from tests.waiting import story

T = TypeVar("T")

RUNS = int(os.environ.get("CLUSTERDDP_SOAK_RUNS", 25))
GRACES = (0, 20)
PAUSE_S = 0.03
LATEST_S = 6.0
WAIT_S = 180.0
KEPT = Path("build", "soak")


@dataclass(frozen=True)
class Preemption:
    """One to be made: ``delay`` seconds after an attempt's start; by jobs of so many nodes each, all at once."""

    delay: float
    nodes: tuple[int, ...] = (3,)
    second_term: float | None = None
    """Seconds after which the ranks get another TERM."""
    early: bool = False
    """The delay begins when Slurm says that the job runs: there may be no supervisor and no rank yet."""


@dataclass(frozen=True)
class Case:
    """One run to be made."""

    grace: int
    ranks_per_node: int
    faults: tuple[Preemption | Fault, ...]
    """In order."""
    watched: bool
    """Whether ``clusterddp wait --resubmit`` lifts the hold after each requeue, as for a user; else the test does."""


# ---- the cases: functions of the seed


def make_case(seed: int, proctrack: str, number: int) -> Case:
    """The run ``number`` of one proctrack. One in four has two ranks per node, one in four a watcher."""
    draw = random.Random(f"{seed}/{proctrack}/{number}")
    drawn = tuple(faults.draw_fault(draw, LATEST_S) or _draw_preemption(draw) for _ in range(draw.randint(4, 8)))
    ranks_per_node = 2 if draw.random() < 0.25 else 1
    return Case(GRACES[number % len(GRACES)], ranks_per_node, drawn, watched=draw.random() < 0.25)


def _draw_preemption(draw: random.Random) -> Preemption:
    delay, kind = round(draw.uniform(0, LATEST_S), 3), draw.random()
    if kind < 0.1:
        return Preemption(delay, draw.choice([(3, 3), (2, 2), (1, 3), (2, 1)]))
    if kind < 0.2:
        return Preemption(delay, second_term=round(draw.uniform(0, 0.5), 3))
    if kind < 0.3:
        return Preemption(round(draw.uniform(0, 0.5), 3), early=True)
    return Preemption(delay)


# ---- making a run


class Disturber:
    """Submits one run, and disturbs it as its case says."""

    def __init__(self, up: Cluster, folder: Path, case: Case) -> None:
        self._up, self._folder, self._case = up, folder, case
        self._attempt, self._look_at = -1, 0.0
        self.injected: list[Injected] = []
        options = ("--steps", str(STEPS), "--pause", str(PAUSE_S))
        self.training = submit_training(up, folder, *options, ranks_per_node=case.ranks_per_node)
        self._maker = Maker(up, self.training)
        self._watcher = self._watch() if case.watched else None

    def _watch(self) -> subprocess.Popen[str]:
        with open(self._folder / "watch.log", "w") as log:
            command = [str(self._up.python), "-m", "clusterddp", "wait", "--resubmit", str(self.training.run.path)]
            return self._up.popen(command, stdout=log, stderr=log)

    def make_all(self) -> None:
        """Until all preemptions and other faults are made, or the run is over."""
        for number, fault in enumerate(self._case.faults):
            self._await(self._job_runs if isinstance(fault, Preemption) and fault.early else self._attempt_made)
            time.sleep(fault.delay)
            if self.training.run.outcome() is not None:
                return
            if isinstance(fault, Preemption):
                self._preempt(number, fault)
                # The high job has the nodes: whatever is newer than this attempt comes after it.
                self._attempt = max(self.training.run.attempts(), default=-1)
            else:
                self._make_other(fault)

    def _make_other(self, fault: Fault) -> None:
        """After a fault that ends the attempt the next one waits for another; else for nothing."""
        self._follow()
        if fault.kind in faults.ENDING:
            self._maker.spare()
        attempt, began = max(self.training.run.attempts(), default=-1), time.time()
        if self._maker.make(fault):
            self.injected.append(Injected(fault.kind, began))
            self._attempt = attempt if fault.kind in faults.ENDING else attempt - 1

    def _follow(self) -> None:
        """The run may continue in another job."""
        jobs = [event["job"] for event in self.training.run.events() if "job" in event]
        if jobs:
            self.training.job_id = str(jobs[-1])

    def _await(self, begun: Callable[[], bool]) -> None:
        """Until the run continues, or is over."""
        self.until(lambda: begun() or self.training.run.outcome() is not None, f"what follows attempt {self._attempt}")

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        """Waits; the hold after a requeue is lifted, here or by the watcher."""

        def helped() -> T | None:
            if not self._watcher and time.monotonic() >= self._look_at:
                self._follow()
                lift_hold(self._up, self.training.job_id)
                self._look_at = time.monotonic() + 0.2
            return condition()

        return until(helped, what, WAIT_S)

    def close(self) -> list[str]:
        """Ends the watcher; what is wrong with how it ended, if it had a finished run to watch."""
        if self._watcher is None:
            return []
        try:
            code = self._watcher.wait(timeout=15)
            return [f"the watcher ended with {code}"] if code else []
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            self._watcher.wait()
            return ["the watcher did not end"]

    def _attempt_made(self) -> bool:
        newest = self.training.run.newest_attempt()
        return newest is not None and newest > self._attempt

    def _job_runs(self) -> bool:
        return self._up.job(self.training.job_id).get("JobState") == "RUNNING"

    def _preempt(self, number: int, preemption: Preemption) -> None:
        self._follow()
        began = time.time()
        files = [self._folder / f"high-{number}-{index}" for index in range(len(preemption.nodes))]
        highs = [HighJob.submit(self._up, file, nodes=n) for file, n in zip(files, preemption.nodes, strict=True)]
        if preemption.second_term is not None:
            self._signal_again(preemption.second_term, began)
        for high in highs:
            until(high.started, f"job {high.job_id} in high to start", WAIT_S)
        self.injected.append(Injected("preemption", began))

    def _signal_again(self, delay: float, asked: float) -> None:
        """Another TERM to the ranks that have got the first, and to no later attempt's."""
        ranks = [rank for node in self._up.nodes for rank in ranks_of(self._up, node)]
        try:
            until(lambda: term_sent(self._up, self.training.job_id, asked - 0.001), "the first TERM", 5)
        except TooLong:
            return  # It came before there were ranks.
        time.sleep(delay)
        for rank in ranks:
            rank.kill(15)

    def problems_of_the_job(self) -> Iterator[str]:
        """It is COMPLETED. A job preempted in the moment of its end is started once more, and finds the run over."""
        up, training, ended = self._up, self.training, {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"}
        attempts = training.run.attempts()
        over = lifting(up, training.job_id, lambda: up.job(training.job_id).get("JobState") in ended)
        until(over, f"job {training.job_id} to be over", 60)
        job = up.job(training.job_id)
        if job["JobState"] != "COMPLETED":
            yield f"the run is over and its job is {job['JobState']} ({job.get('Reason')})"
        if training.run.attempts() != attempts:
            yield "a run that was over was trained again"


def none_left(up: Cluster) -> bool:
    """Whether no rank, batch step or helper of one is left on any node."""
    return not any("clusterddp." in process.command() for node in up.nodes for process in up.processes(node))


def disturbed_run(up: Cluster, folder: Path, case: Case) -> tuple[Disturber, list[str]]:
    """Makes the run; what was wrong until it was over."""
    disturber = Disturber(up, folder, case)
    training = disturber.training
    problems: list[str] = []
    try:
        disturber.make_all()
        disturber.until(training.run.outcome, f"{training.run} to be over")
        until(lambda: none_left(up), "no process to be left", 60)
        problems += disturber.problems_of_the_job()
    except TooLong as error:
        problems.append(str(error))
    finally:
        problems += disturber.close()
    return disturber, problems


# ---- the soak


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cluster, Path, int], RunDirectory]:
    """The uninterrupted run with so many ranks per node, made in that folder of the cluster when first asked for."""
    made: dict[int, RunDirectory] = {}

    def reference(up: Cluster, folder: Path, ranks_per_node: int) -> RunDirectory:
        if ranks_per_node not in made:
            training = submit_training(up, folder, "--steps", str(STEPS), ranks_per_node=ranks_per_node)
            outcome = until(training.run.outcome, "the uninterrupted run", WAIT_S)
            assert (outcome.state, outcome.attempts) == ("completed", 1), story(training.run)
            kept = tmp_path_factory.mktemp("uninterrupted") / "run"  # the cluster's folders are deleted with it
            made[ranks_per_node] = RunDirectory(shutil.copytree(training.run.path, kept))
        return made[ranks_per_node]

    return reference


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(RUNS), ids="{:03}".format)
@pytest.mark.parametrize("proctrack", ["cgroup", "linuxproc"])
def test_a_run_with_faults_at_random_moments_is_the_uninterrupted_run(
    proctrack: str,
    number: int,
    clusters: Clusters,
    runs_on: Callable[[Cluster], Path],
    uninterrupted: Callable[[Cluster, Path, int], RunDirectory],
    request: pytest.FixtureRequest,
) -> None:
    seed = request.config.getoption("--seed")
    case = make_case(seed, proctrack, number)
    up = clusters.get(ClusterConfig(nodes=3, cpus=2, proctrack=proctrack))
    up.set_grace(case.grace)
    try:
        reference = uninterrupted(up, runs_on(up), case.ranks_per_node)
        disturber, problems = disturbed_run(up, runs_on(up), case)
        problems += judge(disturber.training.run, reference, 2 * case.ranks_per_node, disturber.injected)
        if problems:
            keep(disturber.training, KEPT / f"{proctrack}-{number:03}")
        assert problems == [], f"seed {seed}: {case}\n{disturber.injected}\n{story(disturber.training.run)}"
    finally:
        up.drain_jobs()
