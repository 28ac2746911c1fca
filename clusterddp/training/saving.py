"""When and how a run's state is saved: rank 0 writes, all ranks know what is committed when it matters to them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from clusterddp.errors import CheckpointError, ClusterddpError, Superseded
from clusterddp.rundir import RunDirectory
from clusterddp.training.checkpoint import Checkpoint, Checkpoints, NotSaved
from clusterddp.training.metrics import Metrics
from clusterddp.training.process_group import ProcessGroup
from clusterddp.training.state import broadcast

Content = Callable[[], Mapping[str, Any]]


class Saver:
    """A rank's view of the run's checkpoints and metrics. On ranks other than 0, and without a run directory, only what
    is collective does anything."""

    def __init__(
        self,
        directory: RunDirectory | None,
        attempt: int,
        group: ProcessGroup,
        report: Callable[..., None],
        *,
        every_steps: int | None,
        every_s: float | None,
        keep: int,
    ) -> None:
        self._group, self._report = group, report
        self._every_steps, self._every_s = every_steps, every_s
        self._checkpoints: Checkpoints | None = None
        self._metrics: Metrics | None = None
        if directory is not None and group.rank == 0:
            self._checkpoints = Checkpoints(directory, attempt, keep=keep, on_damaged=self._say_damaged)
            self._metrics = Metrics(directory.metrics_file, attempt)
        #: Whether there is a place to save in.
        self.saves = directory is not None
        self._committed: int | None = None
        self._saved_at = time.monotonic()
        self._commits = 0

    def restore(self) -> tuple[dict[str, Any], int, int] | None:
        """The newest whole checkpoint, with its attempt and step, on all ranks; None for a fresh start. Collective.

        Rank 0 alone reads the disk. Raises CheckpointError, on all ranks, when there are checkpoints but none is whole.
        """
        if not self.saves:
            return None
        found, error = self._read()
        content = broadcast(found, error, self._group.rank, self._group.collective_device)
        if content is None:
            return None
        self._committed = content["step"]
        return content["content"], content["attempt"], content["step"]

    def record_resume(self, parent: tuple[int, int] | None) -> None:
        """Rank 0 records what this attempt goes on from (attempt, step), before the first step."""
        if self._checkpoints is not None:
            self._checkpoints.record_resume(parent)
        self._saved_at = time.monotonic()

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Rank 0 appends the metrics line of a finished step."""
        if self._metrics is not None:
            self._metrics.write(step, values)

    def save_if_due(self, step: int, content: Content) -> None:
        """Rank 0 saves if the job says that it is time to; the other ranks go on and need not know.

        A disk that does not take it stops nothing: the older checkpoint stays, and that is said.
        """
        if self._checkpoints is None or not self._due(step):
            return
        try:
            self._save(step, content)
        except NotSaved as error:
            self._say_failed(step, error)

    def commit(self, step: int, content: Content) -> tuple[int | None, str | None]:
        """Saves now, unless step is saved already. Collective: all ranks return when it is durable, or has failed.

        Returns the step of the newest checkpoint (None: there is none) and why it is not ``step``, if it is not.
        Raises CheckpointError or Superseded on all ranks.
        """
        if not self.saves:
            return None, "there is no run directory"
        key = f"commit/{self._commits}"
        self._commits += 1
        if self._group.rank != 0:
            self._group.store.wait([key], timedelta(days=30))
            return _unpack(json.loads(self._group.store.get(key)))
        verdict = self._try_commit(step, content)
        self._group.store.set(key, json.dumps(verdict))
        return _unpack(verdict)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def _read(self) -> tuple[dict[str, Any] | None, CheckpointError | None]:
        if self._checkpoints is None:
            return None, None
        try:
            found = self._checkpoints.restore()
        except CheckpointError as error:
            return None, error
        if found is None:
            return None, None
        content, checkpoint = found
        return {"content": content, "attempt": checkpoint.attempt, "step": checkpoint.step}, None

    def _due(self, step: int) -> bool:
        if step == self._committed:
            return False
        by_step = self._every_steps is not None and step % self._every_steps == 0
        by_time = self._every_s is not None and time.monotonic() - self._saved_at >= self._every_s
        return by_step or by_time

    def _try_commit(self, step: int, content: Content) -> dict[str, Any]:
        problem = None
        try:
            if step != self._committed:
                self._save(step, content)
        except NotSaved as error:
            self._say_failed(step, error)
            problem = str(error)
        except ClusterddpError as error:
            return {"error": type(error).__name__, "message": str(error)}
        return {"step": self._committed, "problem": problem}

    def _save(self, step: int, content: Content) -> None:
        assert self._checkpoints is not None and self._metrics is not None
        self._saved_at = started = time.monotonic()
        try:
            self._metrics.sync()
        except OSError as error:
            raise NotSaved(f"the metrics before step {step} cannot be made durable ({error.strerror})") from error
        saved = self._checkpoints.save(step, content())
        self._committed = step
        seconds = round(time.monotonic() - started, 4)
        self._report("checkpoint", step=step, blocked_s=seconds, durable_s=seconds, bytes=saved.bytes)

    def _say_failed(self, step: int, error: NotSaved) -> None:
        print(f"clusterddp: step {step} is not saved: {error}", file=sys.stderr, flush=True)
        self._report("checkpoint_failed", step=step, reason=str(error))

    def _say_damaged(self, checkpoint: Checkpoint, reason: str) -> None:
        print(f"clusterddp: {reason}; trying the one before", file=sys.stderr, flush=True)
        self._report("checkpoint_damaged", step=checkpoint.step, parent=checkpoint.attempt, reason=reason)


def _unpack(verdict: dict[str, Any]) -> tuple[int | None, str | None]:
    if "error" in verdict:
        raise {"Superseded": Superseded}.get(verdict["error"], CheckpointError)(verdict["message"])
    return verdict["step"], verdict["problem"]
