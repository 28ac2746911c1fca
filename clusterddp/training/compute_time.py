"""How long a rank's own part of a step takes, without the waiting for others, so that a slow rank can be told.

All ranks' steps take equally long, as each waits in DDP's all_reduce for the slowest. DDP's own timers say how long:
from the end of the backward pass until the gradients are reduced, in one of so many steps. What is left of a step is
the rank's own: data, forward, backward, optimizer. Waiting in other collectives counts as the rank's own: a slow rank
may go unnoticed then, and no other one is taken for slow.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

#: DDP times one step of so many, apart from the first ten; on a GPU that step waits for the one before.
SAMPLE_STEPS = 20
#: Samples that a figure is the median of.
SAMPLES = 5


class OwnTime:
    """``parts``: of the run; those that are DDP modules are timed. The main thread's."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._modules = [part for part in parts if isinstance(part, DistributedDataParallel)]
        for module in self._modules:
            module._set_ddp_runtime_logging_sample_rate(SAMPLE_STEPS)  # type: ignore[no-untyped-call]
        self._own: deque[float] = deque(maxlen=SAMPLES)
        self._steps = 0
        self._begun: float | None = None
        self._timed: list[int] = []

    def step_done(self) -> tuple[float, float] | None:
        """To be called after each step: now and then the seconds of a step that are the rank's own, and all of them."""
        self._steps += 1
        if self._steps % SAMPLE_STEPS or not self._modules:
            return None
        now, before = time.monotonic(), self._begun
        self._begun = now
        if before is None:
            return None
        timers = [module._get_ddp_logging_data() for module in self._modules]  # type: ignore[no-untyped-call]
        timed = [data.get("backward_comm_time_start", 0) for data in timers]
        if timed == self._timed:  # no gradients were reduced in the step that was to be timed
            return None
        self._timed = timed
        waited_ns = sum(data["backward_comm_time"] - data["backward_compute_comm_overlap_time"] for data in timers)
        step_s = (now - before) / SAMPLE_STEPS
        self._own.append(max(0.0, step_s - waited_ns / 1e9))
        return (statistics.median(self._own), step_s) if len(self._own) == SAMPLES else None
