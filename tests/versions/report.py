"""The matrix's results: RESULTS.json here, and the tables of docs/measurements/versions.md."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.markdown import fill, table
from tests.versions.environments import PAIRS, REPOSITORY

FIGURES, PAGE = Path(__file__).with_name("RESULTS.json"), REPOSITORY / "docs" / "measurements" / "versions.md"
PACKAGES = ("python", "torch", "submitit", "numpy", "cloudpickle", "pyyaml", "rich")
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
    fill(PAGE, tables(rows))


def tables(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Those of the page, by name."""
    pairs = [_pair(rows[pair.name], pair.python, pair.torch) for pair in PAIRS if pair.name in rows]
    slurms = [_slurm(rows[name], release) for name, release in RELEASE_NAMES.items() if name in rows]
    return {
        "versions": table([*PACKAGES, "passed", "skipped", "failed", "on Slurm", "date"], pairs),
        "slurms": table(["Slurm", "from", "passed", "skipped", "failed", "date"], slurms),
    }


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
