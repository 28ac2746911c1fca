"""``python -m tests.versions``: run the matrix and write RESULTS.json and docs/measurements/versions.md.

Rows that this call does not run keep their last result, with its date. The exit code says whether all rows passed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster import release, unavailable
from tests.cluster.config import RELEASES
from tests.cluster.install import SEARCH_PATH
from tests.versions import report
from tests.versions.environments import PAIRS, REPOSITORY, Pair, environment, interpreters, versions

#: What depends on Python or torch: started processes, signals and threads, gloo, the bits of a resumed run, files,
#: and what is hooked into torch in scripts that do not use clusterddp: saves, steps, the process group.
TESTS = (
    "ranks/exact_resume unit/orders unit/loader unit/workers ranks/child_processes "
    "ranks/gradients ranks/buffers ranks/compiled_shapes ranks/agreement ranks/process_group ranks/own_group "
    "ranks/group_ends ranks/heartbeat ranks/heartbeat_faults ranks/hangs unit/step_timing ranks/local ranks/two_lines "
    "ranks/untouched ranks/script_checkpoints ranks/script_outcomes unit/signals unit/script_saves unit/store "
    "unit/control_channel unit/run_directory unit/job unit/batch"
).split()
#: Each pair's run on the cluster: its ranks are started by srun as an ordinary user.
ON_SLURM = "tests/slurm/test_main_job.py::test_a_preempted_run_is_requeued_and_is_the_same_run"
SLURM_TESTS = ("slurm/main_job", "slurm/preemption")
MACHINE = "machine"
"""The Slurm that is installed here, beside RELEASES."""


def main(arguments: Sequence[str] | None = None) -> int:
    top = parser()
    options = top.parse_args(arguments)
    if unknown := set(options.rows) - set(_names()):
        top.error(f"no row {', '.join(sorted(unknown))}; expected {', '.join(_names())}")
    chosen = options.rows
    found = interpreters(options.pythons.split())
    for pair in PAIRS:
        if pair.name in chosen:
            report.write(pair.name, _row(_test_pair, pair, found, options.index))
    for name in _slurms():
        if name in chosen:
            report.write(name, _row(_test_slurm, name))
    rows = report.load()
    print(*report.tables(rows).values(), sep="\n\n")
    return int(any(rows[name].get("failed") or "not_run" in rows[name] for name in chosen))


def parser() -> argparse.ArgumentParser:
    names = _names()
    top = argparse.ArgumentParser(prog="python -m tests.versions", description="Run the matrix of versions.")
    top.add_argument("rows", nargs="*", metavar="ROW", default=names, help=f"{', '.join(names)}; default: all")
    usual = " ".join(f"python{pair.python}" for pair in PAIRS)
    top.add_argument("--pythons", default=usual, metavar="NAMES", help=f"interpreters; default: {usual}")
    top.add_argument("--index", metavar="URL", help="another package index for torch, such as one of CPU builds")
    return top


def _names() -> list[str]:
    return [*(pair.name for pair in PAIRS), *_slurms()]


def _slurms() -> list[str]:
    return [f"slurm-{name}" for name in (MACHINE, *RELEASES)]


def _row(test: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    started = time.monotonic()
    row = test(*arguments)
    return {**row, "date": time.strftime("%Y-%m-%d"), "seconds": round(time.monotonic() - started)}


def _test_pair(pair: Pair, found: Mapping[str, str], index: str | None) -> dict[str, Any]:
    if pair.python not in found:
        return {"not_run": f"no Python {pair.python} here; name one in PYTHONS"}
    try:
        python = environment(pair, found[pair.python], index)
    except subprocess.CalledProcessError as error:
        return {"not_run": f"its environment cannot be made: {' '.join(error.cmd[-3:])} failed"}
    row: dict[str, Any] = {"versions": versions(python)}
    row |= _pytest(python, ["-m", "not slurm", *files(TESTS)])
    if reason := unavailable():
        return {**row, "slurm": f"not run: {reason}"}
    on_slurm = _pytest(python, [ON_SLURM])
    row["slurm"] = "passed" if on_slurm["passed"] and not on_slurm["failed"] else "failed"
    row["failed"] += on_slurm["failed"]
    return row


def _test_slurm(name: str) -> dict[str, Any]:
    wanted = name.removeprefix("slurm-")
    if reason := unavailable():
        return {"not_run": reason}
    environment = {}
    search_path = SEARCH_PATH
    if wanted != MACHINE:
        release.install(wanted)
        environment["CLUSTERDDP_TEST_RELEASE"] = wanted
        search_path = f"{release.programs(wanted)}:{SEARCH_PATH}"
    controller = shutil.which("slurmctld", path=search_path)
    said = subprocess.run([str(controller), "-V"], capture_output=True, text=True, check=True).stdout
    return {"versions": {"slurm": said.split()[-1]}, **_pytest(Path(sys.executable), files(SLURM_TESTS), environment)}


def files(names: Sequence[str]) -> list[str]:
    return [str(Path("tests", name).with_name(f"test_{Path(name).name}.py")) for name in names]


def _pytest(python: Path, words: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Passed and skipped tests by number, failed ones by name."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.xml")
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={result}"]
        variables = {**os.environ, **(environment or {})}
        command = [str(python), "-m", "pytest", *options, *words]
        done = subprocess.run(command, cwd=REPOSITORY, env=variables)
        cases = list(ElementTree.parse(result).iter("testcase")) if result.exists() else []
    failed = [
        case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    if done.returncode not in (0, 1):
        failed.append(f"pytest ended with exit code {done.returncode}")
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


if __name__ == "__main__":
    sys.exit(main())
