"""No value becomes a command or an option on a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.waiting import story, wait_for_outcome

SCRIPT = """
import json, os, sys
json.dump([sys.argv[1:], os.environ["ODD"], os.getcwd()], open(os.environ["SEEN"], "w"))
"""


ODD = 'it\'s $(touch canary) `touch canary` "x" ; %j \\ é\nand a second line'


@pytest.mark.parametrize("name", ['it\'s a "run" $(touch canary) #1; é', "--wrap=touch canary & `x` ${HOME}"])
def test_odd_names_and_values_arrive_on_a_real_slurm(cluster: Cluster, runs: Path, name: str) -> None:
    """Run directory, comment, arguments and environment come as they were given; nothing of them is carried out."""
    (runs / "train.py").write_text(SCRIPT)
    run, seen = RunDirectory(runs / name), runs / "seen.json"
    options = ["--run-dir", f"./{name}", "--device", "cpu", "--partition", "low", "--sbatch", f"comment={ODD[:39]}"]
    values = ["--set", f"env.ODD={ODD}", "--set", f"env.SEEN={seen}"]
    command = [cluster.python, "-m", "clusterddp.submit", "train.py", *options, *values, "--", ODD, "--", "-x", ""]
    job_id = cluster.run(command, cwd=runs).stdout.strip()
    comment = cluster.job(job_id).get("Comment")
    assert wait_for_outcome(run, 60) == "completed", story(run)
    arguments, odd, folder = json.loads(seen.read_text())
    assert arguments == [ODD, "--", "-x", ""]
    assert odd == ODD
    assert folder == str(runs)
    assert comment == ODD[:39]
    assert not list(runs.rglob("canary"))
    assert {path.name for path in run.logs.iterdir()} == {f"job-{job_id}.log", "attempt-0"}
    assert (run.attempt_logs(0) / "rank-0.out").exists()
