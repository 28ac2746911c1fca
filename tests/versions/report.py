"""The matrix's results: versions.json in docs/measurements, and the same as tables."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any

from benchmarks.report import machine, table
from tests.versions.environments import PAIRS, REPOSITORY

PAGES = REPOSITORY / "docs" / "measurements"
FIGURES, TABLES = PAGES / "versions.json", PAGES / "versions.md"
PACKAGES = ("python", "torch", "submitit", "numpy", "cloudpickle", "pyyaml", "rich")

HEAD = """# Versions

What clusterddp is tested with. `make test-versions` writes this page; each row says when it last ran.
All ran on one machine: {cores} cores ({cpu}), Linux {kernel}.
"""
PAIRS_HEAD = """## Python and torch

The first row has the oldest versions that pyproject.toml allows, the last the newest that were available. Tests run on
CPUs with gloo: exact resume, data, gradients, stop agreement, process group, watchdog, local runs, the control channel,
run directory and job definition; and of scripts that do not use clusterddp, their own process group, saves, steps,
checkpoints and signals. *On Slurm* is one run that is preempted and resumes, compared to the last bit, on the machine's
Slurm.
"""
DIFFERENCES = """## What differs

| torch | what | what clusterddp does |
| --- | --- | --- |
| 2.4 | gloo ignores a timeout that is changed after the start (2.9 takes it) | rank 0's log says which timeout holds; \
the watchdog still detects a hang |
| 2.4 | `is_backend_available("cpu:gloo")` is false | each part of such a name is checked separately |
| 2.4, 2.9 | no flight record of gloo's collectives (2.13 and 2.15 have one) | the log of a rank that hangs says so, \
and has its stacks and its line |
| 2.4 | torch.compile records no shapes (2.6 does) | each function that was compiled more than once, \
also if only for evaluations, is reported as inexact |
| 2.4 | FSDP2 (`fully_shard`) on GPUs alone | nothing: the test with a sharded model shards it by DTensor there |

PyPI's builds of torch are for CUDA. Where they were tested, CUDA's libraries, which a CPU does not need, were stand-ins
that report no GPU (`tests/versions/cuda_stubs.py`): nothing here says anything about GPUs.
"""
SLURM_HEAD = """## Slurm

`tests/slurm/test_main_job.py` and `tests/slurm/test_preemption.py` on each: two to four ranks, three nodes in network
namespaces of one machine. 26.05 sets SLURM_STEP_ID to -5 in the batch step, where older releases leave it unset. From
24.05 on, Slurm requeues a job that exits within its grace period even without a request, and holds it after the fifth
time (MaxBatchRequeue); a requeue by clusterddp does not count.
"""
RELEASE_NAMES = {
    "slurm-machine": platform.freedesktop_os_release()["PRETTY_NAME"],
    "slurm-trixie": "Debian 13 (trixie)",
    "slurm-sid": "Debian sid",
}


def load() -> dict[str, dict[str, Any]]:
    return json.loads(FIGURES.read_text())["rows"] if FIGURES.exists() else {}


def write(name: str, row: Mapping[str, Any]) -> None:
    """One row; the others may be written by other processes meanwhile."""
    rows = {**load(), name: row}
    FIGURES.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    TABLES.write_text(text(rows))


def text(rows: Mapping[str, Mapping[str, Any]]) -> str:
    pairs = [_pair(rows[pair.name], pair.python, pair.torch) for pair in PAIRS if pair.name in rows]
    slurms = [_slurm(rows[name], release) for name, release in RELEASE_NAMES.items() if name in rows]
    parts = [
        HEAD.format(**machine()),
        PAIRS_HEAD,
        table([*PACKAGES, "passed", "skipped", "failed", "on Slurm", "date"], pairs),
        "",
        DIFFERENCES,
        SLURM_HEAD,
        table(["Slurm", "from", "passed", "skipped", "failed", "date"], slurms),
    ]
    return "\n".join(parts) + "\n\nRaw figures: [versions.json](versions.json).\n"


def _pair(row: Mapping[str, Any], python: str, torch: str) -> list[object]:
    if "not_run" in row:
        return [python, torch, *[""] * (len(PACKAGES) - 2), f"not run: {row['not_run']}", "", "", "", row["date"]]
    return [*(row["versions"][name] for name in PACKAGES), *_counts(row), row["slurm"], row["date"]]


def _slurm(row: Mapping[str, Any], release: str) -> list[object]:
    if "not_run" in row:
        return ["", release, f"not run: {row['not_run']}", "", "", row["date"]]
    return [row["versions"]["slurm"], release, *_counts(row), row["date"]]


def _counts(row: Mapping[str, Any]) -> list[object]:
    return [row["passed"], row["skipped"], "<br>".join(row["failed"]) or 0]
