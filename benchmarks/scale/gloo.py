"""32 real gloo ranks on this machine, preempted once. They need 8 GB."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.sides import SCRIPTS, local_run
from clusterddp.rundir.run_directory import RunDirectory

NODES, RANKS_PER_NODE, STOP_AFTER = 4, 8, 40


def measure(nodes: int = NODES, ranks_per_node: int = RANKS_PER_NODE) -> dict[str, Any]:
    """Start, stop agreement, resume and end of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / "run")
        options = ["--nodes", nodes, "--preempt-after", STOP_AFTER]
        command = local_run(SCRIPTS / "small_ddp.py", Path(folder), ranks_per_node, options=options)
        began = time.time()
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        return {"ranks": nodes * ranks_per_node, "wall_s": round(time.time() - began, 1), **figures(run)}


def figures(run: RunDirectory) -> dict[str, Any]:
    """From the run's history, its metrics and the ranks' logs."""
    events, metrics = run.events(), run.metrics()

    def at(name: str, attempt: int) -> float:
        return next(float(event["time"]) for event in events if (event["event"], event["attempt"]) == (name, attempt))

    printed: dict[str, list[int]] = {}
    for file in sorted(run.attempt_logs(1).glob("rank-*.out"), key=lambda path: int(path.stem.partition("-")[2])):
        for word, number in re.findall(r"^(\w+) (\d+)$", file.read_text(), re.MULTILINE):
            printed.setdefault(word, []).append(int(number))
    told = [event["time"] for event in events if event["event"] in ("signal", "notified")]
    first = {number: min(line["time"] for line in metrics if line["attempt"] == number) for number in (0, 1)}
    seconds = {
        "start_s": first[0] - at("started", 0),
        "told_to_stopping_s": at("stopping", 0) - min(told),
        "told_to_next_start_s": at("started", 1) - min(told),
        "resume_s": first[1] - at("started", 1),
    }
    steps = [line["step"] for line in metrics]
    assert steps == list(range(120)), steps
    confirmed = len({event["rank"] for event in events if event["event"] in ("signal", "notified")})
    return {
        **{name: round(value, 2) for name, value in seconds.items()},
        "confirmed": confirmed,
        "repeated": max(e.get("redone", 0) for e in events if e["event"] == "resumed"),
        "sockets_rank_0": printed["sockets"][0],
        "sockets_others": max(printed["sockets"][1:]),
        "peak_mb": max(printed["peak_mb"]),
        "history_lines": len(events),
    }
