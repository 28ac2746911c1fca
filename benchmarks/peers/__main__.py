"""The same training under the same schedules of faults, by clusterddp and by what people use today.

``python -m benchmarks.peers``. On the test cluster, two nodes with two ranks each per cell;
several cells at a time, each on nodes of its own (--lanes). The scripts are in benchmarks/peers/scripts/, the schedules
in schedules.py. STATE/cells.jsonl has a line per measured cell: an interrupted benchmark continues after it, and one
that is complete writes its report again. --minutes bounds a call: no cell is begun that may end later. A repetition
takes about an hour.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.peers import page
from benchmarks.peers.lane import NODES, Cell, Lane
from benchmarks.peers.peers import BY_NAME, LIMIT, PEERS
from benchmarks.peers.schedules import CELL_S, EPOCHS, OF_THE_LIMIT, QUICK_EPOCHS, SCHEDULES
from benchmarks.runs import cluster
from clusterddp.rundir.files import append_line
from clusterddp.rundir.json_lines import read_lines
from tests.cluster import ClusterConfig

#: Slurm's default is 300 s; a cell is to see what happens after it.
SLURMD_TIMEOUT_S = 40

Key = tuple[str, str, int]


class Results:
    """The cells that are measured, in a file that survives an interruption."""

    def __init__(self, state: Path, epochs: int) -> None:
        self._state, self._file, self._lock = state, state / "cells.jsonl", threading.Lock()
        self.epochs = epochs
        (state / "finals").mkdir(parents=True, exist_ok=True)
        self.cells: list[dict[str, Any]] = list(read_lines(self._file))

    def missing(self, keys: list[Key]) -> list[Key]:
        """Those of the keys that are not measured."""
        have = {(cell["peer"], cell["schedule"], cell["repetition"]) for cell in self.cells}
        return [key for key in keys if key not in have]

    def add(self, cell: dict[str, Any], final: Path) -> None:
        """With a digest of its final parameters, which are kept once for each digest."""
        cell["final"] = None
        if final.exists():
            content = final.read_bytes()
            cell["final"] = hashlib.sha256(content).hexdigest()[:16]
            (self._state / "finals" / f"{cell['final']}.bin").write_bytes(content)
        with self._lock:
            append_line(self._file, cell)
            self.cells.append(cell)


def plan(repetitions: int, peers: list[str], schedules: list[str]) -> Iterator[Key]:
    """All cells: alternating over the peers under each schedule, one repetition after the other."""
    for repetition in range(repetitions):
        for schedule in schedules:
            for peer in peers:
                if peer != LIMIT.name or schedule in OF_THE_LIMIT:
                    yield peer, schedule, repetition


class Queue:
    """Hands out cells to the lanes until the time is over."""

    def __init__(self, keys: list[Key], minutes: float) -> None:
        self._keys, self._lock = keys, threading.Lock()
        self._deadline = time.monotonic() + 60 * minutes

    def take(self) -> Key | None:
        with self._lock:
            late = time.monotonic() + CELL_S > self._deadline
            return None if late or not self._keys else self._keys.pop(0)


def work(lane: Lane, queue: Queue, results: Results, state: Path) -> None:
    """One lane's thread."""
    while key := queue.take():
        peer, schedule, repetition = key
        name = f"{peer}-{schedule}-{repetition}"
        try:
            cell = Cell(lane, BY_NAME[peer], SCHEDULES[schedule], name, results.epochs)
            figures = cell.run()
            results.add({**figures, "repetition": repetition, "load": Path("/proc/loadavg").read_text().split()[0]},
                        cell.folder / "final.bin")  # fmt: skip
            common.say(f"{lane.partition} {name}: {figures['end']} ({figures['slurm']}), {figures['wall_s']} s")
            lane.clear()
            cell.keep(state / "cells" / name)
        except Exception:  # the other lanes continue
            traceback.print_exc()
            lane.clear()
            shutil.rmtree(lane.up.scratch / name, ignore_errors=True)


def measure(keys: list[Key], lanes: int, minutes: float, results: Results, state: Path) -> None:
    """All cells that there is time for; STATE/cluster gets the words about the cluster."""
    config = ClusterConfig(nodes=NODES * lanes, cpus=4, gpus=0, slurmd_timeout=SLURMD_TIMEOUT_S)
    with cluster(config) as up:
        (state / "cluster").write_text(f"Slurm {up.version}, proctrack/{up.proctrack}")
        queue = Queue(keys, minutes)
        threads = [
            threading.Thread(target=work, args=(Lane(up, number), queue, results, state), daemon=True)
            for number in range(lanes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one undisturbed cell of each peer")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", default=",".join([*PEERS, LIMIT.name]), help="some of them")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="some of them")
    parser.add_argument("--lanes", type=int, default=4, help="cells at a time")
    parser.add_argument("--minutes", type=float, default=240)
    parser.add_argument("--state", type=Path, default=Path("build/peers"), help="where measured cells are kept")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    peers = common.named("peer", options.peers, [*PEERS, LIMIT.name])
    schedules = ["none"] if options.quick else common.named("schedule", options.schedules, SCHEDULES)
    keys = list(plan(1 if options.quick else options.repetitions, peers, schedules))
    state = options.state / "quick" if options.quick else options.state
    results = Results(state, QUICK_EPOCHS if options.quick else EPOCHS)
    missing = results.missing(keys)
    if missing:
        measure(missing, options.lanes, options.minutes, results, state)
    words = (state / "cluster").read_text() if (state / "cluster").exists() else ""
    page.write(options.out, results.cells, state, words)


if __name__ == "__main__":
    main()
