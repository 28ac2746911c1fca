"""The same scripts under every launcher on Slurm, as docs/guide/launchers.md has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import launchers
from tests.cluster import Cluster

THERE = "On Slurm"


# Each has tests of its own: in test_main_job.py, test_here.py, test_templates.py, and plain srun in test_gpus.py and
# test_environment.py.
@pytest.mark.product
@pytest.mark.parametrize(("launcher", "job"), launchers.cases(THERE))
def test_a_job_has_the_same_results_under_every_launcher(cluster: Cluster, runs: Path, launcher: str, job: str) -> None:
    """The command is that in the launcher's row, for two ranks on two nodes of the test cluster."""
    size = "--partition=low --nodes=2 --gpus-per-node=1 --ntasks-per-node=1 --cpus-per-task=1".split()
    programs = {
        "python": [str(cluster.python)],
        "clusterddp": [str(cluster.python), "-m", "clusterddp"],
        "sbatch": ["sbatch", *size, f"--output={runs}/job.log"],
        "salloc": ["salloc", "--partition=low"],
    }
    command = launchers.words(launchers.commands(THERE)[launcher], job, runs, programs)
    if launcher == "clusterddp submit":
        command.insert(command.index("submit") + 1, "--partition=low")
    variables = {"CLUSTERDDP_RUNS": runs, "RUN": runs / "run", "DEVICE": "cpu", "PYTHON": cluster.python}
    env = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(cluster.source),
        **{name: str(value) for name, value in variables.items()},
    }
    done = cluster.run(command, cwd=cluster.source, env=env, check=False, timeout=180)
    names = ("job.log", "rank-0.out", "rank-*.err")
    logs = [path.read_text() for path in runs.rglob("*") if any(path.match(name) for name in names)]
    said = "\n".join([done.stdout, done.stderr, *logs])
    assert done.returncode == 0, said
    launchers.check_result(job, 2, said)
