"""A Hydra multirun on a real Slurm: ``hydra/launcher=clusterddp`` submits one job array, whose tasks are preempted."""

from __future__ import annotations

import json
import random
import time
from functools import partial
from pathlib import Path

import pytest

from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.packages import require
from tests.runs_on_disk import outcome_of
from tests.trainings import events_of
from tests.waiting import story, wait_until

MOST_PREEMPTIONS = 10


@pytest.fixture(autouse=True)
def _hydra() -> None:
    require("hydra")


def at_the_gate(output: Path) -> bool:
    """Whether the app has saved its third step, after which it waits."""
    return (read_json(output / "state.json") or {}).get("step") == 3


def multirun(cluster: Cluster, folder: Path, script: str, *overrides: str) -> list[object]:
    """The command of a multirun in ``folder / "m"``."""
    launcher = ["hydra/launcher=clusterddp", "hydra.launcher.device=cpu", "hydra.launcher.time='10'"]
    path = cluster.source / "tests" / "scripts" / script
    return [cluster.python, path, "-m", *launcher, f"hydra.sweep.dir={folder}/m", *overrides]


@pytest.mark.product  # ranks/test_hydra.py has a multirun, test_sweeps.py the same command
def test_a_multirun_returns_at_once_and_the_same_command_waits_for_it(cluster: Cluster, runs: Path) -> None:
    """All members are preempted: each continues in its folder, and ends as alone. The one that fails is named."""
    gate, folder = runs / "gate", runs / "m"
    words = multirun(cluster, runs, "with_hydra.py", "model.lr=0.1,0.2,2", f"gate={gate}")
    submitted = cluster.run([*words, "hydra.launcher.wait=false"], cwd=runs)
    assert "Submitted 3 members as job" in submitted.stderr and not gate.exists()
    members = [RunDirectory(folder / "runs" / name) for name in "012"]
    for run in members[:2]:
        wait_until(partial(at_the_gate, folder / run.path.name), f"{run.path.name}'s saves\n{story(run)}")
    wait_until(members[2].outcome, f"the end of the member that fails\n{story(members[2])}")
    cluster.preempt(seconds=0.1)
    for run in members[:2]:
        wait_until(partial(events_of, run, "requeued"), f"{run.path.name} to be requeued\n{story(run)}")
    gate.touch()
    gate.chmod(0o644)
    done = cluster.run(words, cwd=runs, check=False, timeout=120)
    assert "member 2: failed" in done.stderr or "2.0 is too much" in done.stderr, done.stderr
    assert done.returncode == 1 and "3 members: 2 queued or running, 1 failed" in done.stderr, done.stderr
    for run, lr in zip(members, (0.1, 0.2), strict=False):
        outcome = outcome_of(run) or {}
        assert outcome.get("state") == "completed" and run.attempts() == [0, 1], story(run)
        value = 1.0
        for _ in range(20):
            value *= 1 - lr
        assert (read_json(folder / run.path.name / "state.json") or {})["value"] == value
        log = (folder / run.path.name / "with_hydra.log").read_text()
        assert "starts at step 0" in log and "starts at step 3" in log
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2", "multirun.yaml", "runs"]


# ---- the product's: many members that train with DDP


@pytest.mark.product
@pytest.mark.timeout(900)
def test_a_multirun_that_is_preempted_at_random_ends_as_undisturbed(cluster: Cluster, runs: Path) -> None:
    """Twelve members of two ranks, which resume from their own saves and return their last loss."""
    values = ["optimizer.lr=0.01,0.02,0.03,0.04", "seed=0,1,2"]
    here = ["hydra/sweeper=listing", "hydra.launcher.gpus_per_node=2", "hydra.launcher.local=true"]
    variables = {"PYTHONPATH": str(cluster.source / "tests" / "scripts" / "sweepers")}
    alone = runs / "alone"
    alone.mkdir()
    alone.chmod(0o777)
    command = multirun(cluster, alone, "hydra_ddp.py", *values, *here)
    expected = json.loads(cluster.run(command, cwd=runs, env=variables, timeout=600).stdout.splitlines()[-1])
    on_slurm = ["hydra/sweeper=listing", "hydra.launcher.nodes=2", "pause=0.1"]
    command = multirun(cluster, runs, "hydra_ddp.py", *values, *on_slurm)
    preempted, output = 0, runs / "output"
    with output.open("w") as file:
        process = cluster.popen(command, cwd=runs, env=variables, stdout=file, stderr=file)
        while process.poll() is None:
            time.sleep(random.uniform(5, 15))
            if preempted < MOST_PREEMPTIONS:  # then the members are left alone, however slow the machine is
                cluster.preempt(seconds=0.1, nodes=random.randint(1, 3))
                preempted += 1
    members = [RunDirectory(runs / "m" / "runs" / str(number)) for number in range(12)]
    attempts = [len(run.attempts()) for run in members]
    print(f"{preempted} preemptions, {sum(attempts)} attempts of {len(members)} members")
    said = output.read_text()
    assert json.loads(next(line for line in said.splitlines() if line.startswith("[["))) == expected, said
    assert len(expected) == 12 and {status for status, _ in expected} == {"COMPLETED"}
    assert sum(attempts) > 12
