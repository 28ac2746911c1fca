"""Our own figures, each beside its limit, in one table: ``python -m benchmarks`` (``make bench``), at most 15 minutes.

Runs the short form (``--quick``) of each benchmark, one after the other, and writes bench.md and bench.json. The limits
are measured in the same run: a row compares two figures of the same minutes on the same machine. A benchmark that
fails, is missing or takes too long is a row that says why, and the exit code is 1. A missed bar is a result.

With names, runs these in full instead, each into files of its name. ``python -m benchmarks.NAME --help`` has more
options. GPUs: ``make gpu-check``.
"""

from __future__ import annotations

import argparse
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

MINUTES = 15.0
#: Between TERM and KILL for a benchmark that takes too long: the test cluster goes down in that time.
GRACE_S = 20.0
TEXT = """# All benchmarks in their short form

`make bench` ran each benchmark with `--quick`. The results of a benchmark alone have longer runs."""


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
LONG = (Benchmark("spares", "benchmarks.spares"), Benchmark("peers", "benchmarks.peers"))


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


def all_measured(minutes: float) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The rows of all, and the seconds of each."""
    deadline = time.monotonic() + 60 * minutes
    found: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    for benchmark in BENCHMARKS:
        left = deadline - time.monotonic()
        if left < 1:
            found.append(common.failed(benchmark.name, f"not begun: the {minutes:g} minutes were over"))
            continue
        common.say(benchmark.name)
        more, seconds[benchmark.name] = measured(benchmark, min(left, benchmark.limit_s))
        found += more
        for row in more:
            print("    " + " | ".join(common.cells(row)), file=sys.stderr, flush=True)
    return found, seconds


def main() -> None:
    """The command line."""
    modules = {benchmark.name: benchmark.module for benchmark in (*BENCHMARKS, *LONG)}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(modules)}")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder of the files (default: %(default)s)")
    options = parser.parse_args()
    if options.names:
        if unknown := set(options.names) - set(modules):
            parser.error(f"no benchmark {', '.join(sorted(unknown))}. There are {', '.join(modules)}")
        commands = ([sys.executable, "-m", modules[name], "--out", str(options.out)] for name in options.names)
        sys.exit(max([subprocess.run(command).returncode for command in commands]))
    load = os.getloadavg()[0]
    found, seconds = all_measured(MINUTES)
    where = f"load average {load:.0f} at the start, {sum(seconds.values()) / 60:.0f} minutes"
    common.write(options.out, "bench", TEXT, common.Found({"seconds": seconds}, found, where))
    sys.exit(any("failed" in row for row in found))


if __name__ == "__main__":
    main()
