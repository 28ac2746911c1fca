"""Devices that fail in a run: what is blamed, in which words, and whether all ranks restart."""

from __future__ import annotations

import json
from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests.gpu.conftest import GPUs
from tests.ranks.test_local import submit
from tests.trainings import events_of
from tests.waiting import story

FAULTS = [
    {"attempt": 0, "kind": "oom", "inside": "forward", "op": "addmm", "after": 7},
    {"attempt": 1, "kind": "assert", "inside": "forward", "op": "addmm", "after": 7, "watchdog": True},
    {"attempt": 2, "kind": "oom", "op": "allocate"},
    {"attempt": 3, "kind": "ecc", "inside": "forward", "op": "addmm", "after": 7, "lose": True},
]


def test_each_fault_of_a_device_is_named_and_the_run_continues_until_the_device_is_lost(
    gpus: GPUs, tmp_path: Path
) -> None:
    """Out of memory in a step and before the first one, an abort by the watchdog, an ECC error, no device."""
    gpus(
        1, faults=json.dumps(FAULTS), state=str(tmp_path / "state"), held_s="1.5", memory_gib="0.05",
    )  # fmt: skip
    run = RunDirectory(tmp_path / "run")
    options = ["--device", "cuda", "--gpus", "1", "--set", "checkpoint.every=2 steps"]
    done = submit(run, "tests/gpu/scripts/faulty.py", *options)
    assert run.attempts() == [0, 1, 2, 3, 4], done.stderr + story(run)
    errors = [event["error"] for event in events_of(run, "rank_failed")]
    for error, words in zip(
        errors,
        [
            "ran out of memory: OutOfMemoryError: CUDA out of memory",
            "aborted: c10::DistBackendError: [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread "
            "terminated with exception: CUDA error: device-side assert triggered",
            "ran out of memory: OutOfMemoryError: CUDA out of memory",
            "raised AcceleratorError: CUDA error: uncorrectable ECC error encountered",  # without torch's advice
            "raised DeviceError: device cuda requested, but no GPU is visible on node ",
        ],
        strict=True,
    ):
        assert error.startswith(words)
    for words in (
        "| likely cause: the device's memory is full",
        "| restarting all ranks in place, because the attempt had completed ",
        "| likely cause: an index is out of range in a kernel",
        "| restarting all ranks in place, because the previous attempt may still have held memory\n",
        "| likely cause: the GPU, its memory or its links have failed",
        "| likely cause: the node has no working GPU",
    ):
        assert words in done.stderr
    # The aborted rank's memory was still in use when the next one started.
    waited = (run.attempt_logs(2) / "rank-0.err").read_text()
    assert "but the previous attempt used 0.03 GiB. Waiting\n" in waited and "Continuing anyway" not in waited
    assert run.outcome() is None and events_of(run, "stopped")[0]["attempt"] == 4
