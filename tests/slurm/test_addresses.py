"""The addresses by which the nodes of a job reach each other, on a real Slurm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.conftest import Clusters

SCRIPT = """\
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SLURM_LAUNCH_NODE_IPADDR")
print(*(os.environ.get(name) for name in names), flush=True)
"""


@pytest.mark.product
@pytest.mark.parametrize("interface", [None, "[ib0, eth0]", "ib0"])
def test_nodes_that_resolve_their_own_name_to_loopback_train_together(
    interface: str | None, clusters: Clusters, runs_on: Callable[[Cluster], Path]
) -> None:
    """srun tells the tasks on the first node 127.0.0.1, and rank 0 is there. An interface that no node has is an error
    that names a node."""
    cluster = clusters.get(ClusterConfig(loopback_names=True, slurmdbd=False, release=Clusters.standard.release))
    runs = runs_on(cluster)
    script, run = runs / "train.py", RunDirectory(runs / "run")
    script.write_text(SCRIPT)
    command = [cluster.python, "-m", "clusterddp.submit", script, "--run-dir", run.path, "--nodes", "2", "--gpus", "2"]
    options = ["--device", "cpu", "--partition", "off", "--wait", "--set", "steps=off"]
    named = ["--set", f"interface={interface}"] if interface else []
    done = cluster.run([*command, *options, *named], cwd=cluster.source, check=False, timeout=120)
    if interface == "ib0":
        log = "".join(path.read_text() for path in run.logs.glob("job-*.log"))
        assert done.returncode != 0 and "has no ib0" in log
        return
    assert done.returncode == 0, done.stderr
    rank_0, rank_3 = ((run.attempt_logs(0) / f"rank-{rank}.out").read_text().split() for rank in (0, 3))
    assert rank_0[3].startswith("127.")  # else this cluster does not show the fault
    assert rank_0[:3] == rank_3[:3] == [cluster.address("n1"), "eth0", "=eth0" if interface else "None"]
