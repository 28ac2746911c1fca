"""Whether a change made something slower: ``python -m benchmarks.compare REV [REV2]`` (``make bench-compare REV=...``).

Checks both commits out into temporary worktrees (without REV2: the work tree as it is) and runs the benchmarks of each
in turns, A B B A A B B A, with this interpreter. Each side runs its own benchmarks, which use its names. Compared is
each row's ratio to its limit, which is measured beside it and takes the machine's load out: the loss is B's by A's, in
pairs of neighbours. By the 95% interval of its median a row is

- **slower**: the loss is at least 10%, as the whole interval is above 1.10;
- not slower: the whole interval is below 1.10;
- cannot tell: 1.10 is in the interval. More ``--pairs`` make it narrower. Two tell only where both agree closely.

A row that one side alone has is listed, and not judged. Exit code 1 if a row is slower, 2 if a benchmark failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.measuring import BENCHMARKS, Benchmark, measured
from tests import markdown

REPOSITORY = Path(__file__).resolve().parents[1]
LOSS = 1.10
SLOWER, NOT_SLOWER, CANNOT_TELL, FAILED = "**slower**", "not slower", "cannot tell", "failed: "
#: Short ones, which need no cluster.
COMPARED = (
    Benchmark("steady-state", "benchmarks.steady_state", 300, ("--rounds", "3", "--lengths", "10")),
    Benchmark("saves", "benchmarks.saves", 300),
    Benchmark("restore", "benchmarks.restore", 300),
    Benchmark("startup", "benchmarks.startup", 300),
)


@dataclass(frozen=True)
class Side:
    """A commit, or the work tree, and the folder that its ``clusterddp`` is imported from."""

    name: str
    folder: Path


@contextmanager
def checked_out(revision: str | None, folder: Path) -> Iterator[Side]:
    """A commit's worktree in ``folder``, or a copy of this work tree."""
    commit = git("rev-parse", "--short", "--verify", f"{revision or 'HEAD'}^{{commit}}")
    git("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        for name in () if revision else ("benchmarks", "tests", "clusterddp"):
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        named = commit if revision and revision.startswith(commit) else f"{revision} ({commit})"
        side = Side(named if revision else "the work tree", folder)
        check_import(side)
        yield side
    finally:
        git("worktree", "remove", "--force", str(folder))


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def check_import(side: Side) -> None:
    """That the side's processes import the side's ``clusterddp``, and compile it now rather than while measured."""
    code = "import compileall, clusterddp; compileall.compile_dir(clusterddp.__path__[0], quiet=2); "
    code += "print(clusterddp.__path__[0])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=side.folder, env=environment(side), capture_output=True, text=True, check=True)
    if Path(done.stdout.strip()).resolve() != (side.folder / "clusterddp").resolve():
        sys.exit(f"clusterddp of {side.name} is imported from {done.stdout.strip()}, not from {side.folder}")


def environment(side: Side) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(side.folder)}


def alternating(sides: Sequence[Side], benchmarks: Sequence[Benchmark], pairs: int) -> list[list[dict[str, Any]]]:
    """All rows of each side, in each pair: A B, then B A, and so on. Failed benchmarks are rows, too."""
    found: list[list[dict[str, Any]]] = []
    for number in range(pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        pair: list[dict[str, Any]] = [{}, {}]
        for benchmark in benchmarks:
            for which in order:
                print(
                    f"pair {number + 1} of {pairs}: {benchmark.name}, {sides[which].name}", file=sys.stderr, flush=True
                )
                more, _ = measured(benchmark, benchmark.limit_s, sides[which].folder, environment(sides[which]))
                pair[which].update({row["row"]: row for row in more})
        found.append(pair)
    return found


def losses(pairs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, list[float] | str]:
    """By row: B's ratio to the limit by A's, in each pair; or why there is none."""
    found: dict[str, list[float] | str] = {}
    for name in dict.fromkeys(name for pair in pairs for side in pair for name in side):
        both = [(pair[0].get(name), pair[1].get(name)) for pair in pairs]
        failures = {row["failed"] for pair in both for row in pair if row is not None and "failed" in row}
        if failures:
            found[name] = FAILED + "; ".join(sorted(failures))
        elif any(row is None for pair in both for row in pair):
            found[name] = "only one of the two has this row"
        else:
            found[name] = [loss(pair[0][name], pair[1][name]) for pair in pairs]
    return found


def loss(before: dict[str, Any], after: dict[str, Any]) -> float:
    """By how much ``after`` is worse: above 1 it is."""
    ratio: float = after["ratio"] / before["ratio"]
    return 1 / ratio if before["unit"].endswith("/s") else ratio


def judged(values: Sequence[float]) -> tuple[str, float, float]:
    """What the losses of a row say, and their interval."""
    low, high = common.median_interval(values)
    return SLOWER if low > LOSS else NOT_SLOWER if high < LOSS else CANNOT_TELL, low, high


def described(found: dict[str, list[float] | str], sides: Sequence[Side]) -> tuple[str, bool, bool]:
    """The table; whether a row is slower; whether one failed."""
    lines: list[list[str]] = []
    for name, values in found.items():
        if isinstance(values, str):
            lines.append([name, "-", values])
            continue
        verdict, low, high = judged(values)
        lines.append([name, f"{common.median(values):.3f} ({low:.3f} to {high:.3f})", verdict])
    table = markdown.table(
        ["row", f"{sides[1].name} by {sides[0].name} (95% interval)", "a loss of 10% or more?"], lines
    )
    verdicts = [line[-1] for line in lines]
    return table, SLOWER in verdicts, any(verdict.startswith(FAILED) for verdict in verdicts)


def chosen(names: str | None) -> list[Benchmark]:
    """Those of ``--only``: of this module's, then of ``python -m benchmarks``."""
    known = {benchmark.name: benchmark for benchmark in (*BENCHMARKS, *COMPARED)}
    asked = common.named("benchmark", names, known) if names else [benchmark.name for benchmark in COMPARED]
    return [known[name] for name in asked]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", metavar="REV")
    parser.add_argument("after", metavar="REV2", nargs="?", help="default: the work tree as it is")
    parser.add_argument("--only", metavar="NAMES", help="benchmarks (default: steady-state,saves,restore,startup)")
    parser.add_argument("--pairs", type=int, default=4, help="(default: %(default)s)")
    options = parser.parse_args()
    benchmarks = chosen(options.only)
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        with checked_out(options.before, folder / "a") as before, checked_out(options.after, folder / "b") as after:
            found = losses(alternating((before, after), benchmarks, options.pairs))
            table, slower, failed = described(found, (before, after))
    print(table)
    sys.exit(2 if failed else int(slower))


if __name__ == "__main__":
    main()
