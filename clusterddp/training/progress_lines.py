"""Rank 0's progress as a line in its log every few seconds.

A thread reads the end of metrics.jsonl, so that a step does no work for it.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.reporter import say
from clusterddp.rundir.progress import recent
from clusterddp.worker import control_channel, rank_exit

if TYPE_CHECKING:
    from clusterddp.training.settings import Settings


class ProgressLines:
    """Prints from its creation until ``close()``, after each ``every_s`` seconds in which a step was completed.

    Args:
        metrics: the run's metrics.jsonl.
        attempt: the number of this attempt.
        every_s: seconds between lines.
    """

    def __init__(self, metrics: Path, attempt: int, every_s: float) -> None:
        self._metrics, self._attempt, self._every_s = metrics, attempt, every_s
        self._shown = -1
        self._end = threading.Event()
        threading.Thread(target=self._print, name="progress", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()

    def _print(self) -> None:
        while not self._end.wait(self._every_s):
            if (line := self.line()) and not _own_display():
                say(line)

    def line(self) -> str | None:
        """The line, if the loop runs and has completed a step since the last line."""
        loop = rank_exit.loop
        if loop is None or loop.left_at is not None:
            return None
        found = recent(self._metrics)
        if found is None or found.attempt != self._attempt or found.done == self._shown:
            return None
        self._shown = found.done
        return found.line(loop.steps)


def _own_display() -> bool:
    """Whether stderr is a terminal, as with --debug, or the script draws a bar of tqdm there."""
    bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())
    return len(bars) > 0 or (sys.stderr is not None and sys.stderr.isatty())


def begin(read: Settings, attempt: int) -> ProgressLines | None:
    """Only in a run's job. Elsewhere, the script's launcher and its user decide what is printed."""
    directory, every_s = read.run_dir, read.job.progress_interval
    if read.ranks.rank != 0 or not control_channel.supervised() or directory is None or every_s is None:
        return None
    return ProgressLines(directory.metrics_file, attempt, every_s)
