"""Runs with ``device: cuda`` on a real Slurm with GPUs as generic resources: stand-in devices, as many as it lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.cluster import Cluster
from tests.gpu import build
from tests.preempted import attempt, check_same
from tests.trainings import events_of
from tests.waiting import story, wait_for_outcome, wait_for_step

STEPS = 100
DIGITS = ddp.REPOSITORY / "jobs" / "digits.py"


ONE_EACH = """
import os, socket, torch, clusterddp
ctx = clusterddp.init()
model = ctx.wrap(torch.nn.Linear(2, 2))
model(torch.ones(1, 2, device=ctx.device)).sum().backward()
print(socket.gethostname(), ctx.local_rank, os.environ["CUDA_VISIBLE_DEVICES"], ctx.device, torch.cuda.device_count())
"""


def standin(cluster: Cluster) -> dict[str, str]:
    """The stand-in of this checkout, with two devices on each node, where the cluster's user sees it."""
    found = build.environment(2)
    return {**found, "PYTHONPATH": found["PYTHONPATH"].replace(str(ddp.REPOSITORY), str(cluster.source))}


# gpu/test_exact_resume.py has the bits of preempted models on devices, gpu/test_checks.py the checks, the test below a
# real Slurm's devices.
@pytest.mark.product
@pytest.mark.parametrize("nodes", [1, 2])
def test_digits_on_nodes_of_two_devices_preempted_ends_with_the_same_bits(
    cluster: Cluster, runs: Path, tmp_path: Path, nodes: int
) -> None:
    """Each task sees both devices of its node, which ``--gpus-per-node`` requests; the nodes are checked before.

    A rank of such a run is killed in tests/gpu/test_exact_resume.py.
    """
    run, whole = RunDirectory(runs / "run"), RunDirectory(tmp_path / "whole")
    command = [cluster.python, "-m", "clusterddp.submit", "jobs/digits.yaml", "--run-dir", run.path]
    shape = ["--device", "cuda", "--nodes", str(nodes), "--gpus", "2", "--partition", "low"]
    shape += ["--set", "preflight=true"]
    cluster.run([*command, *shape, "--", "--steps", str(STEPS)], cwd=cluster.source, env=standin(cluster))
    wait_for_step(run, 10)
    cluster.preempt(seconds=1)
    attempt(whole, [DIGITS, "--steps", STEPS], ranks=2 * nodes, devices=2 * nodes).expect(0)
    assert wait_for_outcome(run) == "completed", story(run)
    assert [event["warnings"] for event in events_of(run, "preflight")][:1] == [[]], story(run)
    (resumed,) = events_of(run, "resumed")
    assert 10 <= resumed["step"] < STEPS, story(run)
    check_same(run, whole)


def test_tasks_that_see_one_device_each_use_it(cluster: Cluster) -> None:
    """Where the site binds tasks to devices, as with plain srun here: it is index 0 for each, and another device."""
    srun = ["srun", "--partition=low", "--nodes=1", "--ntasks=2", "--gpus-per-task=1", "--cpus-per-task=1"]
    said = cluster.run([*srun, cluster.python, "-c", ONE_EACH], cwd=cluster.source, env=standin(cluster)).stdout
    seen = [line.split()[1:] for line in sorted(said.splitlines())]
    assert seen == [["0", "0", "cuda:0", "1"], ["1", "1", "cuda:0", "1"]]


@pytest.mark.product  # four ranks; test_checks.py has the same checks
def test_doctor_checks_the_devices_of_all_nodes(cluster: Cluster, runs: Path) -> None:
    command = [cluster.python, "-m", "clusterddp", "doctor", "--nodes", "2", "--gpus", "2", "-p", "low"]
    said = cluster.run(
        command, cwd=cluster.source, env=standin(cluster) | {"CLUSTERDDP_RUNS": str(runs)}, check=False, timeout=180
    )
    assert "2 of 2 nodes" in said.stdout + said.stderr, said
