"""From the start of the ranks to their first step: ``python -m benchmarks.startup [--quick]`` (``make bench-startup``).

A script of one DDP step (benchmarks/scripts/startup.py), once with clusterddp under ``submit --local``, once as the
least DDP script, whose processes are started all at once with torchrun's variables. Both alternate, with 1 to 32 gloo
ranks on this machine.

- Time: from the start of the first rank's process until all ranks have made their first step, and its phases on rank 0.
- CPU time of a rank until then: on a machine with other work, that is what can be compared.
- What a rank imports, opens and resolves: its modules at the first step; system calls, counted with strace
  (``apt-get install strace``; left out without it), of one rank.

Bar: ours takes at most 1.1 times as long.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, rows
from tests.ddp import free_port

BAR = 1.1
RANKS, QUICK_RANKS = [1, 2, 4, 8, 16, 32], [1, 2, 4, 8]
ROUNDS, QUICK_ROUNDS = 12, 6
#: Seconds in which further rounds are begun, of all numbers of ranks together.
BUDGET_S, QUICK_BUDGET_S = 480.0, 80.0
LEAST, RUN_S = 2, 300.0
SCRIPT = Path(__file__).with_name("scripts") / "startup.py"
REPOSITORY = Path(__file__).resolve().parents[1]
EMPTY, OURS = "empty", "ours"
CALLS = {
    "files opened": ("open", "openat"),
    "opened without success": ("open!", "openat!"),
    "stat and the like": ("stat", "lstat", "newfstatat", "statx", "access", "faccessat2", "readlink"),
    "connections": ("connect",),
    "DNS queries": ("dns",),
}


# ---- the two sides


def command(kind: str, ranks: int, folder: Path) -> list[str]:
    """What starts all ranks of ours, or one of the empty script."""
    script = [str(SCRIPT), kind, str(folder)]
    if kind == EMPTY:
        return [sys.executable, *script]
    shape = ["--local", "--device", "cpu", "--gpus", str(ranks), "--set", "progress_interval=off"]
    run = ["submit", str(SCRIPT), *shape, "--run-dir", str(folder / "run")]
    return [sys.executable, "-m", "clusterddp", *run, "--", *script[1:]]


def environment(ranks: int, port: int, rank: int | None) -> dict[str, str]:
    """Of our launcher (``rank`` is None), or of a rank of the empty script: as many threads for both."""
    cores = len(os.sched_getaffinity(0))
    found = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // ranks)), "PYTHONPATH": str(REPOSITORY)}
    if rank is None:
        return found
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    place = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {**found, **{name: str(value) for name, value in own.items()}, **place}


def start(kind: str, ranks: int, prefix: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What all ranks have written, in rank order."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        numbers: list[int | None] = [None] if kind == OURS else [*range(ranks)]
        processes = [
            subprocess.Popen(
                [*prefix, *command(kind, ranks, folder)],
                env=environment(ranks, port, number),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for number in numbers
        ]
        try:
            for process in processes:
                _, said = process.communicate(timeout=RUN_S)
                if process.returncode:
                    sys.exit(f"{kind}, {ranks} ranks: ended with {process.returncode}: {said.decode()[-800:]}")
        finally:
            for process in processes:
                process.kill()
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def seconds_of(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of one start."""
    began = min(rank["started"] for rank in found)
    ends = [rank["phases"]["first step"] for rank in found]
    first = found[0]
    times = [first["started"], *first["phases"].values()]
    phases = {name: times[place + 1] - times[place] for place, name in enumerate(first["phases"])}
    cpu = sum(rank["cpu_s"] for rank in found) / len(found)
    return {"seconds": max(ends) - began, "cpu": cpu, "phases": phases}


def measure(counts: Sequence[int], rounds: int, budget_s: float) -> dict[str, Any]:
    """The figures of all starts, by number of ranks and side. The sides take turns, and who is first alternates."""
    deadline = time.monotonic() + budget_s
    found: dict[str, Any] = {str(ranks): {EMPTY: [], OURS: []} for ranks in counts}
    modules: dict[str, list[str]] = {}
    for number in range(rounds):
        for ranks in counts:
            if number >= LEAST and time.monotonic() > deadline:
                return {"ranks": found, "modules": modules}
            for kind in (EMPTY, OURS) if number % 2 else (OURS, EMPTY):
                made = start(kind, ranks)
                found[str(ranks)][kind].append(seconds_of(made))
                modules[kind] = made[0]["modules"]
            report.say(f"round {number + 1}, {ranks} ranks")
    return {"ranks": found, "modules": modules}


# ---- what a rank opens


def system_calls(kind: str) -> dict[str, int] | None:
    """How often one rank makes each kind of call until it exits; None without strace."""
    if shutil.which("strace") is None:
        return None
    traced = "execve,clone,clone3,fork,vfork," + ",".join(
        sorted({call.rstrip("!") for calls in CALLS.values() for call in calls} - {"dns"})
    )
    with tempfile.NamedTemporaryFile("r", suffix=".strace") as file:
        try:
            start(kind, 1, ["strace", "-f", "-qq", "-s", "4096", "-o", file.name, "-e", f"trace={traced}"])
        except SystemExit as error:
            print(f"system calls are not counted: {error}", file=sys.stderr)
            return None
        return counted_calls(file.read().splitlines(), '\\"clusterddp.worker\\"' if kind == OURS else SCRIPT.name)


