"""A few habits of user code, preempted and killed at random moments; all of them: ``make chaos``.

Plain tests of CHILDREN: test_child_processes.py; of PROCESS: test_own_process.py, test_large_values.py, test_local.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.chaos import runs
from tests.chaos.behaviours import behaviour
from tests.chaos.judging import problems
from tests.chaos.plan import Plan, draw_plan
from tests.waiting import story

#: Another one: CLUSTERDDP_TEST_SEED.
SEED = int(os.environ.get("CLUSTERDDP_TEST_SEED", 1))
LIMIT_S = 200.0
CHILDREN = "pool-before-init+pool-open-across-the-stop+fork-then-os-exit+subprocess-with-preexec"
PROCESS = "catches-everything-around-the-loop+huge-metrics+changes-directory+umask-that-closes-files"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    made = runs.run_locally("plain", 2, Plan(), tmp_path_factory.mktemp("chaos") / "plain", LIMIT_S)
    assert [*made.problems, *problems(made.run, behaviour("plain"), None)] == [], story(made.run)
    return made.run


@pytest.mark.product
@pytest.mark.parametrize("names", [CHILDREN, PROCESS])
def test_what_user_code_does_to_its_process_costs_no_step_and_leaves_nothing_behind(
    names: str, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    plan = draw_plan(SEED, names, 2)
    made = runs.run_locally(names, 2, plan, tmp_path / "run", LIMIT_S)
    killed = plan.kill.attempt if plan.kill and made.killed else None
    found = [*made.problems, *problems(made.run, behaviour(names), undisturbed, killed)]
    assert found == [], f"seed {SEED}, {plan}\n{story(made.run)}"
