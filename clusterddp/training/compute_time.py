"""A rank's compute time in a step, without waiting for other ranks, by which stragglers are found.

The steps of all ranks take equally long, because each waits for the slowest in DDP's all_reduce. DDP's own timers
measure that wait, from the end of the backward until the gradients are reduced, in a sample of the steps. The rest of a
step is the rank's compute time: data, forward, backward, optimizer. It includes waits in other collectives: a straggler
may go unnoticed because of them, but no other rank is taken for one.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

#: DDP times one of so many steps, and the first ten; on a GPU a timed step waits for the previous one.
SAMPLE_STEPS = 20
#: The compute time is the median of so many samples.
SAMPLES = 5


class ComputeTime:
    """``parts``: those of the run, of which DDP modules are timed. For the main thread."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._modules = [part for part in parts if isinstance(part, DistributedDataParallel)]
        for module in self._modules:
            module._set_ddp_runtime_logging_sample_rate(SAMPLE_STEPS)  # type: ignore[no-untyped-call]
        self._own: deque[float] = deque(maxlen=SAMPLES)
        self._steps = 0
        self._begun: float | None = None
        self._timed: list[int] = []

    def step_done(self) -> tuple[float, float] | None:
        """Called after each step: now and then, the seconds of compute time in a step, and of the whole step."""
        self._steps += 1
        if self._steps % SAMPLE_STEPS or not self._modules:
            return None
        now, before = time.monotonic(), self._begun
        self._begun = now
        if before is None:
            return None
        timers = [module._get_ddp_logging_data() for module in self._modules]  # type: ignore[no-untyped-call]
        timed = [data.get("backward_comm_time_start", 0) for data in timers]
        if timed == self._timed:  # no gradients were reduced in the timed step
            return None
        self._timed = timed
        waited_ns = sum(data["backward_comm_time"] - data["backward_compute_comm_overlap_time"] for data in timers)
        step_s = (now - before) / SAMPLE_STEPS
        self._own.append(max(0.0, step_s - waited_ns / 1e9))
        return (statistics.median(self._own), step_s) if len(self._own) == SAMPLES else None
