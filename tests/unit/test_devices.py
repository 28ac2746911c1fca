"""Which GPUs the ranks of a node see, NVIDIA's and AMD's, and what is said where they see too few."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.distributed import devices
from clusterddp.distributed.devices import choose_devices, devices_of, own_mig_device, visible_gpus
from clusterddp.environment import RankEnvironment
from clusterddp.errors import DeviceError, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.runs.submission import check_ranks
from clusterddp.slurm.resources import bound_gpus
from clusterddp.supervisor.launcher import local_variables, srun_command
from clusterddp.training.run_state import other_hardware
from tests.wording import raises

MIG = "MIG-11,MIG-22, MIG-33"


def place(rank: int, ranks: int, on_node: int, launcher: Any = "local") -> RankEnvironment:
    return RankEnvironment(rank, rank % on_node, ranks, on_node, rank // on_node, (), None, None, launcher)


def visible(rank: int, **shape: int) -> str | None:
    return local_variables(Job("train.py", **shape), rank).get("CUDA_VISIBLE_DEVICES")  # type: ignore[arg-type]


def test_local_nodes_share_the_machines_gpus_or_those_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list is none, also with several nodes."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [visible(rank, nodes=2, gpus_per_node=2) for rank in range(4)] == ["0,1", "0,1", "2,3", "2,3"]
    assert visible(0, gpus_per_node=2) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [visible(rank, nodes=2, gpus_per_node=2) for rank in (0, 2)] == ["4,5", "6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [visible(rank, nodes=2, gpus_per_node=2) for rank in (0, 2)] == ["", ""]


def test_a_list_that_is_too_short_for_a_local_run_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    check_ranks(Job("train.py", gpus_per_node=2), "--local")
    check_ranks(Job("train.py", nodes=2, gpus_per_node=2, device="cpu"), "--local")
    check_ranks(Job("train.py", nodes=2, gpus_per_node=2), None)
    with raises(UsageError):
        check_ranks(Job("train.py", nodes=2, gpus_per_node=2), "--local")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with raises(UsageError):
        check_ranks(Job("train.py", gpus_per_node=2), "--local")


@pytest.mark.parametrize(
    ("rank", "launcher", "named"),
    [
        (2, "local", "2,3"),
        (0, "slurm", "GPU-5"),
        (0, "slurm", ""),
        (0, "slurm", None),
    ],
)
def test_no_visible_gpu_is_explained_by_what_hides_them(rank: int, launcher: Any, named: Any) -> None:
    """As where 2 x 2 GPUs are asked for on a machine with two, whose second pair is not there."""
    with raises(DeviceError):
        choose_devices(place(rank, 4, 2, launcher), "cuda", 1, 0, "n1", named)


def test_each_rank_uses_its_own_mig_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows a process only the first one of a list."""
    cuda = devices.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 1 if "MIG" in os.environ["CUDA_VISIBLE_DEVICES"] else 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG)
    assert devices_of(place(1, 3, 3, "slurm"), "cuda", 1) == (torch.device("cuda:0"),)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-22"
    assert devices_of(place(0, 1, 1, "slurm"), None, 1) == (torch.device("cuda:0"),)  # already its own
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert devices_of(place(1, 3, 3, "slurm"), "cuda", 1) == (torch.device("cuda:1"),)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2"


