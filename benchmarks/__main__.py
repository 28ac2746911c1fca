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
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.measuring import BENCHMARKS, LONG, measured

MINUTES = 15.0
TEXT = """# All benchmarks in their short form

`make bench` ran each benchmark with `--quick`. The results of a benchmark alone have longer runs."""


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
