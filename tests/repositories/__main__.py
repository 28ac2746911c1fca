"""``python -m tests.repositories FOLDER [NAME ...]``: runs the repositories whose checkouts the folder has."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.cluster import Cluster
from tests.ddp import REPOSITORY
from tests.repositories import slurm
from tests.repositories.disturbances import DISTURBANCES, Result, run
from tests.repositories.entries import Repository, Unusable, prepare, read_all, with_lines
from tests.repositories.page import write_page

MEASURED = REPOSITORY / "docs" / "measurements" / "repositories.json"
WORK = REPOSITORY / "build" / "repositories"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.repositories", description=__doc__)
    parser.add_argument("checkouts", type=Path, help="the folder of checkouts; nothing is downloaded")
    parser.add_argument("names", nargs="*", help="of these repositories only; default: all")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="that has the repositories' packages")
    parser.add_argument("--only", nargs="+", choices=DISTURBANCES, default=DISTURBANCES, help="some disturbances")
    parser.add_argument("--slurm", action="store_true", help="preempted on the test cluster instead")
    options = parser.parse_args(arguments)
    entries = read_all()
    if unknown := set(options.names) - {entry.name for entry in entries}:
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(entry.name for entry in entries)}")
    chosen = [entry for entry in entries if not options.names or entry.name in options.names]
    with Cluster.up(slurm.CONFIG) if options.slurm else nullcontext() as cluster:
        bad = sum(measure(entry, options, cluster) for entry in chosen)
    write_page(entries, json.loads(MEASURED.read_text()))
    return 1 if bad else 0


def measure(entry: Repository, options: argparse.Namespace, cluster: Cluster | None) -> int:
    """Runs one repository under each disturbance; returns how many runs were not completed."""
    try:
        root = cluster.scratch / "repositories" if cluster else WORK
        copy = prepare(entry, options.checkouts.resolve(), root / entry.name)
    except Unusable as error:
        print(f"{entry.name}: not run: {error}")
        return 0
    whole, bad = None, 0
    for disturbance in dict.fromkeys(["undisturbed", *options.only]):
        known = _recorded(entry).get("undisturbed")
        if disturbance == "undisturbed" and (cluster or disturbance not in options.only) and known:
            whole = Result(**known)
            continue
        if disturbance == "lines":
            if not entry.no_step_lost:
                continue
            with_lines(copy)
        if cluster:
            result = slurm.run(copy, disturbance, options.python, cluster)
        else:
            result = run(copy, disturbance, options.python)
        if disturbance == "undisturbed":
            whole = result
        elif whole is not None:
            result = result.against(whole)
        print(f"{entry.name}: {result}", flush=True)
        bad += result.state != "completed"
        _record(entry, "slurm" if cluster else "runs", result)
    return bad


def _recorded(entry: Repository) -> dict[str, Any]:
    """The local runs of this commit."""
    row = json.loads(MEASURED.read_text()).get(entry.name, {}) if MEASURED.exists() else {}
    return row.get("runs", {}) if row.get("commit") == entry.commit else {}


def _record(entry: Repository, kind: str, result: Result) -> None:
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    row = measured.get(entry.name, {})
    if row.get("commit") != entry.commit:
        row = {"commit": entry.commit}
    row.setdefault(kind, {})[result.disturbance] = result.record()
    measured[entry.name] = row
    MEASURED.write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