@pytest.mark.parametrize(("result", "started"), [(0, True), (3, False)])
def test_a_script_that_asks_for_gpus_before_a_rank_has_its_mig_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: int, started: bool
) -> None:
    """CUDA's driver reads the list only once, and all ranks would use the first device. ``result``: the driver's."""
    library = tmp_path / "driver.so"
    compiler = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=f"int cuDeviceGetCount(int *n) {{ return {result}; }}", text=True, check=True)
    monkeypatch.setattr(devices, "_DRIVER", str(library))
    monkeypatch.setattr(devices, "visible_gpus", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG)
    assert devices_of(place(0, 3, 3, "slurm"), "cuda", 1) == (torch.device("cuda:0"),)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG)
    with raises(DeviceError) if started else nullcontext():
        devices_of(place(1, 3, 3, "slurm"), "cuda", 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == (MIG if started else "MIG-22")


@pytest.mark.parametrize(
    ("ranks", "per_rank"),
    [
        (4, 1),
        (1, 2),
    ],
)
def test_what_mig_devices_cannot_do_is_refused(ranks: int, per_rank: int) -> None:
    with raises(DeviceError):
        own_mig_device(place(0, ranks, ranks), per_rank, MIG, "n1")


def test_memory_that_no_device_has_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """As where a run continues on smaller GPUs than those of the attempt before."""
    gib = devices.GIB
    monkeypatch.setattr(devices.torch.cuda, "mem_get_info", lambda device: (39 * gib, 40 * gib))
    gpus = [torch.device("cuda:0"), torch.device("cuda:1")]
    assert devices.wait_until_free(gpus, 70 * gib, patience_s=0)
    assert not capfd.readouterr().err
    assert not devices.wait_until_free(gpus, 40 * gib, patience_s=0)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({}, {}, []),
        ({"gpus": {"A": 8}, "ranks_per_node": 8}, {"gpus": {"A": 8}, "ranks_per_node": 8}, []),
        ({"gpus": {"A": 8}, "ranks_per_node": 8}, {"gpus": {"H": 8}, "ranks_per_node": 8}, ["on H instead of A"]),
        (
            {"gpus": {"A": 8}, "ranks_per_node": 8},
            {"gpus": {"A": 4, "H": 4}, "ranks_per_node": 4},
            ["on A and H instead of A"],
        ),
        (
            {"gpus": {"A": 8}, "ranks_per_node": 8},
            {"gpus": {"A": 8}, "ranks_per_node": 4},
            ["4 ranks per node instead of 8"],
        ),
        ({"gpus": {"A": 1}, "ranks_per_node": 1}, {}, ["on CPUs instead of A"]),
    ],
)
def test_other_gpus_and_another_layout_make_a_resume_inexact(before: Any, now: Any, words: list[str]) -> None:
    """Kernels and the order of NCCL's sums depend on them."""
    assert other_hardware(before, now) == words


# --- AMD GPUs: bindings of GPUs to tasks, and the variables that hide GPUs, by what HIP and torch document


def test_ranks_are_distributed_in_the_order_of_their_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's default alternates between the sockets of a node. What the user gives stays."""
    monkeypatch.delenv("SLURM_DISTRIBUTION", raising=False)
    assert "--distribution=block:block" in srun_command(Job(name="x", module="x"), tmp_path)
    own = srun_command(Job(name="x", module="x", srun={"distribution": "cyclic"}), tmp_path)
    assert [word for word in own if "distribution" in word] == ["--distribution=cyclic"]
    monkeypatch.setenv("SLURM_DISTRIBUTION", "cyclic")
    assert not any("distribution" in word for word in srun_command(Job(name="x", module="x"), tmp_path))


def test_each_rank_may_be_bound_to_its_own_gpu(tmp_path: Path) -> None:
    """As LUMI and Frontier document it, with a remark for NVIDIA GPUs."""
    job = Job("x", module="x", gpus_per_node=8, srun={"gpus-per-task": "1", "gpu-bind": "closest"})
    assert {"--gpus-per-task=1", "--gpu-bind=closest"} <= set(srun_command(job, tmp_path))
    (remark,) = bound_gpus(job)
    assert remark.startswith("srun.gpus-per-task: each rank sees only its own GPUs") and "NVIDIA" in remark
    assert bound_gpus(Job("x", module="x", gpus_per_node=8)) == []
    more: list[dict[str, str | bool]] = [{"gpu-bind": "none"}, {"gres-flags": "allow-task-sharing"}]
    for harmless in more:  # all GPUs are seen, or reached
        assert bound_gpus(dataclasses.replace(job, srun={**job.srun, **harmless})) == []


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
