"""``python -m tests.repositories FOLDER [NAME ...]``: measures the repositories whose checkouts the folder has."""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests import cluster
from tests.cluster import Cluster
from tests.ddp import REPOSITORY
from tests.repositories import slurm
from tests.repositories.disturbances import CELLS, LIMIT_S, ON_SLURM, Result, run
from tests.repositories.entries import Copy, Repository, Unusable, prepare, read_all, with_lines
from tests.repositories.page import PAGE, write_page

MEASURED = PAGE.with_suffix(".json")
WORK = REPOSITORY / "build" / "repositories"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.repositories", description=__doc__)
    parser.add_argument("checkouts", type=Path, help="the folder of checkouts; nothing is downloaded")
    parser.add_argument("names", nargs="*", help="of these repositories only; default: all")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="that has the repositories' packages")
    parser.add_argument("--only", nargs="+", choices=CELLS, default=CELLS, help="some cells of each row")
    options = parser.parse_args(arguments)
    entries = read_all()
    if unknown := set(options.names) - {entry.name for entry in entries}:
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(entry.name for entry in entries)}")
    chosen = [entry for entry in entries if not options.names or entry.name in options.names]
    version = tested_version()
    with_slurm = any(cell in ON_SLURM for cell in options.only)
    if with_slurm and (reason := cluster.unavailable()):
        print(f"not measured on Slurm: {reason}")
        with_slurm = False
    slurm_cluster = Cluster.up(slurm.CONFIG) if with_slurm else None
    try:
        bad = sum(measure(entry, options, slurm_cluster, version) for entry in chosen)
    finally:
        if slurm_cluster:
            slurm_cluster.down()
    write_page(entries, json.loads(MEASURED.read_text()))
    return 1 if bad else 0


def tested_version() -> str:
    """The commit that last changed the package."""
    git = ["git", "-C", str(REPOSITORY)]
    changed = subprocess.run([*git, "status", "--porcelain", "clusterddp"], capture_output=True, text=True, check=True)
    if changed.stdout:
        raise SystemExit(f"commit the changes of the package first, so that the page can name it:\n{changed.stdout}")
    log = [*git, "log", "-1", "--abbrev=10", "--format=%h", "--", "clusterddp"]
    return subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()


def measure(entry: Repository, options: argparse.Namespace, slurm_cluster: Cluster | None, version: str) -> int:
    """Measures the cells of one repository; returns how many runs were not complete."""
    checkouts, copies, bad = options.checkouts.resolve(), dict[Path, Copy](), 0
    for cell in CELLS:
        on_slurm = cell in ON_SLURM
        if cell not in options.only or (on_slurm and slurm_cluster is None):
            continue
        if cell == "lines" and not entry.no_step_lost:
            continue
        root = (slurm_cluster.scratch / "repositories" if on_slurm and slurm_cluster else WORK) / entry.name
        try:
            if root not in copies:
                copies[root] = prepare(entry, checkouts, root)
            lines = with_lines(copies[root]) if cell == "lines" else 0
        except Unusable as error:
            print(f"{entry.name}: not run: {error}")
            return bad
        if on_slurm and slurm_cluster:
            result = slurm.run(copies[root], cell, options.python, slurm_cluster, WORK / entry.name / cell)
        else:
            result = run(copies[root], cell, options.python)
        result = replace(result, version=version, lines=lines)
        whole = Result(**known) if (known := _recorded(entry).get("undisturbed")) else result
        if cell != "undisturbed":
            result = result.against(whole)
        print(f"{entry.name}: {result}", flush=True)
        bad += not result.complete(whole)
        if result.state is None:
            print(f"{entry.name}: {cell}: no outcome within {LIMIT_S} s, which is not recorded")
            continue
        _record(entry, result)
    return bad


def _recorded(entry: Repository) -> dict[str, Any]:
    """The runs of this commit of the repository."""
    row = json.loads(MEASURED.read_text()).get(entry.name, {}) if MEASURED.exists() else {}
    return row.get("runs", {}) if row.get("commit") == entry.commit else {}


def _record(entry: Repository, result: Result) -> None:
    with MEASURED.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        measured = json.loads(file.read() or "{}")
        row = {"commit": entry.commit, "runs": {**_recorded(entry), result.disturbance: result.record()}}
        measured[entry.name] = row
        file.truncate(0)
        file.write(json.dumps(measured, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
