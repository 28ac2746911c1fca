"""When and how a run's state is saved: rank 0 saves, and all ranks get the result when they need it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.client import CheckpointClient, NotSaved
from clusterddp.checkpoint.restore import Place, restore
from clusterddp.checkpoint.sharded.client import ShardClient
from clusterddp.checkpoint.sharded.sharding import Sharding
from clusterddp.checkpoint.store import FULL, Checkpoints, best_of
from clusterddp.distributed.collectives import broadcast_json
from clusterddp.distributed.devices import device_thread
from clusterddp.distributed.process_group import NO_TIMEOUT, ProcessGroup
from clusterddp.errors import CheckpointError, ClusterddpError, Superseded
from clusterddp.history import checkpoints as events
from clusterddp.history.event import Reported
from clusterddp.history.view import RunView
from clusterddp.jobdef.job import Checkpointing
from clusterddp.reporter import say
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.training.best_checkpoint import BestSoFar
from clusterddp.training.log_reduction import Receiver, Sender
from clusterddp.training.logged_values import Logged
from clusterddp.training.metrics import BESIDE_S, WAIT_S, Metrics
from clusterddp.training.save_interval import between_interruptions_s, interval_s
from clusterddp.worker.rank_process import RankProcess

#: How much longer than the last save one may take, on a shared disk.
CAUTION = 1.5


#: If all ranks must take part in a save, rank 0 broadcasts after this many steps whether one is due.
TOGETHER_STEPS = 20
#: For this many steps a save waits for accumulated gradients to be reduced.
MOST_POSTPONED = 32
#: With ``every: auto``, the seconds until the first save has been measured.
FIRST_S = 60.0
#: For how long the save at the end of the loop is retried if the disk does not take it, and the pauses, in seconds.
RETRIED_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 600.0, 5.0, 60.0
State = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Committed:
    """The result of ``Saver.commit``, the same on all ranks."""

    step: int | None
    """The step of the newest checkpoint. None if there is none."""
    problem: str | None = None
    """Why that is not the step to save, if it is not."""
    disk: bool = False
    """Whether the reason is a disk that is full, read-only or broken."""
    stop: str | None = None
    """Why a stop was requested meanwhile, if it was. Only with a problem."""


class Saver:
    """The run's checkpoints and metrics. Methods that are not collective have no effect on ranks other than 0 and
    without a run directory.

    A checkpoint is saved at the boundary after a step

    - if it is due by ``checkpoint.every``: by the number of the step, by the seconds since the last save, or with
      ``auto`` by the interval that ``interval_s`` computes,
    - if the script has logged the best value so far of the metric in ``ctx.run(best=...)`` or ``checkpoint.keep.best``
      (``BestSoFar``; after an evaluation at once, before the step),
    - after a request: `clusterddp save` (``request``),
    - at every stop, and at the end of the training loop, unless that step is saved already (``commit``). There all
      ranks wait until it is durable.

    A save that is due by time or by request waits until the writer has finished the previous one. A save by the number
    of the step, or of the best value, cannot wait, so training waits for the writer. If every rank has a state to save,
    such as that of its loader, all ranks save together (``due_together``).
    """

    def __init__(
        self,
        process: RankProcess,
        directory: RunDirectory | None,
        attempt: int,
        group: ProcessGroup,
        report: Callable[[Reported], None],
        settings: Checkpointing,
        sharding: Sharding | None = None,
    ) -> None:
        self._process = process
        self._group, self._report, self._settings = group, report, settings
        self._sharding = sharding
        self._checkpoints: Checkpoints | None = None
        #: On ranks that save: rank 0, and all ranks if the model is sharded.
        self._client: CheckpointClient | ShardClient | None = None
        if directory is not None and sharding is not None:
            self._client = ShardClient(directory, attempt, settings.keep, group, process.why_not_commit)
        #: The most steps that an earlier attempt made, saved or not; known to rank 0.
        self.steps_before = 0
        if directory is not None and group.rank == 0:
            self._directory = directory
            self._checkpoints = Checkpoints(directory, attempt, settings.keep)
            self._metrics = Metrics(directory.metrics_file, attempt, report)
            self._client = self._client or CheckpointClient(directory, attempt, settings.keep, group.device)
            if group.world_size > 1:
                self._metrics.receiver = Receiver(group.store, group.world_size, self._metrics.drain)
        #: Whether there is a run directory to save in.
        self.saves = directory is not None
        #: Passes on what this rank logs with ``reduce``, on ranks other than 0.
        self._sender = None
        if self.saves and group.rank != 0:
            self._sender = Sender(group.store, group.rank, group.world_size, group.device)
        self._committed: int | None = None
        self._saved_at = time.monotonic()
        self._every_s = FIRST_S if settings.auto else settings.every_s
        self._requested = False
        self._postponed = 0
        self._said_s = 0.0
        #: The events so far, read once, for ``every: auto``: those of this attempt cost no steps.
        self._history: RunView | None = None
        #: Seconds that the last save blocked training.
        self._stall_s = 0.0
        #: Seconds until the last save was durable; 0 before the first.
        self.last_save_s = 0.0
        self._best = BestSoFar(settings.keep)
        #: The history's entry about the best checkpoint, for when the save in progress is durable.
        self._new_best: dict[str, Any] = {}
        self._logged: set[str] = set()
        self._commits = 0
        #: Counts the other ranks that have made their last step, once this one has.
        self._arrived: str | None = None
        #: In a commit, on rank 0: has the other ranks of a sharded model save the step, too.
        self._have_others_save: Callable[[int], None] = lambda _: None
        #: Called with each committed step, on rank 0.
        self.on_commit: Callable[[int], None] = lambda _: None
        #: Around the copies of a state that lies on GPUs.
        self.behind: Callable[[], AbstractContextManager[None]] = nullcontext
        #: Held while taking the writer's answer, by the main thread or the one that acts at the deadline.
        self._answering = threading.Lock()

    def restore(self) -> tuple[dict[str, Any], Place] | None:
        """The newest complete checkpoint and its place, on all ranks. None on a fresh start. Collective.

        Only rank 0 reads the disk. Raises CheckpointError, on all ranks, if there are checkpoints but none is complete.
        """
        if not self.saves:
            return None
        if self._sharding is not None:
            from clusterddp.checkpoint.sharded.restore import restore_sharded  # which imports much of torch

            restored = restore_sharded(self._checkpoints, self._sharding, self._group, self._report_damaged)
        else:
            restored = restore(
                self._checkpoints,
                self._group.control_device,
                self._report_damaged,
                through=self._group.collective_device,
            )
        if restored is not None:
            self._committed = restored[1][1]
        return restored

    def record_resume(self, parent: Place | None) -> None:
        """Rank 0 records, before the first step, what this attempt resumed from."""
        if self._checkpoints is not None:
            self.steps_before = self._directory.most_steps()
            self._checkpoints.record_resume(parent)
            if (best := best_of(self._checkpoints.candidates(), self._settings.keep)) is not None:
                self._best.resume(best[1])
        self._saved_at = time.monotonic()

    @property
    def committed(self) -> int | None:
        """The step of the newest checkpoint, on rank 0."""
        return self._committed

    def request(self) -> None:
        """The next step boundary saves, once no other save is under way. Any thread."""
        self._requested = True

    def prepare(self, state: State) -> None:
        """Prepares for the first save, once the state has its full size. Collective if the model is sharded."""
        if self._client is not None:
            self._client.prepare(state())

    def log_outside(self, step: int, logged: Logged) -> None:
        """Takes what rank 0 has logged outside a step, after ``step`` steps."""
        if self._checkpoints is not None:
            self._metrics.add(step, logged, outside=True)

    def log(self, step: int, logged: Logged, best_is_older: bool = False) -> None:
        """Takes the values of a completed step, on all ranks. Rank 0 notes whether the step is the best so far.

        ``best_is_older``: the metric of the best checkpoint, if it is among them, is that of the state before the step.
        """
        best = self._best.metric
        if self._sender is not None:
            every = self._settings.every_steps
            self._sender.add(step, logged, now=best in logged.reduced or bool(every and (step + 1) % every == 0))
        if self._checkpoints is None:
            return
        self._metrics.add(step, logged)
        self._best.value = None
        if best is None:
            return
        if not self._best.exists:
            self._logged.update(logged.values)
        if best in logged.values and not best_is_older:  # the decision to save this very step cannot wait for the value
            self._metrics.settle(step + 1, WAIT_S)
            value = self._metrics.newest.get(best)
            self._best.value = value if isinstance(value, (int, float)) else None

    @property
    def best_metric(self) -> str | None:
        """The metric of the best checkpoint, if there is one."""
        return self._best.metric

    def log_best(self, step: int, value: float, state: State, last: bool = False) -> None:
        """Rank 0 takes the value of that metric for the present state, after ``step`` steps, and saves a new best.

        ``last``: no step follows that would take the writer's answer. Raises Superseded.
        """
        if self._checkpoints is None:
            return
        self._best.value = value
        if not self._best.better:
            return
        self._take_answer(wait=True)
        if not isinstance(self._client, ShardClient):
            self._save(step, state, urgent=last)
        elif step == self._committed:  # the other ranks' parts of this very state are saved
            self._new_best = self._best.save()
            self._client.replace_facts(self._best.facts())
        if last:
            self._take_answer(wait=True)

    def is_idle(self, step: int) -> bool:
        """Whether ``save_if_due`` has no work here, as after most steps."""
        if self._checkpoints is None or self._client is None:
            return True
        return not (self._postponed or self._wants_this(step) or self._is_time() or self._client.busy)

    def save_if_due(self, step: int, state: State, due: bool = False, later: bool = False) -> None:
        """Rank 0 saves if a checkpoint is due, while the other ranks continue.

        ``due``: it is, in any case. ``later``: one of the next steps is better, unless this is the best so far.

        A save that is due by time waits until the writer has finished the previous one. A save of this very step cannot
        be postponed, so training waits. If a save fails, that is reported, and training continues with the older
        checkpoint.
        """
        if self._client is None:
            return
        if self._checkpoints is None:  # a rank of a sharded model
            self._save_own(step, state, urgent=False)
            return
        this_step = due or self._wants_this(step)
        self._postponed = self._postponed + 1 if later and not self._best.better else 0
        if 0 < self._postponed <= MOST_POSTPONED:
            self._requested = self._requested or this_step
            self.look()
            return
        self._take_answer(wait=this_step)
        if not self._client.busy and (this_step or self._is_time()):
            self._save(step, state, urgent=False)

    def due_together(self, step: int, asked: bool) -> bool:
        """Whether a checkpoint is due, with the same answer on all ranks, where all must take part in a save.

        Every rank can count steps. Whether time is up, the user asked for a save, or the step is the best, is rank 0's
        decision, which it broadcasts now and then, and when all ranks expect it (``asked``).
        """
        if not self.saves:
            return False
        if self._settings.every_steps is not None and step % self._settings.every_steps == 0:
            return True
        if step % TOGETHER_STEPS and not asked:
            return False
        due = self._checkpoints is not None and (self._is_time() or self._best.better)
        return bool(broadcast_json(due, self._group.control_device))

    def look(self) -> None:
        """Rank 0 reports a save that has ended meanwhile, others tell it that their files are durable. Raises
        Superseded."""
        if self._client is not None:
            self._take_answer()

    def commit(self, step: int, state: State, stop: Callable[[], str | None] | None = None) -> Committed:
        """Saves now, unless ``step`` is already saved. Collective. Returns once the save is durable or has failed.

        ``stop``: with it, a save that fails because of the disk is retried for RETRIED_S, or until it returns a reason.
        Raises CheckpointError or Superseded on all ranks.
        """
        if not self.saves:
            return Committed(None, "there is no run directory")
        key = f"commit/{self._commits}"
        self._commits += 1
        if self._sender is not None:
            self._sender.flush()
        verdict = self._follow(key, state) if self._group.rank else self._lead(key, step, state, stop)
        if "error" in verdict:
            raise {"Superseded": Superseded}.get(verdict["error"], CheckpointError)(verdict["message"])
        return Committed(**verdict)

    def _lead(self, key: str, step: int, state: State, stop: Callable[[], str | None] | None) -> dict[str, Any]:
        """Rank 0's part of a commit. Returns the verdict, for all ranks."""
        turns = itertools.count()
        if self._sharding is not None:
            self._have_others_save = lambda step: self._group.store.set(f"{key}/{next(turns)}", json.dumps(step))
        self._arrived = f"{key}/arrived"
        verdict = self._try_commit(step, state, stop)
        self._arrived, self._have_others_save = None, lambda _: None
        self._group.store.set(f"{key}/{next(turns)}", json.dumps(verdict))
        return verdict

    def _follow(self, key: str, state: State) -> dict[str, Any]:
        """The part of the other ranks, which save as often as rank 0 does if the model is sharded."""
        self._group.store.add(f"{key}/arrived", 1)
        if self._client is not None:
            self._take_answer(wait=True)  # for which rank 0 may wait
        for turn in itertools.count():
            self._group.store.wait([f"{key}/{turn}"], NO_TIMEOUT)
            told = json.loads(self._group.store.get(f"{key}/{turn}"))
            if isinstance(told, dict):
                return told
            self._save_own(told, state, urgent=True)
        raise AssertionError("unreachable")

    def _save_own(self, step: int, state: State, urgent: bool) -> None:
        """A rank other than 0 saves its part of a sharded model. An ``urgent`` one is durable, or has failed, then."""
        assert self._client is not None
        self._take_answer(wait=True)
        with self.behind():
            self._client.save(step, state(), {}, urgent)
        if urgent:
            self._take_answer(wait=True)

    @property
    def longest_save_s(self) -> float:
        """The longest that a save may take, to judge by the last one."""
        return CAUTION * self.last_save_s

    def finish_newest(self) -> int | None:
        """The step of the newest checkpoint, for rank 0, called by a different thread when the main one hangs.

        Waits for a save under way, for as long as one may take, unless the main thread is already waiting for it.
        """
        waiting = device_thread(self._group.device, self._finish, name="last save")
        waiting.start()
        waiting.join(1.0 + self.longest_save_s)
        return self._committed

    def _finish(self) -> None:
        with suppress(RuntimeError):  # of CUDA
            self._metrics.take_arrived()
            self._metrics.drain()
        self._take_answer(wait=True)

    def close(self, clean: bool = True, complete: bool = False) -> None:
        """Lets the writer finish its last save. Unless ``clean``, without waiting for other ranks.

        ``complete``: whether the run is complete.
        """
        if self._sender is not None:
            self._sender.close()
        if self._client is not None:
            self._client.close()
            if clean:
                self._client.free()
        if self._checkpoints is not None:
            best = self._best.metric
            logged_it = self._best.exists or best in self._logged  # logged but not found: as NaN, or in no saved step
            if best is not None and self._logged and not logged_it:  # a misspelled metric, perhaps
                logged = ", ".join(sorted(self._logged))
                say(f"no step has logged {best!r}, the metric of the best checkpoint. Logged so far: {logged}")
                if complete:
                    self._report(events.NoBest(metric=best, logged=sorted(self._logged)))
            self._metrics.close(clean)

    # --- saving

    def _wants_this(self, step: int) -> bool:
        """Whether the state after this very step must be saved: by its number, or as the best so far."""
        every = self._settings.every_steps
        return self._best.better or (every is not None and step % every == 0)

    def _is_time(self) -> bool:
        if self._requested:
            return True
        return self._every_s is not None and time.monotonic() - self._saved_at >= self._every_s

    def _save(self, step: int, state: State, urgent: bool) -> NotSaved | None:
        """Takes the snapshot and passes it to the writer, whose result ``_take_answer`` gets. Returns the problem, if
        any."""
        self._requested = False
        self._saved_at = started = time.monotonic()
        try:
            self._flush_metrics(step)
        except OSError as error:
            return self._say_failed(self._metrics_failed(step, error))
        self._new_best = self._best.save()
        seconds = WAIT_S if urgent else BESIDE_S
        before = partial(self._complete, step, seconds)
        assert self._client is not None
        self._have_others_save(step)
        with self.behind():
            self._client.save(step, state(), self._best.facts(), urgent, before)
        self._stall_s = time.monotonic() - started
        return None

    def _complete(self, step: int, seconds: float) -> None:
        """Asks whether all ranks have made ``step``, and writes the lines below it.

        Raises NotSaved. Called by another thread.
        """
        if self._group.world_size > 1 and (lost := self._process.why_not_commit(step, self._all_arrived)):
            raise NotSaved(step, f"{lost}, and the step may not have been completed by all ranks")
        if not self._metrics.pending:
            return
        self._metrics.settle(step, seconds)
        try:
            self._flush_metrics(step)
        except OSError as error:
            raise self._metrics_failed(step, error) from error
        except Superseded as error:  # the next save raises it, in the main thread
            raise NotSaved(step, str(error)) from error

    @staticmethod
    def _metrics_failed(step: int, error: OSError) -> NotSaved:
        return NotSaved(step, f"could not write the metrics up to this step ({error.strerror})", disk=True)

    def _all_arrived(self) -> bool:
        """Whether all ranks have come to the commit of a stop."""
        if self._arrived is None:
            return False
        return bool(self._group.store.add(self._arrived, 0) == self._group.world_size - 1)

    def _flush_metrics(self, step: int) -> None:
        """Writes the lines below ``step``, and deletes older checkpoints if the disk is full. Raises OSError."""
        while True:
            try:
                return self._metrics.flush()
            except OSError as error:
                if error.errno not in FULL or self._checkpoints is None:
                    raise
                if (deleted := self._checkpoints.make_room(0)) is None:
                    raise
                self._report_deleted(step, [deleted])

    def _make_room(self, failed: NotSaved) -> None:
        """Deletes the oldest checkpoint for a rank whose disk is full, and has a save made soon.

        That rank's disk, or its quota, may not be rank 0's, whose writer makes room by itself.
        """
        if failed.full is None or self._checkpoints is None:
            return
        with suppress(OSError, Superseded):  # the next save reports it
            if (deleted := self._checkpoints.make_room(0, failed.full)) is not None:
                self._report_deleted(failed.step, [deleted])
                self._requested = True

    def _report_deleted(self, step: int, deleted: Sequence[int]) -> None:
        if deleted:
            self._report(events.RoomMade(step=step, deleted=list(deleted)))

    def _take_answer(self, wait: bool = False) -> NotSaved | None:
        """Takes the writer's answer if the save under way is done. Returns why it failed, if it did."""
        with self._answering:
            asked_at = time.monotonic()
            assert self._client is not None
            try:
                saved = self._client.result(wait)
            except NotSaved as error:
                if self._checkpoints is None:  # rank 0 reports it
                    return error
                self._best.failed()
                self._metrics.doubtful |= error.metrics
                self._report_deleted(error.step, error.deleted)
                self._make_room(error)
                return self._say_failed(error)
            if saved is None:
                return None
            self._committed, self.last_save_s = saved.step, saved.at - self._saved_at
            waited_s = time.monotonic() - asked_at if wait else 0.0
            # A GPU makes the copies while the host continues, and trains only behind them.
            self._stall_s, host_s = max(self._stall_s, self._client.copied_s), self._stall_s
            self._report_deleted(saved.step, saved.deleted)
            self._report(
                events.Checkpoint(
                    step=saved.step,
                    blocked_s=round(max(self._stall_s, host_s + waited_s), 4),
                    durable_s=round(self.last_save_s, 4),
                    bytes=saved.bytes,
                    best=self._new_best or None,
                )
            )
            self.on_commit(saved.step)
            if self._settings.auto:
                self._choose_interval(saved.step)
            return None

    def _try_commit(self, step: int, state: State, stop: Callable[[], str | None] | None) -> dict[str, Any]:
        failed = None
        try:
            self._take_answer(wait=True)
            # A request may have changed the state of that step. The files of a sharded model are never replaced.
            if step != self._committed or (self._requested and self._sharding is None):
                failed = self._save(step, state, urgent=True) or self._take_answer(wait=True)
                while failed is not None and failed.full and self._requested:  # there is more room now
                    failed = self._save(step, state, urgent=True) or self._take_answer(wait=True)
                if failed is not None and failed.disk and stop is not None:
                    failed = self._retry(failed, state, stop)
        except ClusterddpError as error:
            return {"error": type(error).__name__, "message": str(error)}
        if failed is None:
            return asdict(Committed(self._committed))
        return asdict(Committed(self._committed, str(failed), failed.disk, stop() if stop is not None else None))

    def _retry(self, failed: NotSaved, state: State, stop: Callable[[], str | None]) -> NotSaved | None:
        """Retries the last save of the loop, at least once, until the disk takes it. Returns the last failure, if any.

        The state stays in memory meanwhile, and the other ranks wait. A stop that is requested leaves one more try.
        """
        step, folder = failed.step, str(self._directory.checkpoints)
        say(events.last_save_retried(step, RETRIED_S, folder))
        self._report(events.LastSaveRetried(step=step, seconds=RETRIED_S, folder=folder))
        left: NotSaved | None = failed
        ends, pause_s = time.monotonic() + RETRIED_S, FIRST_PAUSE_S
        while left is not None and left.disk and time.monotonic() < ends and stop() is None:
            next_try, pause_s = min(ends, time.monotonic() + pause_s), min(LONGEST_PAUSE_S, 2 * pause_s)
            while stop() is None and (pause := next_try - time.monotonic()) > 0:
                time.sleep(min(0.5, pause))
            left = self._save(step, state, urgent=True) or self._take_answer(wait=True)
        return left

    def _choose_interval(self, step: int) -> None:
        if self._history is None:
            try:
                self._history = self._directory.history()
            except OSError as error:
                say(f"could not read the history ({error}). Still saving every {self._every_s:.0f} s")
                return
        between_s = between_interruptions_s(self._history, time.time())
        self._every_s = interval_s(self._stall_s, self.last_save_s, between_s)
        if not 0.5 < self._every_s / (self._said_s or 1e-9) < 2:
            self._said_s = self._every_s
            every_s, stall_s = round(self._every_s, 1), round(self._stall_s, 4)
            self._report(events.Interval(step=step, seconds=every_s, stall_s=stall_s, between_s=between_s))

    def _report_damaged(self, checkpoint: Checkpoint, reason: str) -> None:
        self._report(events.CheckpointDamaged(step=checkpoint.step, reason=reason))

    def _say_failed(self, error: NotSaved) -> NotSaved:
        say(f"step {error.step} was not saved: {error}")
        self._report(events.CheckpointFailed(step=error.step, reason=str(error)))
        return error