def counted_calls(lines: Iterable[str], program: str) -> dict[str, int]:
    """The calls, by the kinds of CALLS, of the first process with ``program`` on its command line, and its threads."""
    process: str | None = None
    threads: set[str] = set()
    counts: Counter[str] = Counter()
    for line in lines:
        thread, _, call = line.partition(" ")
        call = call.lstrip()
        name = call.partition("(")[0].removeprefix("<... ").partition(" ")[0]
        if process is None and name == "execve" and program in call and " = -1 " not in call:
            process = thread
            threads.add(thread)
        if thread not in threads:
            continue
        if name.startswith("clone") and (made := re.search(r"= (\d+)$", call)):
            threads |= {made[1]} if "CLONE_THREAD" in call else set()
        if call.startswith("<... "):  # counted where it began
            continue
        counts[name] += 1
        counts[f"{name}!"] += " = -1 " in call
        counts["dns"] += name == "connect" and "htons(53)" in call
    return {kind: sum(counts[call] for call in calls) for kind, calls in CALLS.items()}


# ---- the report


def rows_of(figures: Mapping[str, Any]) -> list[rows.Row]:
    """What is judged, and what is counted."""
    found = []
    for ranks, sides in figures["ranks"].items():
        for what, unit, words in (("seconds", "s", "exec to first step"), ("cpu", "s", "CPU time of a rank")):
            ours, empty = ([one[what] for one in sides[kind]] for kind in (OURS, EMPTY))
            name = f"start, {ranks} rank{'s' * (ranks != '1')}: {words}"
            found.append(rows.paired(name, unit, ours, empty, "empty DDP script", allowed=BAR))
    calls: Mapping[str, Mapping[str, int]] = figures.get("calls", {})
    numbers = {kind: (values[OURS], values[EMPTY], "calls") for kind, values in calls.items()}
    modules = figures["modules"]
    numbers["modules imported at the first step"] = (len(modules[OURS]), len(modules[EMPTY]), "modules")
    found += [
        rows.counted(f"start, 1 rank: {words}", unit, one, other, "empty DDP script")
        for words, (one, other, unit) in numbers.items()
        if other
    ]
    return found


def phases_table(by_ranks: Mapping[str, Any]) -> str:
    """The phases of both sides, and which part of all CPU time importing torch is."""
    names = [*next(iter(by_ranks.values()))[OURS][0]["phases"]]
    lines = []
    for ranks, sides in by_ranks.items():
        for kind in (OURS, EMPTY):
            values = [report.median([one["phases"].get(name, 0.0) for one in sides[kind]]) for name in names]
            whole = report.median([sum(one["phases"].values()) for one in sides[kind]])
            lines.append([ranks, kind, *values, f"{values[names.index('import torch')] / whole:.0%}"])
    return report.table(["ranks", "side", *names, "import torch / all"], lines)


def in_addition(figures: Mapping[str, Any]) -> list[list[object]]:
    """How many modules of which packages ours has in addition."""
    more = set(figures["modules"][OURS]) - set(figures["modules"][EMPTY])
    packages = Counter(name.partition(".")[0] for name in sorted(more))
    return [[package, number] for package, number in packages.most_common()]


def main() -> None:
    """The command line."""
    parser = report.parser(__doc__, "1, 2, 4 and 8 ranks, in at most 2 minutes")
    parser.add_argument("--ranks", type=int, nargs="+", help=f"default: {RANKS}")
    parser.add_argument("--seconds", type=float, help=f"in which further rounds are begun (default: {BUDGET_S:g})")
    options = parser.parse_args()
    counts = options.ranks or (QUICK_RANKS if options.quick else RANKS)
    settings = (QUICK_ROUNDS, QUICK_BUDGET_S) if options.quick else (ROUNDS, BUDGET_S)
    figures = measure(counts, settings[0], options.seconds or settings[1])
    calls = {kind: system_calls(kind) for kind in (OURS, EMPTY)}
    if all(calls.values()):
        figures["calls"] = {name: {kind: (calls[kind] or {})[name] for kind in calls} for name in CALLS}
    head = ["imported at the first step in addition to the empty script's", "modules"]
    text = """# From the start of the ranks to the first step

All ranks on one machine, its files in the page cache: on a cluster, a shared file system adds to each file that is
opened, for both sides."""
    tables = {
        "Phases of rank 0, in seconds (medians)": phases_table(figures["ranks"]),
        "Modules": report.table(head, in_addition(figures)),
    }
    everything = {"rows": [row.as_json() for row in rows_of(figures)], **figures}
    report.write(options.out, "startup", text, everything, tables=tables)


if __name__ == "__main__":
    main()
