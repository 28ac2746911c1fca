"""The training loop of a run: resumes from the newest checkpoint, saves, and stops at step boundaries.

Step s turns checkpoint s (the state after s steps) into checkpoint s + 1. Everything random in a step is a function of
(seed, s, rank): its samples, their augmentation, dropout. A resumed run therefore needs only the step and the parts'
states to continue bit for bit like an uninterrupted one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from clusterddp.data import randomness
from clusterddp.data.training_loader import MicroBatches
from clusterddp.data.workers import close_workers
from clusterddp.distributed.collectives import broadcast_json
from clusterddp.distributed.devices import Lead
from clusterddp.errors import CheckpointError, LastSaveFailed, Stopped, Superseded
from clusterddp.history.beginnings import NotRestored, NotUsed, Phase, Resumed, Training
from clusterddp.history.event import Reported
from clusterddp.history.steps import (
    DeviceMemory,
    Diverged,
    GroupAdded,
    MicrobatchingSkipped,
    NotGiven,
    Progress,
    Result,
    ShapesChanged,
    ShortEpochs,
    Stalled,
    UnevenCalls,
)
from clusterddp.history.stops import Finishing, LeftLoop, Stopping
from clusterddp.reporter import counted, say
from clusterddp.rundir.files import finite
from clusterddp.rundir.schemas import NOT_VALUES
from clusterddp.training import exactness, forgotten
from clusterddp.training import logged_values as logged
from clusterddp.training.exactness import (
    COMPARED_AFTER,
    explanation_of_calls,
    explanation_of_divergence,
    explanation_of_unreduced,
)
from clusterddp.training.module_attributes import EXPLANATION as EXPLANATION_OF_ATTRIBUTES
from clusterddp.training.run_state import Given, RunState
from clusterddp.training.saving import MOST_POSTPONED
from clusterddp.training.step_state import OptimizerSteps, Step
from clusterddp.training.step_timing import InputWait
from clusterddp.worker.control_channel import RunRequests
from clusterddp.worker.rank_exit import Loop
from clusterddp.worker.rank_process import RankProcess

if TYPE_CHECKING:
    from clusterddp.distributed.process_group import ProcessGroup
    from clusterddp.jobdef.job import Job
    from clusterddp.training.heartbeat import Heartbeat
    from clusterddp.training.metrics import Tracking
    from clusterddp.training.saving import Committed, Saver
    from clusterddp.training.step_timing import StepTimes
    from clusterddp.training.stopping import Agreement, Deadline


@dataclass(frozen=True)
class Services:
    """The parts of its context that a run uses. ``report`` adds an event to the history, on any rank."""

    process: RankProcess
    job: Job
    seed: int
    group: ProcessGroup
    agreement: Agreement
    saver: Saver
    deadline: Deadline
    heartbeat: Heartbeat
    times: StepTimes
    tracking: Tracking
    report: Callable[[Reported], None]


class Run:
    """One attempt of a run: made by ``Context.run``, with the newest checkpoint restored."""

    def __init__(self, given: Given, services: Services) -> None:
        self._process = services.process
        self._job, self._seed = services.job, services.seed
        self._group, self._agreement = services.group, services.agreement
        self._saver, self._deadline, self._heartbeat = services.saver, services.deadline, services.heartbeat
        self._times, self._tracking, self._report_event = services.times, services.tracking, services.report
        self._loader, self._rng = given.loader, given.rng
        self._times.on_sample = InputWait(self._report, lambda: self.step, given.loader.workers).look
        self._times.on_stall = lambda seconds: self._report(Stalled(seconds=seconds))
        self._enter("restoring")
        self._state = RunState(given, self._seed, self._group)
        #: Whether all ranks take part in a save, because each has a state, or a part of the model.
        self._is_sharded = given.sharding is not None
        self._together = given.loader.per_rank_state or bool(given.per_rank) or self._is_sharded
        #: For how many steps a save has waited for FSDP's gradients, and when it was last asked.
        self._awaited, self._awaited_at = 0, 0.0
        #: The step being made; between two steps, and outside the loop, there is none.
        self._making: Step | None = None
        #: How often the script has asked for the place for an evaluation, in this attempt.
        self._asked = 0
        self._goal = 0  # of the current loop
        self._begun = self._stopping = False
        #: Whether the last loop is complete.
        self._done = False
        #: Whether the script has left a loop after an optimizer's step, and no loop is complete since.
        self._left_unsaved = False
        #: Whether all ranks expect that rank 0 may save after this step.
        self._may_be_due = False
        self._pid = os.getpid()
        #: The metric of the best checkpoint; empty if there is none.
        self._best_metric = self._saver.best_metric or ""
        self._values = logged.Values(keeps_own=self._group.rank == 0)
        self._micro = MicroBatches(given.parts, given.loader)
        self._optimizer_steps = OptimizerSteps(given.parts, self._note_optimizer_step, self._note_group)
        self._saver.behind = self._optimizer_steps.behind
        self._lead = Lead() if self._group.device.type == "cuda" else None
        self._forgotten = forgotten.Forgotten(given.parts)
        self._made = 0  # steps, in this attempt
        self._state.restore(self._saver.restore())
        for unused in self._state.unused:
            self._report(unused)
        if self._state.parent is None and given.warm_start is not None:
            for loaded in given.warm_start():
                self._report(loaded.event())
        self._enter("importing")
        self._process.on_requests(
            RunRequests(
                progress=lambda: (self.step, self._saver.committed),
                save=self._saver.request,
            )
        )

    @property
    def step(self) -> int:
        """The number of completed steps. Inside the loop, therefore, the number of the current step, from 0."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the current step takes its first sample from."""
        return self._loader.epoch(self.step)

    @property
    def end_of_epoch(self) -> bool:
        """Whether the current step takes the last sample of an epoch.

        Raises TypeError without a loader, and RuntimeError before the first batch of a loader of your own.
        """
        self._loader.count_epochs()
        return self._loader.ends_epoch(self.step)

    @property
    def at_start_of_epoch(self) -> bool:
        """Whether the current step is the first of an epoch: step 0, and those at which ``every(epochs=1)`` is true.
        All ranks ask in the same steps.

        Raises TypeError without a loader, RuntimeError outside a step.
        """
        self._loader.count_epochs()
        return self._place(self.step == 0 or self._loader.epochs_before(self.step, 1))

    def every(self, *unnamed: NoReturn, epochs: int | None = None, steps: int | None = None) -> bool:
        """Whether this many more epochs or steps are complete: the place for an evaluation, at the beginning of a step.
        All ranks call it in the same steps.

        What the script does there, before the step's training, is exact wherever the run is stopped: evaluate, step a
        scheduler, change the values of ``ctx.run(script_state=...)``, and ``finish``. A stop during an evaluation saves
        the state from before the step, and the next attempt repeats it. A metric that is logged there belongs to
        checkpoint ``step``. After the last step of the loop there is no such place. Evaluate once more after the loop.

        Args:
            unnamed: refuses a number without ``epochs`` or ``steps``.
            epochs: true in the first step after this many epochs. With a different library's loader, an epoch is a
                pass over it.
            steps: true in the steps whose number is a multiple of it, except step 0.

        Raises TypeError unless one of them is given, and for epochs without a loader. ValueError for anything but a
        whole number of at least 1. RuntimeError outside a step.
        """
        if unnamed or (epochs is None) == (steps is None):
            raise TypeError("run.every(): expected epochs or steps, as in run.every(epochs=1) or run.every(steps=500)")
        for name, value in (("epochs", epochs), ("steps", steps)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"run.every({name}={value!r}): expected a whole number of at least 1")
        if epochs is not None:
            self._loader.count_epochs()
            return self._place(self.step > 0 and self._loader.epochs_before(self.step, epochs))
        return self._place(self.step > 0 and self.step % (steps or 1) == 0)

    def steps(self, total: int | None = None) -> Iterator[Any]:
        """Yields this rank's batch of each step, from the step that the run resumed at.

        Ends once all steps are done, or after ``finish``, when the last checkpoint is committed. Immediately if that
        was already so before. ``break`` ends the loop and the watchdog's supervision without a save. If the script
        holds the iterator in a variable, call its ``close()`` after ``break``, or use ``Context.unwatched``. Otherwise
        the code that follows looks like a long step.

        A step that ends with ``break`` is complete if an optimizer has stepped in it. Otherwise the next loop repeats
        it, with the following batch if the loader has a state. To accumulate gradients across loops, ``break`` only
        after the optimizer's step.

        Args:
            total: the number of steps of the whole run. The job's ``steps`` if None.

        Raises Stopped, on all ranks after the same step and with the state saved, when the run must stop.
        CheckpointError when the last checkpoint cannot be written. If the disk is the reason, all ranks first keep the
        state in memory and retry for ten minutes. TypeError and ValueError for a wrong ``total``.
        """
        return self._steps(self._total(total))

    def _steps(self, total: int) -> Iterator[Any]:
        self._begin(total)
        self._goal = total
        self._seeds = randomness.step_seeds(self._seed, self._group.rank, self.step)
        self._done = self._over()
        if self._done:
            if self._left_unsaved:  # the script left the loop in its last step
                self._complete()
            return
        self._process.training.loop = loop = Loop(lambda: self.step, total)
        self._heartbeat.begin()
        self._enter("training" if self._made else "first_step")
        if not self._made:
            self._state.attributes.begin(total)
        self._state.attributes.begin_loop()
        self._boundary()
        batches = self._loader.batches(self.step, self._boundary)
        try:
            while not self._over():
                if self._lead is not None:
                    self._lead.limit({torch.cuda.current_stream(self._group.device), *self._optimizer_steps.streams})
                self._times.ask()
                batch = next(batches)
                self._times.begin()
                self._start_step()
                yield batch
                self._finish_step()
                self._boundary()
                if (self._together or not self._saver.is_idle(self.step)) and not self._over():
                    with self._heartbeat.pause():  # may wait for the previous save, on a slow disk
                        self._save_if_due()
        except GeneratorExit:
            if os.getpid() == self._pid:  # rather than a child that was forked in a step and exits
                loop.leave()
                self._left("exception" if loop.failed else "break")
            raise
        finally:
            self._heartbeat.rest()
            batches.close()  # type: ignore[attr-defined]
        self._state.attributes.end_loop()
        self._complete()

    def epochs(self, count: float) -> Iterator[Any]:
        """Yields this rank's batch of each step, as ``steps`` does, for ``count`` passes over the dataset. The last
        step is filled from the next epoch.

        Args:
            count: the number of epochs of the whole run. Need not be whole.

        Raises ValueError for a wrong ``count``, TypeError for a loader without a length, and what ``steps`` raises.
        """
        if not isinstance(count, Real) or not 0 <= count < math.inf:
            raise ValueError(f"run.epochs({count!r}): expected a number of epochs, 0 or more")
        self._loader.count_epochs()
        steps = math.ceil(self._loader.steps_in(count))
        if (sizes := self._loader.larger_than_dataset) is not None and self._group.rank == 0:
            said = (
                f"the global batch of {counted(sizes[0], 'sample')} is larger than the dataset, which has {sizes[1]}, "
                f"so run.epochs({count}) is {counted(steps, 'step')}. Reduce batch_size, or use run.steps()"
            )
            say(said)
            self._report(ShortEpochs(step=self.step, explanation=said))
        return self.steps(steps)

    def micro(self, batch: Any) -> Iterator[Any]:
        """Yields the step's batch in pieces of at most the loader's ``batch_size`` samples. In one piece if it fits.

        The body of the loop is the forward pass and ``loss.backward()``, with the mean loss over the piece. After the
        loop the gradients are those of the mean over the global batch, as without pieces, on any number of ranks. Zero
        the gradients and step the optimizer outside the loop, and do not ``break`` out of it.

        Args:
            batch: this rank's batch: a tensor, or nested tuples, lists and dicts of tensors and lists, with the samples
                in the first dimension.

        Raises TypeError for a batch that cannot be split, RuntimeError when the loop is used differently.
        """
        return self._micro.pieces(batch)

    def log(self, *unnamed: NoReturn, reduce: logged.Reduction | None = None, **values: Any) -> None:
        """Logs metrics of the current step to metrics.jsonl: rank 0's values, merged over the calls in a step.

        Logs the values that tensors have at the call, and never waits for a GPU. Outside a step, as after the loop, the
        values belong to the state after ``step`` steps, and are also in the history as a ``result``.

        Args:
            unnamed: refuses a value without its name, such as a dict.
            reduce: logs one value for all ranks, as a float64: the "mean", "sum", "min" or "max" of their values. All
                ranks call it in the same step, and a rank that does not is left out. Uses no collective.
            values: numbers, or tensors of one element, by name.

        Raises TypeError for other values and for reserved names, ValueError for more than 1 MB per step or result and
        for an unknown ``reduce``, RuntimeError for ``reduce`` outside a step.
        """
        if unnamed:
            raise TypeError(
                "run.log(): expected values by name, as in run.log(loss=loss), or from a dict, run.log(**values)"
            )
        if not NOT_VALUES.isdisjoint(values):
            taken = min(NOT_VALUES & values.keys())
            raise TypeError(f"run.log({taken}=...): the name is reserved. Choose a different one")
        if self._making:
            self._values.add(values, reduce)
            if self._best_metric in values:
                self._log_best(values[self._best_metric], reduce)
            return
        if reduce is not None:
            raise RuntimeError("run.log(reduce=...) works only in a step. Use ctx.all_reduce_mean() on all ranks")
        outside = logged.Values(keeps_own=self._group.rank == 0)
        outside.add(values)
        if self._group.rank == 0:
            self._saver.log_outside(self.step, outside.take())
            result = {name: finite(logged.number(name, value)) for name, value in values.items()}
            self._report(Result(step=self.step, others=result))
            if self._done and (best := self._best_metric) in values:
                self._saver.log_best(self.step, float(logged.number(best, values[best])), self._content, last=True)

    def finish(self) -> None:
        """Ends the loop after the current step: early stopping. All ranks call it in the same step.

        The loop ends as it does after ``total`` steps, with a checkpoint, and a resumed run does not repeat it.

        Raises RuntimeError outside a step.
        """
        if not self._making:
            raise RuntimeError("run.finish() ends the loop over run.steps(). Call it inside that loop")
        self._making.last = self._making.special = True

    def stop(self, reason: str) -> NoReturn:
        """Saves and raises Stopped. All ranks call it at the same point, as after ``clusterddp.stop_requested()``.

        Inside a step, the state after that step is saved if an optimizer has stepped, else the state before it.

        Args:
            reason: why, for the message and the history.

        Raises Stopped, always. CheckpointError or Superseded, on all ranks, when this attempt can no longer save.
        """
        self._stopping = True
        if self._making and self._making.optimizer_stepped:
            self._state.stopped_in_step = {"cut": True, "not_stepped": self._optimizer_steps.missing()}
            self._finish_step()
        elif self._making:
            unknown = not self._optimizer_steps.any and not self._making.evaluates
            begun = self._loader.per_rank_state or self._state.per_rank.changed() or unknown
            changed, unseen = not self._state.buffers.rewind(), self._optimizer_steps.unseen()
            marks = {"buffers_changed": changed, "unseen": unseen, "begun": begun}
            self._state.stopped_in_step = {name: True for name, true in marks.items() if true}
        self._report(Stopping(step=self.step, reason=reason))
        self._stop(self._commit(), reason)

    def _stop(self, committed: Committed, reason: str) -> NoReturn:
        close_workers()
        if self._group.rank == 0:
            say(_farewell(self.step, reason, committed))
        raise Stopped(committed.step, reason)

    # --- the parts of a step

    def _place(self, due: bool) -> bool:
        """Keeps the state before the step, if an evaluation is due."""
        if self._making is None:
            raise RuntimeError("run.every() and run.at_start_of_epoch work only in the loop over run.steps()")
        self._asked += 1
        if due and not self._making.evaluates and not self._making.optimizer_stepped:
            self._making.evaluates = self._making.special = True
            self._state.before.keep()
            self._state.per_rank.keep()
        return due

    def _log_best(self, value: Any, reduce: str | None) -> None:
        """At the place for an evaluation, the value is that of the state before the step, which can still be saved."""
        made = self._making
        if made is None or self._group.rank != 0:
            return
        before = made.evaluates and not made.optimizer_stepped and reduce is None and not self._together
        made.best_before = before and self._state.is_before_step()
        if made.best_before:
            try:
                with self._heartbeat.pause(), self._times.aside():
                    number = float(logged.number(self._best_metric, value))
                    self._saver.log_best(self.step, number, self._content)
            except Superseded as error:
                self._agreement.request(str(error))

    def _report(self, event: Reported) -> None:
        """Adds an event to the history, by rank 0."""
        if self._group.rank == 0:
            self._report_event(event)

    def _enter(self, phase: str) -> None:
        self._report(Phase(phase=phase))

    def _total(self, total: int | None) -> int:
        if total is not None and self._job.steps not in (None, total) and not self._begun:
            because = "The script says"
            self._report(NotUsed(what="steps", given=self._job.steps, used=total, because=because))
        total = self._job.steps if total is None else total
        if total is None:
            raise TypeError("run.steps() needs a number of steps, because the job definition has no `steps`")
        if not isinstance(total, Real) or not (0 <= total < math.inf and total == int(total)):
            raise ValueError(f"run.steps({total!r}): expected a whole number of steps, 0 or more")
        return int(total)

    def _begin(self, total: int) -> None:
        self._report(Progress(step=self.step, steps=total))
        if self._begun:
            return
        self._begun = True
        if self._state.parent is not None and total < self.step:
            self._state.inexact.append(f"the loop to step {total} was already done, and the code after it runs again")
        self._saver.record_resume(self._state.parent)
        self._tracking.begin(self.step)
        if self._state.parent is None:
            self._report(Training(step=self.step))
        else:
            parent = {"attempt": self._state.parent[0], "step": self._state.parent[1]}
            self._report(Resumed(step=self.step, parent=parent, inexact=self._state.inexact))

    def _start_step(self) -> None:
        if self._rng == "step":
            randomness.seed_all(next(self._seeds))
        self._state.gradients.begin_step()
        self._state.buffers.begin_step()
        self._state.orders.begin_step()
        self._optimizer_steps.begin_step()
        self._state.before.begin_step()
        self._state.per_rank.begin_step()
        self._making = Step()

    def _finish_step(self) -> None:
        if self._micro.end_step():
            self._report(MicrobatchingSkipped(step=self.step, samples=self._loader.share, most=self._loader.batch_size))
        step = self._state.step
        self._count_step()
        self._state.buffers.share()
        self._made += 1
        if not self._made % exactness.SHAPES_CHECK_STEPS:
            self._look_at_shapes()
        if self._saver.saves and self._made in COMPARED_AFTER:
            self._compare()
        self._times.end()
        if self._made <= 2:
            self._report_forgotten(self._forgotten.end_step())
        if self._made == 1:
            if self._group.device.type == "cuda":
                self._report(DeviceMemory(bytes=torch.cuda.max_memory_reserved(self._group.device)))
            self._group.shorten_timeout(self._job.timeouts.step_s)
            if self._saver.saves:
                self._state.per_rank.gather()  # so that too large a state is refused now
            self._saver.prepare(self._content)
            self._compare_attributes()
            self._enter("repeating" if self.step < self._saver.steps_before else "training")
        elif step + 1 == self._saver.steps_before:
            self._enter("training")

    def _count_step(self) -> None:
        """The current step is completed. Uses no collective, because other ranks may still be in the loop."""
        made, step = self._making, self._state.step
        assert made is not None
        self._making = None
        self._saver.log(step, self._values.take(), made.best_before)
        self._state.step = step + 1
        if made.special:
            self._end_special(made)

    def _compare(self) -> None:
        """Compares the ranks' states. Rank 0 waits for the others."""
        with self._times.aside():
            parts = self._state.divergence.compare(self._made, self._asked)
        if uneven := self._state.divergence.uneven:
            self._tell_uneven(explanation_of_calls(uneven))
        if parts:
            say(explanation_of_divergence(parts))
            self._report(Diverged(step=self.step, parts=parts, explanation=explanation_of_divergence(parts)))

    def _compare_attributes(self) -> None:
        """After the attempt's first step. Rank 0's modules are compared with the checkpoint's."""
        if self._group.rank == 0 and (differences := self._state.attributes.differences()):
            say(f"the resume is not bit-exact: {', '.join(differences)}. {EXPLANATION_OF_ATTRIBUTES}")
            self._report(NotRestored(step=self.step, inexact=differences))

    def _look_at_shapes(self, ask: bool = False) -> None:
        """``ask``: on rank 0, also what other ranks have seen."""
        shapes = self._state.shapes
        if self._saver.saves and (shapes.look() or (ask and shapes.ask())):
            said = exactness.explanation_of_shapes()
            say(said)
            self._report(ShapesChanged(step=self.step, explanation=said))

    def _tell_uneven(self, words: str) -> None:
        """Only some ranks call ``run.every``. If all save together, they would wait for each other."""
        if self._together and self._best_metric:
            raise RuntimeError(words)
        say(words)
        self._report(UnevenCalls(step=self.step, explanation=words))

    def _end_special(self, made: Step) -> None:
        """Handles what few steps have: an evaluation, the end."""
        if made.last:
            self._state.finished.append(self._goal)
        self._may_be_due |= made.evaluates and bool(self._best_metric)
        self._look_at_shapes()

    def at_boundary(self) -> bool:
        """Whether to stop here, for ``clusterddp.stop_requested()``."""
        return self._agreement.boundary()

    def _boundary(self) -> None:
        if self._agreement.boundary() and not self._awaits_reduction():
            self.stop(self._agreement.reason or "")

    def _awaits_reduction(self) -> bool:
        """Whether a save of a sharded model waits for a later step, which reduces the gradients that FSDP holds.

        Rank 0 decides, and a stop waits only as long as the grace period allows another step. Collective if the model
        is sharded.
        """
        if not (self._is_sharded and self._saver.saves):
            return False
        now = time.monotonic()
        step_s, self._awaited_at = now - (self._awaited_at or now), now
        may = self._awaited < MOST_POSTPONED and self._deadline.left_s > 2 * step_s
        unreduced = self._state.gradients.are_unreduced(before_step=self._making is not None)
        awaits = bool(broadcast_json(may and unreduced, self._group.control_device))
        self._awaited, self._awaited_at = (self._awaited + 1, now) if awaits else (0, 0.0)
        return awaits

    def _gather(self) -> None:
        """Brings what each rank has for itself to rank 0. Collective."""
        self._look_at_shapes()
        with self._times.waiting(), self._optimizer_steps.behind():
            self._loader.gather()
            if self._saver.saves:
                self._state.gather(before_step=self._making is not None)
        if (near := self._state.per_rank.near_limit(self.step)) is not None:
            self._report(near)

    def _commit(self, stop: Callable[[], str | None] | None = None) -> Committed:
        self._gather()
        self._deadline.end()  # the save itself has no deadline
        self._heartbeat.rest()
        self._times.leave()
        committed = self._saver.commit(self.step, self._content, stop)
        self._times.leave()  # a GPU may have been behind
        return committed

    def _save_if_due(self) -> None:
        try:
            if self._together:
                asked, self._may_be_due = self._may_be_due, False
                with self._times.waiting():
                    due = self._saver.due_together(self.step, asked)
                if due and self._awaits_reduction():
                    self._saver.request()
                    self._may_be_due, due = True, False
                if not due:
                    self._saver.look()
                    return
                self._gather()
            later = not self._together and self._state.gradients.are_apart
            self._saver.save_if_due(self.step, self._content, due=self._together, later=later)
        except Superseded as error:  # Only rank 0 gets this. The other ranks do in the commit, once all have stopped.
            self._agreement.request(str(error))

    def _complete(self) -> None:
        self._report(Finishing(step=self.step))  # until "progress", the supervisor lets this rank save
        committed = self._commit(lambda: self._agreement.reason)
        if self._saver.saves and committed.step != self.step:
            if committed.stop is not None:  # the next attempt repeats the steps since the newest checkpoint
                self._report(Stopping(step=self.step, reason=committed.stop))
                self._stop(committed, committed.stop)
            raise (LastSaveFailed if committed.disk else CheckpointError)(
                f"all {self.step} steps are done, but the last checkpoint was not saved: {committed.problem}. Once "
                "that is fixed, submit the run again. It repeats the steps since the newest checkpoint"
            )
        self._report(Progress(step=self.step, steps=self.step))
        self._enter("after_loop")
        self._done, self._left_unsaved = True, False
        self._process.training.complete_loop()

    def _report_forgotten(self, names: list[str]) -> None:
        if names and self._group.rank == 0:
            said = forgotten.explanation(names)
            say(said)
            self._report(NotGiven(step=self.step, explanation=said))

    def _look_at_unreduced(self) -> None:
        """Reports modules in DDP with parameters that were unfrozen after ``ctx.wrap()``, on rank 0."""
        if self._group.world_size > 1 and (parts := self._state.divergence.unreduced()):
            said = explanation_of_unreduced(parts)
            say(said)
            self._report(Diverged(step=self.step, parts=parts, explanation=said))

    def _content(self) -> dict[str, Any]:
        self._look_at_shapes(ask=True)
        self._look_at_unreduced()
        self._report_forgotten(self._forgotten.schedulers())
        return self._state.content(before_step=self._making is not None, loop=self._goal)

    def _over(self) -> bool:
        """Whether the loop has reached its end, in this attempt or an earlier one."""
        return self._state.step >= self._goal or self._goal in self._state.finished

    def _left(self, by: str) -> None:
        """The script left the loop, by ``break`` or an exception. Other ranks may not have, so that no collective is
        possible. A stop during an evaluation, which is an exception too, has saved."""
        if self._stopping:
            return
        if self._making is not None and self._making.optimizer_stepped:
            self._count_step()
            self._left_unsaved = True
        self._making = None
        self._state.attributes.end_loop()
        self._report(LeftLoop(step=self.step, steps=self._goal, by=by))
        self._enter("after_loop")

    def _note_group(self, optimizer: str) -> None:
        said = (
            f"{optimizer} received another group of parameters after ctx.run(). A resume will fail, because its "
            "checkpoints then have more groups than the optimizer that a resumed script gives to ctx.run(). Give the "
            "optimizer all parameters from the start, as it does not change those that are frozen"
        )
        if self._group.rank == 0:
            say(said)
        self._report(GroupAdded(step=self.step, explanation=said))

    def _note_optimizer_step(self, optimizer: Any) -> None:
        """An optimizer has stepped: from now on, the state is the one after the current step."""
        if self._making:
            self._making.optimizer_stepped = True
        self._micro.optimizer_steps += 1
        self._state.gradients.stepped(optimizer)
        self._state.buffers.share(optimizer)


def _farewell(step: int, reason: str, committed: Committed) -> str:
    if committed.problem is None:
        return f"stopped ({reason}) at step {step}. Checkpoint {committed.step} is saved"
    rest = f". The run continues from step {committed.step}" if committed.step is not None else ""
    return f"stopped ({reason}) at step {step} without saving: {committed.problem}{rest}"
