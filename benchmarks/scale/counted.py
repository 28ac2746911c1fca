"""What real gloo ranks send to rank 0's store and to the supervisor, counted by the kernel:
``python -m benchmarks.scale.counted 4 8``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.scale.exponents import fitted
from clusterddp.rundir.run_directory import RunDirectory

SCRIPT = Path(__file__).parents[1] / "scripts" / "counted_ddp.py"
SIZES, PER_NODE, WAIT_S = (4, 8, 16, 32), 4, 400
#: The script's moments in their order; what is counted at one of them has happened since the one before.
MARKS = (
    "the store",
    "gloo",
    "the process group",
    "preflight",
    "ctx.run",
    "first steps",
    "50 steps",
    "50 steps with a save",
    "40 steps with run.log",
    "10 steps",
    "the last save",
)
#: Events that are counted elsewhere: heartbeats, and what goes to the store.
NOT_REPORTS = ("alive", "look", "chunk")


def measure(sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    """One run for each number of ranks, four per node."""
    return [one(ranks) for ranks in sizes]


def one(ranks: int) -> dict[str, Any]:
    """What was counted between the moments, at rank 0's store and at the supervisor; and the run's files."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / "run")
        shape = f"--local --device cpu --nodes {ranks // PER_NODE} --gpus {PER_NODE} --set preflight=true".split()
        command = [sys.executable, "-m", "clusterddp", "submit", str(SCRIPT), "--run-dir", str(run), *shape]
        command += ["--set", "checkpoint.every=185 steps"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr[-3000:]
        return {"ranks": ranks, "nodes": ranks // PER_NODE, "phases": phases(run, ranks), "files": files(run)}


def phases(run: RunDirectory, ranks: int) -> dict[str, dict[str, Any]]:
    """Of each phase: its seconds, messages, and the supervisor's messages by event."""
    lines = [marks(run.attempt_logs(0) / f"rank-{rank}.out") for rank in range(ranks)]
    found: dict[str, dict[str, Any]] = {}
    before: Counter[str] = Counter()
    began = None
    for name in MARKS:
        now: Counter[str] = Counter()
        for rank in lines:
            now.update(rank[name]["found"])
            now.update({f"event {event}": count for event, count in rank[name]["events"].items()})
        at = lines[0][name]["time"]
        counts = {what: count - before[what] for what, count in now.items() if count != before[what]}
        found[name] = {"seconds": round(at - (began or at), 2), **counts}
        before, began = now, at
    return found


def marks(log: Path) -> dict[str, Any]:
    """A rank's lines by moment."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"mark"')]
    return {line["mark"]: line for line in lines}


def files(run: RunDirectory) -> dict[str, int]:
    """How many files of each kind the run has, and how many lines."""
    count = lambda folder: sum(path.is_file() for path in folder.iterdir())  # noqa: E731
    timing = run.path / "timing.jsonl"
    return {
        "logs": count(run.attempt_logs(0)),
        "records": len(list(run.attempt_private(0).glob("rank-*"))),
        "checkpoints": count(run.path / "checkpoints"),
        "history lines": run.events_file.read_bytes().count(b"\n"),
        "timing lines": timing.read_bytes().count(b"\n") if timing.exists() else 0,
        "metrics lines": run.metrics_file.read_bytes().count(b"\n"),
    }


def table(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per mechanism: its counts by number of ranks, and the exponent."""
    table: dict[str, dict[str, float]] = {}
    for run in found:
        for name, count in counts(run).items():
            table.setdefault(name, {})[str(run["ranks"])] = count
    return [
        {"mechanism": name, "counts": by, "exponent": round(fitted({int(n): count for n, count in by.items()}), 3)}
        for name, by in table.items()
    ]


def counts(run: Mapping[str, Any]) -> dict[str, float]:
    """Messages, connections and files of one run by mechanism."""
    of = {name: Counter(phase) for name, phase in run["phases"].items()}
    # Periodic messages have their own rows: checks and chunks of run.log, heartbeats.
    store = {name: phase["store out"] - phase["event look"] - phase["event chunk"] for name, phase in of.items()}
    total: Counter[str] = Counter()
    for phase in of.values():
        total.update(phase)
    timed = total - of[MARKS[0]]  # its seconds are not known
    reports = sum(count for what, count in total.items() if what.startswith("event "))
    begun = ("ctx.run", "first steps")
    return {
        "rendezvous: messages to the store, besides gloo's": store["the store"] + store["the process group"],
        "connections at the store": total["store connections"],
        "preflight: messages to the store": store["preflight"],
        "ctx.run and 110 steps: messages to the store": sum(store[name] for name in begun),
        "50 steps: messages to the store": store["50 steps"],
        "50 steps with a checkpoint: messages to the store": store["50 steps with a save"],
        "the same: messages to the supervisor": of["50 steps with a save"]["event checkpoint"],
        "run.log(reduce=...): messages to the store per second": per_s(of["40 steps with run.log"], "store out"),
        "the end and its checkpoint: messages to the store, besides run.log's": store["the last save"],
        "heartbeats, which have the steps' times, per second": per_s(timed, "event alive"),
        "all other messages to the supervisor": reports - sum(total[f"event {name}"] for name in NOT_REPORTS),
        "log files": run["files"]["logs"],
        "records of ends": run["files"]["records"],
        "files of 2 checkpoints": run["files"]["checkpoints"],
        "history lines": run["files"]["history lines"],
        "gloo itself: messages to the store": store["gloo"],
    }


def per_s(phase: Mapping[str, float], what: str) -> float:
    return round(phase[what] / phase["seconds"], 1)


if __name__ == "__main__":
    print(json.dumps(measure(tuple(map(int, sys.argv[1:])) or SIZES), indent=1))
