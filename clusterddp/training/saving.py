"""When and how a run's state is saved: rank 0 saves, all ranks know what is committed when it matters to them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from clusterddp.checkpoint.client import CheckpointClient, NotSaved
from clusterddp.checkpoint.restore import restore
from clusterddp.checkpoint.store import Checkpoint, Checkpoints, best_of
from clusterddp.data.external_loader import same_everywhere
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointError, ClusterddpError, Superseded
from clusterddp.jobdef.job import Checkpointing
from clusterddp.reporter import say
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.training import interval
from clusterddp.training.metrics import Metrics
from clusterddp.worker.deadline import CAUTION

#: How often, in steps, rank 0 is asked whether it is time to save, where all ranks must take part.
TOGETHER_STEPS = 20
State = Callable[[], Mapping[str, Any]]


class Saver:
    """A rank's view of the run's checkpoints and metrics. On ranks other than 0, and without a run directory, only what
    is collective does anything."""

    def __init__(
        self,
        directory: RunDirectory | None,
        attempt: int,
        group: ProcessGroup,
        report: Callable[..., None],
        settings: Checkpointing,
    ) -> None:
        self._group, self._report, self._settings = group, report, settings
        self._checkpoints: Checkpoints | None = None
        if directory is not None and group.rank == 0:
            self._directory = directory
            self._checkpoints = Checkpoints(directory, attempt, settings.keep)
            self._metrics = Metrics(directory.metrics_file, attempt, report)
            self._checkpoint_client = CheckpointClient(directory, attempt, settings.keep, group.device)
        #: Whether there is a place to save in.
        self.saves = directory is not None
        self._committed: int | None = None
        self._saved_at = time.monotonic()
        self._every_s = interval.FIRST_S if settings.auto else settings.every_s
        self._said_s = 0.0
        #: The events so far, read once, for ``every: auto``: what this attempt adds costs it no step.
        self._history: list[dict[str, Any]] | None = None
        self._stall_s = self._durable_s = 0.0
        #: The metric that `keep` goes by: its best value so far (as its order), and that of the step just done.
        self._best = float("inf")
        self._value: float | None = None
        self._logged: set[str] = set()
        self._commits = 0
        #: One thread at a time takes the writer's answer: the main one, or the one that acts at the deadline.
        self._hearing = threading.Lock()

    def restore(self) -> tuple[dict[str, Any], int, int] | None:
        """The newest whole checkpoint, with its attempt and step, on all ranks; None for a fresh start. Collective.

        Rank 0 alone reads the disk. Raises CheckpointError, on all ranks, when there are checkpoints but none is whole.
        """
        if not self.saves:
            return None
        restored = restore(self._checkpoints, self._group.collective_device, self._say_damaged)
        if restored is None:
            return None
        state, (attempt, self._committed) = restored
        return state, attempt, self._committed

    def record_resume(self, parent: tuple[int, int] | None) -> None:
        """Rank 0 records what this attempt goes on from (attempt, step), before the first step."""
        if self._checkpoints is not None:
            self._checkpoints.record_resume(parent)
            if (best := best_of(self._checkpoints.candidates(), self._settings.keep)) is not None:
                self._best = self._settings.keep.order(best[1])
        self._saved_at = time.monotonic()

    def prepare(self, state: State) -> None:
        """Rank 0 gets ready for the first save, once the state is as large as it will be."""
        if self._checkpoints is not None:
            self._checkpoint_client.prepare(state())

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Rank 0 appends the metrics line of a finished step, and notes whether it is the best so far."""
        if self._checkpoints is None:
            return
        line = self._metrics.write(step, values)
        self._logged.update(values)
        value = line.get(self._settings.keep.best or "")
        self._value = value if isinstance(value, (int, float)) else None

    def save_if_due(self, step: int, state: State) -> None:
        """Rank 0 saves if the job says that it is time to; the other ranks go on and need not know.

        By time, that waits while the writer is busy with the save before; a step that was asked for does not come
        again, so that training waits. A disk that does not take it stops nothing: the older checkpoint stays, and that
        is said.
        """
        if self._checkpoints is None:
            return
        this_step = self._wants_this(step)
        self._hear(wait=this_step)
        if not self._checkpoint_client.busy and (this_step or self._is_time()):
            self._save(step, state, urgent=False)

    def due_together(self, step: int) -> bool:
        """``save_if_due``'s question where all ranks must take part: the same answer on all of them.

        By steps all know it; by time rank 0 is asked now and then. The best metric is rank 0's alone, and not a reason.
        """
        if not self.saves:
            return False
        if self._settings.every_steps is not None and step % self._settings.every_steps == 0:
            return True
        if step % TOGETHER_STEPS or (self._settings.every_s is None and not self._settings.auto):
            return False
        due = self._checkpoints is not None and self._is_time()
        return same_everywhere(due, self._group.collective_device)

    def save(self, step: int, state: State) -> None:
        """Rank 0 saves, after the save before."""
        if self._checkpoints is not None:
            self._hear(wait=True)
            self._save(step, state, urgent=False)

    def commit(self, step: int, state: State) -> tuple[int | None, str | None]:
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
        verdict = self._try_commit(step, state)
        self._group.store.set(key, json.dumps(verdict))
        return _unpack(verdict)

    @property
    def last_save_s(self) -> float:
        """How long the last save took until it was durable; 0 before the first."""
        return self._durable_s

    def finish_newest(self) -> int | None:
        """Rank 0, in another thread, when this one hangs: the step of the newest checkpoint.

        What is being saved is waited for as long as a save may take, unless this thread waits for it already.
        """
        waiting = threading.Thread(target=self._hear, args=(True,), name="last save", daemon=True)
        waiting.start()
        waiting.join(1.0 + CAUTION * self._durable_s)
        return self._committed

    def close(self) -> None:
        """Leaves the writer to finish what it is at."""
        if self._checkpoints is not None:
            self._say_unlogged()
            self._checkpoint_client.close()
            self._metrics.close()

    # --- saving

    def _wants_this(self, step: int) -> bool:
        """Whether the state after this very step is asked for: by its number, or as the best so far."""
        if self._value is not None and self._settings.keep.order(self._value) < self._best:
            return True
        return self._settings.every_steps is not None and step % self._settings.every_steps == 0

    def _is_time(self) -> bool:
        return self._every_s is not None and time.monotonic() - self._saved_at >= self._every_s

    def _save(self, step: int, state: State, urgent: bool) -> str | None:
        """Takes the snapshot and hands it to the writer, of which ``_hear`` tells; why it cannot, if so."""
        self._saved_at = started = time.monotonic()
        try:
            self._metrics.flush()
        except OSError as error:
            return self._say_failed(step, f"the metrics before it cannot be written ({error.strerror})")
        facts = {}
        if self._value is not None:
            self._best = min(self._best, self._settings.keep.order(self._value))
            facts["metrics"] = json.dumps({self._settings.keep.best: self._value})
        self._checkpoint_client.save(step, state(), facts, urgent)
        self._stall_s = time.monotonic() - started
        return None

    def _hear(self, wait: bool = False) -> str | None:
        """What the writer says of the save under way, if it is done with it; why it was not saved, if it was not."""
        with self._hearing:
            return self._hear_now(wait) if self._checkpoint_client.busy else None

    def _hear_now(self, wait: bool) -> str | None:
        heard_at = time.monotonic()
        if wait:
            self._checkpoint_client.hurry()
        try:
            saved = self._checkpoint_client.result(wait)
        except NotSaved as error:
            if error.metrics:
                self._metrics.doubt()
            return self._say_failed(error.step, str(error))
        if saved is None:
            return None
        self._committed = saved.step
        self._durable_s = durable_s = saved.at - self._saved_at
        self._report(
            "checkpoint",
            step=saved.step,
            blocked_s=round(self._stall_s + (time.monotonic() - heard_at if wait else 0.0), 4),
            durable_s=round(durable_s, 4),
            bytes=saved.bytes,
        )
        if self._settings.auto:
            self._choose_interval(saved.step, durable_s)
        return None

    def _try_commit(self, step: int, state: State) -> dict[str, Any]:
        problem = None
        try:
            self._hear(wait=True)
            if step != self._committed:
                problem = self._save(step, state, urgent=True) or self._hear(wait=True)
        except ClusterddpError as error:
            return {"error": type(error).__name__, "message": str(error)}
        return {"step": self._committed, "problem": problem}

    def _choose_interval(self, step: int, durable_s: float) -> None:
        if self._history is None:
            try:
                self._history = self._directory.events()
            except OSError as error:
                words = f"cannot read the history ({error}); still saving every {self._every_s:.0f} s"
                say(words)
                return
        between_s = interval.between_interruptions_s(self._history, time.time())
        self._every_s = interval.interval_s(self._stall_s, durable_s, between_s)
        if not 0.5 < self._every_s / (self._said_s or 1e-9) < 2:
            self._said_s = self._every_s
            values = {"seconds": round(self._every_s, 1), "stall_s": round(self._stall_s, 4), "between_s": between_s}
            self._report("interval", step=step, **values)

    def _say_unlogged(self) -> None:
        """A misspelt metric would go unnoticed: the best checkpoint would be missed only when it is wanted."""
        best = self._settings.keep.best
        if best is not None and self._logged and self._best == float("inf"):
            logged = ", ".join(sorted(self._logged))
            words = f"checkpoint.keep.best: no step has logged {best!r} yet, only {logged}"
            say(words)

    def _say_damaged(self, checkpoint: Checkpoint, reason: str) -> None:
        say(f"{reason}; trying the one before")
        self._report("checkpoint_damaged", step=checkpoint.step, reason=reason)

    def _say_failed(self, step: int, reason: str) -> str:
        say(f"step {step} is not saved: {reason}")
        self._report("checkpoint_failed", step=step, reason=reason)
        return reason


def _unpack(verdict: dict[str, Any]) -> tuple[int | None, str | None]:
    if "error" in verdict:
        raise {"Superseded": Superseded}.get(verdict["error"], CheckpointError)(verdict["message"])
    return verdict["step"], verdict["problem"]
