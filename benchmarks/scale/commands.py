"""What commands and ranks read: the host list of 16,384 nodes, and the files of 10,000 runs."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.sides import in_turns, of_python
from clusterddp import environment
from clusterddp.hostlist import expand
from tests.runs_on_disk import event, recorded_run, started, steps

NODES, REPEATS = 16384, 15
LISTS: dict[str, Callable[[int], str]] = {
    "a range": lambda nodes: f"n[00001-{nodes:05}]",
    "two brackets": lambda nodes: f"rack[001-{nodes // 64:03}]node[01-64]",
    "every second number": lambda nodes: f"n[{','.join(str(number) for number in range(0, 2 * nodes, 2))}]",
    "odd names": lambda nodes: ",".join(f"node-{at * 7919 % 100_003}.rack{at % 97}" for at in range(nodes)),
    "8,192 brackets": lambda nodes: ",".join(f"n[{number},{number + 1}]x" for number in range(0, 2 * nodes, 4)),
}


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU milliseconds of this thread."""
    began = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - began)


def step_environment(nodes: str) -> dict[str, str]:
    """Slurm's variables of a task of 16,384 nodes."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": str(8 * NODES),
        "SLURM_STEP_NUM_NODES": str(NODES),
        "SLURM_STEP_TASKS_PER_NODE": f"8(x{NODES})",
        "SLURM_STEP_NODELIST": nodes,
    }


def host_lists() -> list[dict[str, Any]]:
    """Each form: reading a rank's whole environment, beside making as many names."""
    found = []
    for name, form in LISTS.items():
        text = form(NODES)
        assert len(set(expand(text))) == NODES
        works: dict[str, Callable[[], object]] = {
            "read_ms": partial(environment.read, step_environment(text)),
            "least_ms": lambda: [f"n{number:05}" for number in range(NODES)],
        }
        found.append({"form": name, **in_turns({side: partial(cpu_ms, do) for side, do in works.items()}, REPEATS)})
    return found


def listing(sizes: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """CPU seconds of ``list`` for folders of so many runs, beside reading the same files."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        for runs in sizes:
            folder = Path(name) / str(runs)
            make(folder, runs)
            commands = {"ours_s": ("-m", "clusterddp", "list", folder), "least_s": ("-c", READ, folder)}
            costs = in_turns({side: partial(of_python, *words) for side, words in commands.items()}, repeats, warm_up=0)
            found.append({"runs": runs, **{side: [cost.cpu_s for cost in one] for side, one in costs.items()}})
    return found


READ = """
import sys
from pathlib import Path
for run in sorted(Path(sys.argv[1]).iterdir()):
    for name in ("job.yaml", "events.jsonl", "metrics.jsonl", "outcome.json"):
        with open(run / name, "rb") as file:
            file.read()
    (run / "logs").stat()
"""


def make(folder: Path, runs: int) -> None:
    """Completed runs of 200 steps, copies of one."""
    history = [
        started(),
        event("training", step=0),
        event("checkpoint", step=200, blocked_s=0.1, durable_s=0.2, bytes=9),
    ]
    history.append(event("completed", step=200, attempts=1, reason="all ranks finished"))
    metrics = steps(range(0, 200, 10), loss=0.5)
    first = recorded_run(folder / "run-00000", history, metrics=metrics, outcome={"state": "completed", "step": 200})
    for number in range(1, runs):
        shutil.copytree(first.path, folder / f"run-{number:05}", copy_function=shutil.copyfile)
