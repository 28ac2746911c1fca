"""Says once when steps wait for their batches. By the step timing of rank 0; of all ranks, ``timing.jsonl`` tells."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence

from clusterddp.training.timing import SAMPLES

#: Waiting is said once it was more than MOST of the last SAMPLES samples, and LEAST_S in all: a short run is not told.
MOST, LEAST_S = 0.10, 10.0


class InputWait:
    """Looks at the totals of the step timing now and then.

    Args:
        report: adds an event to the history.
        step: the step of the run.
        workers: the number of workers that read for this rank.
    """

    def __init__(self, report: Callable[..., None], step: Callable[[], int], workers: int) -> None:
        self._report, self._step, self._workers = report, step, workers
        #: The seconds of data and of all phases, at the last samples.
        self._totals: deque[tuple[float, float]] = deque(maxlen=SAMPLES + 1)
        self._said = False

    def look(self, sums: Sequence[float]) -> None:
        """``sums``: the seconds in each phase so far, of which the first is the wait for batches."""
        self._totals.append((sums[0], sum(sums)))
        if self._said or len(self._totals) <= SAMPLES or sums[0] < LEAST_S:
            return
        (data_before, all_before), (data, everything) = self._totals[0], self._totals[-1]
        share = (data - data_before) / max(everything - all_before, 1e-9)
        if share > MOST:
            self._said = True
            self._report("waits_for_data", step=self._step(), percent=round(100 * share), advice=self._advice())

    def _advice(self) -> str:
        cpus = len(os.sched_getaffinity(0))
        if not self._workers:
            return f"the training process reads the samples itself: pass num_workers={min(4, cpus)} to the loader"
        if self._workers < cpus:
            return f"pass more than num_workers={self._workers} to the loader; this process may use {cpus} CPUs"
        most = f"{self._workers} workers share {cpus} CPUs"
        return f"{most}: ask for more (cpus_per_task), or make the samples cheaper to read"
