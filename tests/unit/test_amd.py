"""AMD GPUs: bindings of GPUs to tasks, and the variables that hide GPUs, by what HIP and torch document."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clusterddp.distributed.devices import visible_gpus
from clusterddp.jobdef.job import Job
from clusterddp.slurm.batch import bound_gpus
from clusterddp.supervisor.launcher import local_variables, srun_command


def test_each_rank_may_be_bound_to_its_own_gpu(tmp_path: Path) -> None:
    """As LUMI and Frontier document it, with a remark for NVIDIA GPUs."""
    job = Job("x", module="x", gpus_per_node=8, srun={"gpus-per-task": "1", "gpu-bind": "closest"})
    assert {"--gpus-per-task=1", "--gpu-bind=closest"} <= set(srun_command(job, tmp_path))
    (remark,) = bound_gpus(job)
    assert remark.startswith("srun.gpus-per-task: each rank sees only its own GPUs") and "NVIDIA" in remark
    assert bound_gpus(Job("x", module="x", gpus_per_node=8)) == []


def test_gpus_that_rocr_hides_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.6 counts them; HIP's own count does not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "3")
    assert visible_gpus() == 8
    monkeypatch.setattr(torch.version, "hip", "6.0.32830")
    assert visible_gpus() == 1
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    assert visible_gpus() == 8
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert visible_gpus() == 0


def test_local_nodes_share_the_gpus_that_hip_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES beside it would contradict it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5,6,7")
    job = Job("x", module="x", nodes=2, gpus_per_node=2)
    variables = [local_variables(job, rank) for rank in (0, 2)]
    assert [own["HIP_VISIBLE_DEVICES"] for own in variables] == ["4,5", "6,7"]
    assert not any("CUDA_VISIBLE_DEVICES" in own for own in variables)
