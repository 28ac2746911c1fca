"""Checkpoints of several files that a script saves by itself: which are complete. Real ones of torch."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from clusterddp.jobdef.job import Resume
from clusterddp.supervisor.script_checkpoints import find, why_incomplete
from tests.ddp import free_port
from tests.waiting import wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(  # type: ignore[attr-defined]
            {"model": {"w": torch.rand(100), "b": torch.rand(3)}, "step": 3}, checkpoint_id=tmp_path / "a", no_dist=True
        )
    return tmp_path / "a"


def test_a_distributed_checkpoint_is_complete_with_the_files_that_its_metadata_names(folder: Path) -> None:
    assert why_incomplete(str(folder)) is None
    data = folder / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:-300])
    why = why_incomplete(str(folder))
    assert why is not None and why.startswith(f"__0_0.distcp has {len(content) - 300} bytes, but .metadata names ")
    data.unlink()
    assert why_incomplete(str(folder)) == "__0_0.distcp is missing, but .metadata names it"


def test_a_file_that_is_younger_than_the_metadata_belongs_to_a_save_that_was_cut_off(folder: Path) -> None:
    written = (folder / ".metadata").stat().st_mtime
    os.utime(folder / "__0_0.distcp", (written + 5, written + 5))
    assert why_incomplete(str(folder)) == "__0_0.distcp was written again after .metadata"


def test_a_distributed_checkpoint_inside_of_a_folder_is_checked_too(folder: Path) -> None:
    """As accelerate writes pytorch_model_fsdp_0 and optimizer_0."""
    (folder.parent / "step").mkdir()
    folder.rename(folder.parent / "step" / "optimizer_0")
    assert why_incomplete(str(folder.parent / "step")) is None
    (folder.parent / "step" / "optimizer_0" / "__0_0.distcp").unlink()
    assert why_incomplete(str(folder.parent / "step")) is not None


class _Code:
    def __reduce__(self) -> Any:
        return (os._exit, (3,))


def test_a_metadata_file_executes_no_code(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(_Code()))
    assert why_incomplete(str(folder)) == ".metadata is damaged (AttributeError)"
    (folder / ".metadata").write_bytes((folder / "__0_0.distcp").read_bytes())
    why = why_incomplete(str(folder))
    assert why is not None and why.startswith(".metadata is damaged (")


def test_a_model_in_several_files_needs_those_of_its_index(tmp_path: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    for name in names.values():
        why = why_incomplete(str(tmp_path))
        assert why == f"{name} is missing, but model.safetensors.index.json names it"
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    assert why_incomplete(str(tmp_path)) is None
    (tmp_path / "other.index.json").write_text("[]")
    assert why_incomplete(str(tmp_path)) is None


SAVING = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
for step in range(1, 100):
    parts = {f"rank{rank}.{n}": torch.full((200_000,), float(step)) for n in range(10)}
    dcp.save(parts, checkpoint_id=f"{folder}/step-{step}")
    if rank == 0:
        print(step, flush=True)
"""


@pytest.mark.product
@pytest.mark.parametrize("seed", range(8))
def test_saves_of_two_ranks_that_are_killed_at_any_time_leave_a_newest_one_that_is_whole(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    port = free_port()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    log = open(tmp_path / "log", "w+")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SAVING, str(rank), str(port), str(tmp_path)], env=environment, stdout=log
        )
        for rank in range(2)
    ]
    try:
        wait_until(lambda: (tmp_path / "log").read_text().count("\n") >= 2, "two saves", 60)
        time.sleep(draw.uniform(0, 0.3))  # the time of the kill is what varies
        for one in draw.sample(ranks, 2):
            one.send_signal(signal.SIGKILL)
    finally:
        for one in ranks:
            one.kill()
            one.wait()
        log.close()
    promised = int((tmp_path / "log").read_text().split()[-1])
    found = find(Resume((f"{tmp_path}/step-*",)), str(tmp_path), 0.0)
    assert found.newest is not None
    step = int(found.newest.path.rpartition("-")[2])
    assert promised <= step <= promised + 1, found
    state = {f"rank{rank}.{n}": torch.zeros(200_000) for rank in range(2) for n in range(10)}
    dcp.load(state, checkpoint_id=found.newest.path, no_dist=True)  # type: ignore[attr-defined]
    assert all(bool((one == step).all()) for one in state.values())
