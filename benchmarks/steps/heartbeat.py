"""What the watchdog costs per step: ``python -m benchmarks.steps.heartbeat`` (``make bench-heartbeat``), 7 minutes.

As in ``agreement.py``: two gloo ranks on this machine in steps of about 10 ms, blocks of 100 steps in pairs,
and pairs without anything (A/A). With it, a rank has its heartbeat thread, which talks to a supervisor's link in a
third process, and measures its compute time in each step. Heartbeats are four times as frequent as by default.

The bar: the interval's upper end is below 1.02.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import sides
from benchmarks.steps.agreement import RANKS, Trainer, command_line, pair, run_ranks
from clusterddp.failures.hangs import Hang, Watch
from clusterddp.jobdef.job import Watchdog
from clusterddp.supervisor.control_server import ControlServer, Handlers
from clusterddp.training.heartbeat import Heartbeat, WatchedSteps
from clusterddp.training.step_timing import step_times
from clusterddp.worker.control_channel import ControlChannel

WATCHDOG = Watchdog(step_s=2.0)
ADDRESS, TOKEN = "BENCHMARK_LINK", "BENCHMARK_TOKEN"


class Watched:
    """A rank's part of the watchdog, new for every block: in the blocks without it, there is no thread either."""

    def __init__(self, trainer: Trainer, link: ControlChannel) -> None:
        self._trainer, self._link = trainer, link
        self._steps = 0

    def time(self, steps: int) -> float:
        """``trainer.block`` with it. Collective."""
        heartbeat = Heartbeat(
            WATCHDOG,
            WatchedSteps(boundaries=lambda: self._steps, step=lambda: self._steps),
            send=self._link.send,
            flight_record=Path(os.devnull),
        )
        times = step_times([self._trainer.model], torch.device("cpu"), RANKS)
        heartbeat.timing = times.told

        def boundary() -> bool:
            self._steps += 1
            times.end()
            times.ask()
            times.begin()
            return False

        heartbeat.begin()
        try:
            return self._trainer.block(steps, boundary)
        finally:
            heartbeat.rest()
            heartbeat.close()
            times.close()


def measure(pairs: int, steps: int, step_s: float, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """The measurement of one rank; rank 0's figures are the ones to show."""
    torch.set_num_threads(1)
    link = ControlChannel.join(os.environ[ADDRESS], os.environ[TOKEN], rank, 1 if rank == 0 else None, timeout=60)
    assert link is not None
    sides.join(rank, ranks, port)
    trainer = Trainer()
    trainer.calibrate(step_s)
    watched, without = Watched(trainer, link), partial(trainer.block, steps, None)
    results = [pair(partial(watched.time, steps), without, number) for number in range(pairs)]
    dist.barrier()
    dist.destroy_process_group()
    return {"pairs": results, "steps": steps}


def supervised(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the ranks with a supervisor's control channel and watchdog in this process; counts the heartbeats."""
    beats = hangs = 0
    watch = Watch(WATCHDOG.beat_s)

    def hear(rank: int, event: str, values: Any) -> None:
        nonlocal beats, hangs
        if event == "alive":
            beats += 1
            watch.update(rank, "localhost", values)
            hangs += any(isinstance(found, Hang) for found in watch.look())

    token = secrets.token_hex(16)
    server = ControlServer(token, Handlers(hear), host="127.0.0.1")
    figures = run_ranks("benchmarks.steps.heartbeat", request, **{ADDRESS: f"127.0.0.1:{server.port}", TOKEN: token})
    server.close()
    return {**figures, "beats": beats, "hangs": hangs}


if __name__ == "__main__":
    command_line(__doc__, "heartbeat", "watchdog", measure, supervised)
