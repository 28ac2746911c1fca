"""Habits of user code, each in a small training that is preempted once and loses a rank once, at random moments.

Each class in ``behaviours.py`` is trained with ``submit --local``, left alone and disturbed, and disturbed on the test
cluster's two nodes: ``make chaos``, or ``make chaos CHAOS="-k fork-then-sys-exit --seed 1"``. When a run is over its
recorded history has to show: every step that counts once (I1), the undisturbed training's weights (I3), no step
repeated after a notice and at most a checkpoint's interval after a kill (I4), a checkpoint that loads (I5), a cause for
each attempt's end (I6), one outcome, "completed" with all steps alone, within a bound, and no process left (I7), and no
other training after it (I10). A habit that the run has to refuse ends it as failed, with the reason.

All moments follow from ``--seed`` and the habit's name. What a failed run has left is in build/chaos. ``make
test-product`` runs a few habits together. Plain tests of CHILDREN: test_child_processes.py; of PROCESS:
test_own_process.py, test_large_values.py, test_local.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.chaos.behaviours import ALL, behaviour
from tests.chaos.judging import problems
from tests.chaos.plan import Plan, draw_plan
from tests.chaos.runs import Made, run_locally, run_on_slurm, what_another_start_does
from tests.cluster import Cluster
from tests.interruptions import keep, keep_files
from tests.runs_on_disk import outcome_of
from tests.trainings import Training
from tests.waiting import story

CHILDREN = "pool-before-init+pool-open-across-the-stop+fork-then-os-exit+subprocess-with-preexec"
PROCESS = "catches-everything-around-the-loop+huge-metrics+changes-directory+umask-that-closes-files"
KEPT = Path("build", "chaos")

#: What is wrong with a run that is over.
Judge = Callable[[str, Plan, Made], list[str]]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Compares a run with the undisturbed training, which is made here."""
    reference = run_locally("plain", Plan(), tmp_path_factory.mktemp("undisturbed"))
    wrong = [*reference.problems, *problems(reference.run, behaviour("plain"), None)]
    assert wrong == [], story(reference.run)

    def found(name: str, plan: Plan, made: Made) -> list[str]:
        killed = plan.kill.attempt if plan.kill and made.killed else None
        return [*made.problems, *problems(made.run, behaviour(name), reference.run, killed)]

    return found


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--seed"))


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ALL)
def test_a_habit_is_no_harm_to_a_run_that_is_left_alone(name: str, judge: Judge, tmp_path: Path) -> None:
    made = run_locally(name, Plan(), tmp_path)
    if found := judge(name, Plan(), made):
        keep_files(tmp_path, KEPT / f"{name}-alone")
    assert found == [], story(made.run)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(names, marks=pytest.mark.product) for names in (CHILDREN, PROCESS)),
        *(pytest.param(name, marks=pytest.mark.chaos) for name in ALL),
    ],
)
def test_a_habit_costs_a_disturbed_run_no_step_and_leaves_nothing_behind(
    name: str, judge: Judge, seed: int, tmp_path: Path
) -> None:
    plan = draw_plan(seed, name)
    made = run_locally(name, plan, tmp_path)
    if (outcome_of(made.run) or {}).get("state") == "completed":
        made.problems += what_another_start_does(made.run)
    if found := judge(name, plan, made):
        keep_files(tmp_path, KEPT / name)
    assert found == [], f"seed {seed}, {plan}\n{story(made.run)}"


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ALL)
def test_a_habit_costs_a_run_disturbed_on_slurm_no_step_and_leaves_nothing_behind(
    name: str, judge: Judge, seed: int, cluster: Cluster, runs: Path
) -> None:
    plan, training = draw_plan(seed, name), Training(cluster, runs, RunDirectory(runs / "run"))
    made = run_on_slurm(name, plan, training)
    if found := judge(name, plan, made):
        keep(training, KEPT / f"{name}-slurm")
    assert found == [], f"seed {seed}, {plan}\n{story(made.run)}"
