"""The training loop of a run: resumes from the newest checkpoint, saves, and stops at step boundaries.

Step s turns checkpoint s (the state after s steps) into checkpoint s + 1. Everything random in a step is a function of
(seed, s, rank): its samples, their augmentation, dropout. A resumed run therefore needs only the step and the parts'
states to continue bit for bit like an uninterrupted one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from clusterddp.checkpoint.state import Stateful
from clusterddp.data import randomness
from clusterddp.data.microbatch import MicroBatches
from clusterddp.data.training_loader import TrainingLoader
from clusterddp.data.workers import close_workers
from clusterddp.errors import CheckpointError, Stopped, Superseded
from clusterddp.reporter import say
from clusterddp.training.log import values as logged
from clusterddp.training.log.media import Media
from clusterddp.training.optimizer_steps import OptimizerSteps
from clusterddp.training.state import compiled_shapes
from clusterddp.training.state.divergence import COMPARED_AFTER, explanation, explanation_of_calls
from clusterddp.training.state.initial import Loaded
from clusterddp.training.state.per_rank import PerRank
from clusterddp.training.state.run_state import Randomness, RunState
from clusterddp.training.state.values import Values
from clusterddp.training.steps.input_wait import InputWait
from clusterddp.training.steps.logging import Logging
from clusterddp.training.steps.position import Step
from clusterddp.training.steps.steering import Steering
from clusterddp.worker import completion, control_channel

if TYPE_CHECKING:
    from clusterddp.training.services import Services


class Run(Logging, Steering):
    """One attempt of a run: made by ``Context.run``, with the newest checkpoint restored."""

    def __init__(
        self,
        parts: dict[str, Stateful],
        loader: TrainingLoader,
        rng: Randomness,
        values: Values,
        per_rank: PerRank,
        warm_start: Callable[[], list[Loaded]] | None,
        services: Services,
    ) -> None:
        self._job, self._group, self._agreement = services.job, services.group, services.agreement
        self._saver, self._deadline, self._heartbeat = services.saver, services.deadline, services.heartbeat
        self._times, self._profiling, self._report_event = services.times, services.profiling, services.report
        self._tracking = services.tracking
        self._loader, self._rng = loader, rng
        self._times.on_sample = InputWait(self._report, lambda: self.step, loader.workers).look
        self._enter("restoring")
        self._state = RunState(parts, loader, rng, self._job.seed, self._group, values, per_rank)
        #: Whether all ranks take part in a save, because each has a state.
        self._together = loader.per_rank_state or bool(per_rank)
        self._making = None
        self._goal = 0  # of the current loop
        self._begun = self._stopping = False
        self._agreement.on_skip = self._on_skip
        self._process = os.getpid()
        self._best_metric = self._saver.best_metric or ""
        self._values, self._media = logged.Values(keeps_own=self._group.rank == 0), Media()
        self._micro = MicroBatches(parts, loader)
        self._optimizer_steps = OptimizerSteps(parts, self._note_optimizer_step)
        self._saver.behind = self._optimizer_steps.behind
        self._made = 0  # steps, in this attempt
        self._state.restore(self._saver.restore(self._state.start_loader))
        if self._state.parent is None and warm_start is not None:
            for loaded in warm_start():
                self._report("initialized", **loaded.fields())
        self._enter("importing")
        if (channel := control_channel.current) is not None:
            channel.savable = control_channel.Savable(lambda: (self.step, self._saver.committed), self._saver.request)
            channel.profile, channel.skip = self._profiling.request, self._request_skip

    def steps(self, total: int | None = None) -> Iterator[Any]:
        """Yields this rank's batch of each step, from the step that the run resumed at.

        Ends once all steps are done, or after ``finish``, when the last checkpoint is committed; immediately if that
        was already so before. ``break`` ends the loop and the watchdog's supervision, and saves nothing. If the script
        holds the iterator in a variable, call its ``close()`` after ``break``, or use ``Context.unwatched``: otherwise
        what follows looks like a long step.

        Args:
            total: the number of steps of the whole run; the job's ``steps`` if None.

        Raises Stopped, on all ranks after the same step and with the state saved, when the run is told to stop;
        CheckpointError when the last checkpoint cannot be written; TypeError and ValueError for a wrong ``total``.
        """
        return self._steps(self._total(total))

    def _steps(self, total: int) -> Iterator[Any]:
        self._begin(total)
        self._goal = total
        self._seeds = randomness.step_seeds(self._job.seed, self._group.rank, self.step)
        self._done = self._over()
        if self._done:
            return
        completion.loop = loop = completion.Loop(lambda: self.step, total)
        self._heartbeat.begin()
        self._enter("training" if self._made else "first_step")
        self._in_loop = True
        self._boundary()
        batches = self._loader.batches(self.step, self._boundary)
        try:
            while not self._over():
                self._profiling.at_boundary(self.step)
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
            if os.getpid() == self._process:  # rather than a child that was forked in a step and exits
                loop.leave()
                self._left("exception" if loop.failed else "break")
                if not loop.failed:  # the report of a failure does not wait for the profiler
                    self._profiling.end()
            raise
        finally:
            self._in_loop = False
            self._heartbeat.rest()
            batches.close()  # type: ignore[attr-defined]
        self._profiling.end()
        self._complete()
        self._done = True
        completion.complete()

    def epochs(self, count: float) -> Iterator[Any]:
        """``steps`` for ``count`` passes over the dataset; the last step is filled from the next epoch.

        Args:
            count: the number of epochs of the whole run; need not be whole.

        Raises ValueError for a wrong ``count``, TypeError for a loader without a length, and what ``steps`` raises.
        """
        if not isinstance(count, Real) or not 0 <= count < math.inf:
            raise ValueError(f"run.epochs({count!r}): expected a number of epochs, 0 or more")
        return self.steps(math.ceil(self._loader.steps_in(count)))

    def micro(self, batch: Any) -> Iterator[Any]:
        """Yields the step's batch in pieces of at most the loader's ``batch_size`` samples; in one piece if it fits.

        The body of the loop is the forward and ``loss.backward()``, with the mean loss over the piece. After the loop
        the gradients are those of the mean over the global batch, as without pieces, on any number of ranks. Zero the
        gradients and step the optimizer outside the loop, and do not ``break`` out of it.

        Args:
            batch: this rank's batch: a tensor, or nested tuples, lists and dicts of tensors and lists, with the samples
                in the first dimension.

        Raises TypeError for a batch that cannot be split, RuntimeError when the loop is used in another way.
        """
        return self._micro.pieces(batch)

    def finish(self) -> None:
        """Ends the loop after the current step: early stopping. All ranks call it in the same step.

        The loop ends as it does after ``total`` steps, with a checkpoint, and a resumed run does not repeat it.

        Raises RuntimeError outside a step.
        """
        if not self._making:
            raise RuntimeError("run.finish() ends the loop over run.steps(): call it inside that loop")
        self._making.last = self._making.special = True

    def stop(self, reason: str) -> NoReturn:
        """Saves and raises Stopped. All ranks call it at the same point, after ``Context.stop_requested`` said so.

        Inside a step, the state after that step is saved if an optimizer has stepped, else the state before it.

        Args:
            reason: why, for the message and the history.

        Raises Stopped, always; CheckpointError or Superseded, on all ranks, when this attempt can no longer save.
        """
        self._stopping = True
        self._profiling.drop(reason)
        if self._making and self._making.optimizer_stepped:
            self._state.stopped_in_step = {"cut": True, "not_stepped": self._optimizer_steps.missing()}
            self._finish_step()
        elif self._making:
            unknown = not self._optimizer_steps.any and not self._making.evaluates
            begun = self._loader.per_rank_state or self._state.per_rank.changed() or unknown
            marks = {"buffers_changed": not self._state.buffers.rewind(), "begun": begun}
            self._state.stopped_in_step = {name: True for name, true in marks.items() if true}
        self._report("stopping", step=self.step, reason=reason)
        committed, problem = self._commit()
        close_workers()
        if self._group.rank == 0:
            say(_farewell(self.step, reason, committed, problem))
        raise Stopped(committed, reason)

    # --- the parts of a step

    def _report(self, event: str, **values: Any) -> None:
        """Adds an event to the history, by rank 0."""
        if self._group.rank == 0:
            self._report_event(event, **values)

    def _enter(self, phase: str) -> None:
        self._report("phase", phase=phase)

    def _total(self, total: int | None) -> int:
        total = self._job.steps if total is None else total
        if total is None:
            raise TypeError("run.steps() needs a number of steps, as the job definition has no `steps`")
        if not isinstance(total, Real) or not (0 <= total < math.inf and total == int(total)):
            raise ValueError(f"run.steps({total!r}): expected a whole number of steps, 0 or more")
        return int(total)

    def _begin(self, total: int) -> None:
        self._report("progress", step=self.step, steps=total)
        if self._begun:
            return
        self._begun = True
        if self._state.parent is not None and total < self.step:
            self._state.inexact.append(f"the loop to step {total} was already done: the code after it runs again")
        self._saver.record_resume(self._state.parent)
        self._tracking.begin(self.step)
        if self._state.parent is None:
            self._report("training", step=self.step)
        else:
            parent = {"attempt": self._state.parent[0], "step": self._state.parent[1]}
            self._report("resumed", step=self.step, parent=parent, inexact=self._state.inexact)
            if (changed := self._loader.order_changed) is not None:
                self._report("order_changed", step=self.step, **changed)

    def _start_step(self) -> None:
        if self._rng == "step":
            randomness.seed_all(next(self._seeds), self._group.device)
        self._state.gradients.begin_step()
        self._state.buffers.begin_step()
        self._optimizer_steps.begin_step()
        self._state.before.begin_step()
        self._state.per_rank.begin_step()
        self._making = Step()

    def _finish_step(self) -> None:
        if self._micro.end_step():
            self._report("whole_batches", step=self.step, samples=self._loader.share, most=self._loader.batch_size)
        made, step = self._making, self._state.step
        assert made is not None
        self._making = None
        if self._media:
            self._saver.log_media(step, self._media.take())
        self._saver.log(step, self._values.take(), made.best_before)
        self._state.step = step + 1
        if made.special:
            self._end_special(made)
        self._state.gradients.note()
        self._state.buffers.share()
        self._made += 1
        if not self._made % compiled_shapes.LOOK_STEPS:
            self._look_at_shapes()
        if self._saver.saves and self._made in COMPARED_AFTER:
            self._compare()
        self._times.end()
        if self._made == 1:
            if self._group.device.type == "cuda":
                self._report("device_memory", bytes=torch.cuda.max_memory_reserved(self._group.device))
            self._group.shorten_timeout(self._job.timeouts.step_s)
            if self._saver.saves:
                self._state.per_rank.gather()  # too large a state is refused now
            self._saver.prepare(self._content)
            self._enter("repeating" if self.step < self._saver.steps_before else "training")
        elif step + 1 == self._saver.steps_before:
            self._enter("training")

    def _compare(self) -> None:
        """Compares the ranks' states. Rank 0 waits for the others."""
        with self._times.aside():
            parts = self._state.divergence.compare(self._made, self._asked)
        if uneven := self._state.divergence.uneven:
            self._tell_uneven(explanation_of_calls(uneven))
        if parts:
            say(explanation(parts))
            self._report("diverged", step=self.step, parts=parts, explanation=explanation(parts))

    def _look_at_shapes(self, ask: bool = False) -> None:
        """``ask``: on rank 0, also what other ranks have seen."""
        shapes = self._state.shapes
        if self._saver.saves and (shapes.look() or (ask and shapes.ask())):
            said = compiled_shapes.explanation()
            say(said)
            self._report("shapes_changed", step=self.step, explanation=said)

    def _tell_uneven(self, words: str) -> None:
        """Some ranks only call ``run.every``. Where all save together, they would wait for different things."""
        if self._together and self._best_metric:
            raise RuntimeError(words)
        say(words)
        self._report("uneven_calls", step=self.step, explanation=words)

    def _end_special(self, made: Step) -> None:
        """What few steps have: an evaluation, skipped batches, the end."""
        if made.last:
            self._state.finished.append(self._goal)
        if made.skip:
            self._skip(self.step, made.skip)
        self._may_be_due |= made.evaluates and bool(self._best_metric)
        self._look_at_shapes()

    def stop_point(self) -> None:
        """See ``Context.stop_point``. An evaluation may follow, with a forward without gradients."""
        self._state.gradients.note()
        self._boundary()

    def _boundary(self) -> None:
        if self._agreement.boundary():
            self.stop(self._agreement.reason or "")

    def _gather(self) -> None:
        """Brings what each rank has for itself to rank 0. Collective."""
        self._look_at_shapes()
        with self._times.waiting(), self._optimizer_steps.behind():
            self._loader.gather()
            if self._saver.saves:
                self._state.gather(before_step=self._making is not None)
        if (near := self._state.per_rank.near_limit()) is not None:
            self._report("per_rank_grows", step=self.step, **near)

    def _commit(self) -> tuple[int | None, str | None]:
        self._gather()
        self._deadline.end()  # the save itself has no deadline
        self._heartbeat.rest()
        self._times.leave()
        committed = self._saver.commit(self.step, self._content)
        self._times.leave()  # a GPU may have been behind
        return committed

    def _save_if_due(self) -> None:
        try:
            if self._together:
                asked, self._may_be_due = self._may_be_due, False
                with self._times.waiting():
                    due = self._saver.due_together(self.step, asked)
                if not due:
                    self._saver.look()
                    return
                self._gather()
            later = not self._together and self._state.gradients.are_apart
            self._saver.save_if_due(self.step, self._content, due=self._together, later=later)
        except Superseded as error:  # Only rank 0 knows. Once all ranks have stopped, the commit tells them.
            self._agreement.request(str(error))

    def _complete(self) -> None:
        self._report("finishing", step=self.step)  # until "progress", the supervisor lets this rank save
        committed, problem = self._commit()
        if self._saver.saves and committed != self.step:
            raise CheckpointError(f"all {self.step} steps are done, but the last checkpoint was not saved: {problem}")
        self._report("progress", step=self.step, steps=self.step)
        self._enter("after_loop")

    def _content(self) -> dict[str, Any]:
        self._look_at_shapes(ask=True)
        return self._state.content(before_step=self._making is not None)

    def _over(self) -> bool:
        """Whether the loop has reached its end, in this attempt or an earlier one."""
        return self._state.step >= self._goal or self._goal in self._state.finished

    def _left(self, by: str) -> None:
        """The script left the loop, by ``break`` or an exception. Other ranks may not have, so that no collective is
        possible. A stop in an evaluation, which is an exception too, has saved."""
        if self._stopping:
            return
        stepped = self._making is not None and self._making.optimizer_stepped
        if stepped:
            self._saver.log_media(self.step, self._media.take())
            self._saver.log(self.step, self._values.take())
        self._making = None
        self._report("left_loop", step=self.step + stepped, steps=self._goal, by=by)
        self._enter("after_loop")

    def _note_optimizer_step(self, optimizer: Any) -> None:
        """An optimizer has stepped: from now on, the state is the one after the current step."""
        if self._making:
            self._making.optimizer_stepped = True
        self._micro.optimizer_steps += 1
        self._state.gradients.stepped(optimizer)
        self._state.buffers.share(optimizer)


def _farewell(step: int, reason: str, committed: int | None, problem: str | None) -> str:
    if problem is None:
        return f"stopped ({reason}) at step {step}, checkpoint {committed} committed"
    rest = f"; the run continues from step {committed}" if committed is not None else ""
    return f"stopped ({reason}) at step {step}, not saved: {problem}{rest}"
