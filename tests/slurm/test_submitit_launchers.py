"""A repository's own submitit launchers on a real Slurm, with real preemptions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.ranks.test_submitit_launchers import undisturbed, waiting
from tests.waiting import story, wait_until


@pytest.mark.product  # ranks/test_submitit_launchers.py has the same without Slurm
def test_preempted_launchers_end_as_undisturbed(cluster: Cluster, runs: Path) -> None:
    """MAE's way on two nodes, DINOv2's on one, which a profile has resubmitted: the new job has another id, and
    finds the same folder. The second process that waits lifts the holds."""
    environ = {"CLUSTERDDP_SUBMITIT": "1", "CLUSTERDDP_RUNS": str(runs), "XDG_CONFIG_HOME": str(runs)}
    profile = runs / "clusterddp" / "config.yaml"
    profile.parent.mkdir()
    script = [cluster.python, "tests/scripts/submitit_launcher.py"]
    started = []
    for style, nodes, name in (("files", 2, "paper-0"), ("folder", 1, "paper-train-0")):
        profile.write_text(f"defaults: {{policy: {'resubmit' if style == 'folder' else 'requeue'}}}")
        command = [*script, style, f"{runs}/%j", "--nodes", nodes, "--ngpus", 1, "--disturbed", 1, "--partition", "low"]
        said = cluster.run(command, cwd=cluster.source, env=environ).stdout
        (job_id,) = re.findall(r"^Submitted job_id: (\d+)$", said, re.MULTILINE)
        started.append((style, nodes, RunDirectory(runs / name), runs / job_id))
    for _, nodes, run, folder in started:
        wait_until(lambda: waiting(folder, 0, nodes), f"both ranks\n{story(run)}", timeout=90)  # noqa: B023
    cluster.preempt(seconds=0.1)
    for style, nodes, run, folder in started:
        command = [cluster.python, "tests/scripts/launching.py", "result", run.path, "-"]
        done = cluster.run(command, cwd=cluster.source, timeout=150)
        assert done.stdout.strip() == str([(2, undisturbed(style, nodes))] * nodes), f"{done.stderr}\n{story(run)}"
        went_on = "resubmitted" if style == "folder" else "requeued"
        assert [event["event"] for event in run.events()].count(went_on) == 1, story(run)
        assert (folder / f"{folder.name}_run").readlink() == run.path
        hosts = [(run.attempt_logs(1) / f"rank-{rank}.out").read_text() for rank in range(nodes)]
        assert all(f"job_id={folder.name}, hostname=n" in said for said in hosts)
