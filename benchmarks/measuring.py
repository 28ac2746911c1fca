"""The benchmarks, and how one is measured: as a process of its own, with a limit of time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common

#: Between TERM and KILL for a benchmark that takes too long: the test cluster goes down in that time.
GRACE_S = 20.0


@dataclass(frozen=True)
class Benchmark:
    """A module with ``--quick`` and ``--out``, and the seconds that it may take."""

    name: str
    module: str
    limit_s: float = 120.0
    options: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark("steady-state", "benchmarks.steady_state"),
    Benchmark("steady-state-ddp", "benchmarks.steady_state_ddp", 150),
    Benchmark("saves", "benchmarks.saves", 180),
    Benchmark("restore", "benchmarks.restore", 180),
    Benchmark("startup", "benchmarks.startup", 180),
    Benchmark("handover", "benchmarks.handover", 180),
    Benchmark("scale", "benchmarks.scale", 60),
)
#: These take long in any form, and run only by name.
LONG = (
    Benchmark("sharded", "benchmarks.sharded"),
    Benchmark("spares", "benchmarks.spares"),
    Benchmark("peers", "benchmarks.peers"),
)


def measured(
    benchmark: Benchmark, seconds: float, place: Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[list[dict[str, Any]], float]:
    """A benchmark's rows, or the one that says why there are none; and how long it took.

    ``place``: the folder that it runs in, if not this one.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reason = run(benchmark, folder, seconds, place, environment)
        found = [row for file in sorted((folder / "out").glob("*.json")) for row in common.read(file)]
    if reason or not found:
        return [common.failed(benchmark.name, reason or "wrote no rows")], time.monotonic() - began
    return [{"benchmark": benchmark.name, **row} for row in found], time.monotonic() - began


def run(
    benchmark: Benchmark, folder: Path, seconds: float, place: Path | None, environment: Mapping[str, str] | None
) -> str | None:
    """Runs it, with its output in FOLDER/log and its files in FOLDER/out. Returns why it failed."""
    command = [sys.executable, "-m", benchmark.module, "--quick", "--out", str(folder / "out"), *benchmark.options]
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen(
            command,
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"took more than {seconds:.0f} s"
        finally:
            end(process)
        log.seek(0)
        lines = log.read().strip().splitlines()
    if code == 0:
        return None
    print("\n".join(lines[-20:]), file=sys.stderr)
    last = lines[-1].removeprefix(f"{sys.executable}: ") if lines else "no output"
    return f"exit code {code}: {last}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a benchmark and of its processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
