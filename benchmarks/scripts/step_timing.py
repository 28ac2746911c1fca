"""The ranks of benchmarks/steps/step_timing.py: blocks of steps with and without timing and logging, in one run's loop.

Each rank writes its figures to FOLDER/rank-R.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import clusterddp
from benchmarks.steps.agreement import STEP_S, Trainer
from clusterddp.training.loop import Run
from clusterddp.training.step_timing import StepTimes

TIMED = ("ask", "begin", "end", "_on_gradient", "_before_reduction", "_after_reduction")


class NoTimes(StepTimes):
    """The times of blocks without timing."""

    def __init__(self, clock: Any) -> None:
        super().__init__((), clock)

    def ask(self) -> None: ...

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Blocks:
    """The steps of a run. Timing and logging are switched on and off by the loop's own parts, which have no switch."""

    def __init__(self, run: Run, trainer: Trainer, times: StepTimes, steps: int) -> None:
        self._run, self._trainer, self._times = run, trainer, times
        self._count = steps
        self._steps = run.steps(1_000_000)
        self._save_log = run._saver.log
        self._logs = False
        #: The CPU seconds in calls of a measured block, and their number.
        self._spent: dict[str, float] = defaultdict(float)
        self._calls: Counter[str] = Counter()
        self._empty: Callable[[], None] | None = None
        self._reduce: str | None = "mean"
        times.close()

    def off(self) -> float:
        """CPU microseconds per step of a block without both."""
        return 1e6 * self._block() / self._count

    def measured(self, reduce: str | None) -> dict[str, float]:
        """CPU microseconds per step in timing and in logging: those of each call in a block with both.

        Without those of reading the clock, ``clock``, which an empty call measures under the same conditions.
        """
        self._reduce = reduce
        self._spent.clear()
        self._calls.clear()
        self._empty = self._added_up("empty", lambda: None)
        for name in TIMED:
            setattr(self._times, name, self._added_up("timing", getattr(self._times, name)))
        self._switch(self._times, self._added_up("logging", self._run.log), self._added_up("logging", self._save_log))
        try:
            self._block()
        finally:
            self._empty, self._reduce = None, "mean"
            for name in TIMED:
                delattr(self._times, name)
        clock_s = self._spent["empty"] / self._calls["empty"]
        spent_s = {name: self._spent[name] - clock_s * self._calls[name] for name in ("timing", "logging")}
        spent_s["clock"] = clock_s * sum(self._calls[name] for name in spent_s)
        return {name: 1e6 * seconds / (self._count + 1) for name, seconds in spent_s.items()}

    def end(self) -> None:
        """Of the run."""
        self._run._times, self._run._saver.log = self._times, self._save_log
        self._run.finish()
        for _ in self._steps:
            pass

    def _switch(self, times: StepTimes, log: Any = None, save_log: Any = None) -> None:
        run = self._run
        run._times, run._saver.log, self._logs = times, save_log or self._save_log, True
        self._log = log or run.log
        times._watch(self._trainer.model)

    def _block(self) -> float:
        try:
            self._step()  # ends the step before, of another kind
            dist.barrier()
            cpu = time.thread_time()
            for _ in range(self._count):
                self._step()
            return time.thread_time() - cpu
        finally:
            self._times.close()
            self._run._times, self._logs = NoTimes(self._times._clock), False
            self._run._saver.log = lambda *_, **__: None

    def _step(self) -> None:
        next(self._steps)
        loss = self._trainer.step()
        if self._logs:
            self._log(loss=loss, accuracy=0.5, reduce=self._reduce)
            self._log(lr=0.01, grad_norm=loss)
        if self._empty is not None:
            self._empty()

    def _added_up(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def added_up(*values: Any, **options: Any) -> Any:
            begun = time.thread_time()
            try:
                return call(*values, **options)
            finally:
                self._spent[name] += time.thread_time() - begun
                self._calls[name] += 1

        return added_up


def main() -> None:
    """All pairs of blocks. The arguments: a folder, the pairs, and the steps of a block."""
    folder, pairs, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    with clusterddp.init() as ctx:
        trainer = Trainer()
        loader = ctx.loader(torch.utils.data.TensorDataset(torch.zeros(1024, 1)), batch_size=1)
        run = ctx.run(model=trainer.model, optimizer=trainer.optimizer, loader=loader)
        trainer.calibrate(STEP_S)
        blocks = Blocks(run, trainer, run._times, steps)
        figures: list[dict[str, Any]] = []
        for _ in range(pairs):
            figures.append({"off": blocks.off(), "reduced": blocks.measured("mean"), "plain": blocks.measured(None)})
        blocks.end()
        (folder / f"rank-{ctx.rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
