"""NVML beside a run on stand-in devices: a GPU that falls off the bus, and what its GPUs did."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.gpu.conftest import GPUs
from tests.ranks.test_local import submit
from tests.trainings import events_of
from tests.waiting import story

FAULTS = [{"attempt": 0, "kind": "illegal", "inside": "forward", "op": "addmm", "after": 7}]
NVML = Path(__file__).parents[1] / "nvml"


@pytest.mark.product  # unit/test_gpus.py has the Xid, test_device_faults.py the box
def test_an_xid_of_a_ranks_gpu_is_in_the_history_and_in_the_box_about_the_failure(
    gpus: GPUs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error alone would be the script's; the run continues on what it takes for a faulty GPU."""
    gpus(1, faults=json.dumps(FAULTS), state=str(tmp_path / "state"))
    state = {"gpus": [{"minor": 5, "busy": 70}], "xids": [[0, 79]]}
    (tmp_path / "nvml.json").write_text(json.dumps(state))
    monkeypatch.setenv("NVML_STATE", str(tmp_path / "nvml.json"))
    monkeypatch.setenv("PYTHONPATH", f"{NVML}{os.pathsep}{os.environ['PYTHONPATH']}")
    run = RunDirectory(tmp_path / "run")
    done = submit(run, "tests/gpu/scripts/faulty.py", "--device", "cuda", "--gpus", "1")
    faults, failed = events_of(run, "gpu_fault"), events_of(run, "rank_failed")
    assert [(fault["xid"], fault["gpu"]) for fault in faults][:1] == [(79, 5)], done.stderr + story(run)
    words = f"Xid 79 on {faults[0]['host']} GPU 5: the GPU has fallen off the bus"
    assert failed[0]["fault"] == words and "illegal memory access" in failed[0]["error"]
    assert f"| likely cause: {words}" in done.stderr
    assert events_of(run, "restarted") and not events_of(run, "failed")
