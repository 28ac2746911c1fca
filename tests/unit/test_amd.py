"""AMD GPUs: bindings of GPUs to tasks, and the variables that hide GPUs, by what HIP and torch document."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.jobdef.job import Job
from clusterddp.slurm.resources import bound_gpus
from clusterddp.supervisor.launcher import local_variables, srun_command


def test_each_rank_may_be_bound_to_its_own_gpu(tmp_path: Path) -> None:
    """As LUMI and Frontier document it, with a remark for NVIDIA GPUs."""
    job = Job("x", module="x", gpus_per_node=8, srun={"gpus-per-task": "1", "gpu-bind": "closest"})
    assert {"--gpus-per-task=1", "--gpu-bind=closest"} <= set(srun_command(job, tmp_path))
    (remark,) = bound_gpus(job)
    assert remark.startswith("srun.gpus-per-task: each rank sees only its own GPUs") and "NVIDIA" in remark
    assert bound_gpus(Job("x", module="x", gpus_per_node=8)) == []


def test_local_nodes_share_the_gpus_that_hip_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES beside it would contradict it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5,6,7")
    job = Job("x", module="x", nodes=2, gpus_per_node=2)
    variables = [local_variables(job, rank) for rank in (0, 2)]
    assert [own["HIP_VISIBLE_DEVICES"] for own in variables] == ["4,5", "6,7"]
    assert not any("CUDA_VISIBLE_DEVICES" in own for own in variables)
