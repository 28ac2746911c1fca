"""The training loop of a run: resumes where the run stopped, saves, and stops at step boundaries.

Step s turns checkpoint s (the state after s steps) into checkpoint s + 1. Everything random in it is a function of
(seed, s, rank): which samples it takes, their augmentation, dropout. So a resumed run needs nothing but the step and
the parts' states to go on bit for bit as the uninterrupted one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, Literal, NoReturn, get_args

import torch

from clusterddp.checkpoint.gradients import Gradients
from clusterddp.checkpoint.state import Stateful, check_parts, load_state, pack, state_of
from clusterddp.data import randomness, stream
from clusterddp.data.external_loader import ExternalLoader
from clusterddp.data.microbatch import MicroBatches
from clusterddp.data.stream import Loader
from clusterddp.distributed import wrapping
from clusterddp.distributed.modules import ddp_modules
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointError, Stopped, Superseded
from clusterddp.reporter import say
from clusterddp.training import metrics
from clusterddp.training.agreement import Agreement
from clusterddp.training.compute_time import OwnTime
from clusterddp.training.divergence import Divergence, explanation
from clusterddp.training.heartbeat import Heartbeat
from clusterddp.training.saving import Saver
from clusterddp.worker import completion
from clusterddp.worker.deadline import Deadline

_REMEDY = "Give run() what the run began with, or begin a new run"
_RESERVED = {"format", "attempt", "parent", "progress"}
Randomness = Literal["step", "user"]


class Run:
    """One attempt's part of a run; ``Context.run`` makes it, and has then restored the newest checkpoint.

    Attributes:
        step: the number of finished steps; so, inside the loop, the number of the step being made, from 0.
    """

    def __init__(
        self,
        parts: dict[str, Stateful],
        loader: Loader | ExternalLoader,
        *,
        rng: Randomness,
        seed: int,
        default_steps: int | None,
        step_timeout_s: float,
        group: ProcessGroup,
        agreement: Agreement,
        saver: Saver,
        report: Callable[..., None],
        deadline: Deadline,
        heartbeat: Heartbeat,
    ) -> None:
        self._deadline, self._heartbeat = deadline, heartbeat
        if clash := _RESERVED & parts.keys():
            raise TypeError(f"{', '.join(sorted(clash))}: the checkpoint uses the name itself; give the part another")
        check_parts("run", parts)
        if rng not in get_args(Randomness):
            raise ValueError(f"run(rng={rng!r}): expected one of {', '.join(map(repr, get_args(Randomness)))}")
        self.step = 0
        self._process = os.getpid()
        self._parts, self._loader, self._rng, self._seed = parts, loader, rng, seed
        self._default_steps, self._step_timeout_s = default_steps, step_timeout_s
        self._group, self._agreement, self._saver, self._report = group, agreement, saver, report
        self._values = metrics.Values()
        self._parent: tuple[int, int] | None = None
        self._goal = 0  # of the loop that is being made
        self._finished: list[int] = []  # the goals of loops that ``finish`` has ended
        self._inexact: list[str] = []
        self._own_time = OwnTime(parts.values())
        self._micro = MicroBatches(parts.values(), loader)
        self._begun = self._in_step = self._optimizer_stepped = self._past_first = self._last_step = False
        self._stopping = self._cut = False
        self._gradients = Gradients(parts, group.world_size)
        self._divergence = Divergence(parts, group)
        self._buffers = wrapping.Buffers(parts.values())
        self._watch_optimizer()
        #: Optimizers with parameters that no part saves.
        self._partly_saved: list[str] = []
        if group.rank == 0:
            _, tensors = pack({name: state_of(part) for name, part in parts.items()})  # refuses what cannot be saved
            self._partly_saved = _with_unsaved_parameters(parts, tensors)
        self._restore()

    @property
    def epoch(self) -> int:
        """The epoch that the step being made takes its first sample from."""
        return self._loader.epoch(self.step)

    @property
    def end_of_epoch(self) -> bool:
        """Whether the step being made takes the last sample of an epoch."""
        return self._loader.ends_epoch(self.step)

    def steps(self, total: int | None = None) -> Iterator[Any]:
        """Yields the batch of each step from where the run stands to ``total`` (None: the job's ``steps``).

        Raises Stopped, on all ranks at the same step, when the run is told to stop: the state is saved by then. Falls
        through once all steps are done, or ``finish`` was called, and the last checkpoint is committed; at once if that
        was so before.

        A ``for`` statement that is left by ``break`` ends the loop, and the watchdog with it, and saves nothing. Where
        the script holds the iterator itself, that cannot be told from a long step: ``close()`` it, or use
        ``Context.unwatched``.
        """
        return self._steps(self._total(total))

    def _steps(self, total: int) -> Iterator[Any]:
        self._begin(total)
        self._goal = total
        if self._over():
            return
        loop = completion.begin(lambda: self.step, total)
        self._heartbeat.begin()
        self._boundary()
        batches = self._loader.batches(self.step)
        try:
            while not self._over():
                batch = next(batches)
                self._start_step()
                yield batch
                self._finish_step()
                self._boundary()
                if not self._over():
                    with self._heartbeat.pause():  # a save before this one may be waited for, on a slow disk
                        self._save_if_due()
        except GeneratorExit:
            if os.getpid() == self._process:  # not a child that was forked in a step, and exits
                loop.leave()
                self._left()
            raise
        finally:
            self._heartbeat.rest()
            batches.close()  # type: ignore[attr-defined]
        self._complete()
        completion.complete()

    def epochs(self, count: float) -> Iterator[Any]:
        """``steps`` for ``count`` passes over the dataset; the last step's tail is filled from the next epoch."""
        if not isinstance(count, Real) or not 0 <= count < math.inf:
            raise ValueError(f"run.epochs({count!r}): expected a number of epochs, 0 or more")
        return self.steps(math.ceil(self._loader.steps_in(count)))

    def micro(self, batch: Any) -> Iterator[Any]:
        """Yields the step's batch in pieces of at most the loader's ``batch_size`` samples; one, as long as it fits.

        The loop's body is forward and ``loss.backward()`` with the mean over the piece. After the loop the gradients
        are those of the mean over the global batch, as they would be in one piece, on any number of ranks. They are
        zeroed and the optimizer steps outside the loop, once per loop; the loop is left at its end only.

        ``batch``: a tensor, or a nest of tuples, lists and dicts of tensors and lists, samples first.
        """
        return self._micro.pieces(batch)

    def log(self, **values: Any) -> None:
        """Numbers, or tensors of one element, of the step being made; calls in a step are merged. Rank 0's count.

        Outside a step they go into the history as a ``result``. TypeError for anything else, ValueError for more than
        1 MB in a step or a result.
        """
        if taken := {"step", "time", "attempt", "event", "rank"} & values.keys():
            raise TypeError(
                f"run.log({', '.join(sorted(taken))}=...): the history uses the name itself; give it another"
            )
        if self._in_step:
            self._values.add(values)
            return
        metrics.Values().add(values)
        if self._group.rank == 0:
            result = {name: metrics.plain(name, value) for name, value in values.items()}
            self._report("result", step=self.step, **result)

    def finish(self) -> None:
        """Makes the step being made the loop's last one: early stopping. All ranks call it in the same step.

        The loop ends after it as it does after ``total`` steps, with a checkpoint, and so it does in a resumed run.
        RuntimeError outside a step.
        """
        if not self._in_step:
            raise RuntimeError("run.finish() makes a step the last one: call it in the loop over run.steps()")
        self._last_step = True

    def stop(self, reason: str) -> NoReturn:
        """Saves and raises Stopped. All ranks call it at the same point, having agreed to (``Context.stop_requested``).

        Called from inside a step, it saves the state after that step if the optimizer has stepped, else before it.
        """
        self._stopping = True
        if self._optimizer_stepped:
            self._cut = True
            self._finish_step()
        if self._group.rank == 0:
            self._report("stopping", step=self.step, reason=reason)
        committed, problem = self._commit()
        stream.close_workers()
        if self._group.rank == 0:
            say(_farewell(self.step, reason, committed, problem))
        raise Stopped(committed, reason)

    # --- the parts of a step

    def _total(self, total: int | None) -> int:
        total = self._default_steps if total is None else total
        if total is None:
            raise TypeError("run.steps() needs a number of steps: the job definition has no `steps`")
        if not isinstance(total, Real) or not (0 <= total < math.inf and total == int(total)):
            raise ValueError(f"run.steps({total!r}): expected a whole number of steps, 0 or more")
        return int(total)

    def _begin(self, total: int) -> None:
        if self._group.rank == 0:
            self._report("progress", step=self.step, steps=total)
        if self._begun:
            return
        self._begun = True
        if self._parent is not None and total < self.step:
            self._inexact.append(f"the loop to step {total} was over: what the script does behind it is done again")
        self._saver.record_resume(self._parent)
        if self._group.rank != 0:
            return
        if self._parent is None:
            self._report("training", step=self.step)
        else:
            parent = {"attempt": self._parent[0], "step": self._parent[1]}
            self._report("resumed", step=self.step, parent=parent, inexact=self._inexact)

    def _start_step(self) -> None:
        if self._rng == "step":
            seed = randomness.hash32("step", self._seed, self.step, self._group.rank)
            randomness.seed_all(seed, self._group.device)
        self._gradients.begin_step()
        self._in_step, self._optimizer_stepped, self._last_step = True, False, False

    def _finish_step(self) -> None:
        self._check_micro()
        self._saver.log(self.step, self._values.take())
        self.step += 1
        if self._last_step:
            self._finished.append(self._goal)
        self._in_step = self._optimizer_stepped = self._last_step = False
        self._gradients.note()
        self._buffers.share()
        self._compare_ranks()
        self._heartbeat.pace = self._own_time.step_done() or self._heartbeat.pace
        if not self._past_first:
            self._past_first = True
            self._group.shorten_timeout(self._step_timeout_s)
            self._saver.prepare(self._content)

    def evaluating(self) -> None:
        """An evaluation begins, or is at its next batch: a forward without gradients may follow."""
        self._gradients.note()

    def _compare_ranks(self) -> None:
        if self._saver.saves and (parts := self._divergence.compare()):
            say(explanation(parts))
            self._report("diverged", step=self.step, parts=parts, explanation=explanation(parts))

    def _check_micro(self) -> None:
        whole = self._micro.end_step()
        if whole and self._group.rank == 0:
            self._report("whole_batches", step=self.step, samples=self._loader.share, most=self._loader.batch_size)

    def _boundary(self) -> None:
        if self._agreement.boundary():
            self.stop(self._agreement.reason or "")

    def _commit(self) -> tuple[int | None, str | None]:
        self._loader.gather()
        self._deadline.end()  # from here on the save takes as long as it may
        self._heartbeat.rest()
        return self._saver.commit(self.step, self._content)

    def _save_if_due(self) -> None:
        try:
            if not self._loader.together:
                self._saver.save_if_due(self.step, self._content)
            elif self._saver.due_together(self.step):
                self._loader.gather()
                self._saver.save(self.step, self._content)
        except Superseded as error:  # Rank 0 alone knows. When all have stopped, the commit tells all.
            self._agreement.request(str(error))

    def _complete(self) -> None:
        if self._group.rank == 0:
            self._report("finishing", step=self.step)  # until "progress", the supervisor lets this rank save
        committed, problem = self._commit()
        if self._saver.saves and committed != self.step:
            raise CheckpointError(f"all {self.step} steps are done, but the last checkpoint was not written: {problem}")
        if self._group.rank == 0:
            self._report("progress", step=self.step, steps=self.step)

    def _over(self) -> bool:
        """Whether the loop has come to its end, in this attempt or before."""
        return self.step >= self._goal or self._goal in self._finished

    def _left(self) -> None:
        """The script has left the loop, by ``break`` or an exception; other ranks may not have, so that nothing can be
        done together. A stop in an evaluation, which is an exception too, has saved."""
        if self._stopping:
            return
        made = self.step + self._optimizer_stepped
        if self._optimizer_stepped:
            self._saver.log(self.step, self._values.take())
        self._in_step = False
        if self._group.rank == 0:
            self._report("left_loop", step=made, steps=self._goal)

    def _watch_optimizer(self) -> None:
        """Notes when the optimizer steps: from then on, the state is that after the step being made.

        So it is when a GradScaler has skipped the optimizer's step for an overflow, and has updated its scale.
        """

        def note(optimizer: torch.optim.Optimizer | None = None, *_: Any) -> None:
            self._optimizer_stepped = self._in_step
            self._gradients.stepped(optimizer)
            self._buffers.share(optimizer)

        for part in self._parts.values():
            if isinstance(part, torch.optim.Optimizer):
                part.register_step_post_hook(note)
            elif isinstance(part, torch.amp.GradScaler):
                part.update = _then(part.update, note)  # type: ignore[method-assign]

    # --- the state

    def _content(self) -> dict[str, Any]:
        parent = None if self._parent is None else {"attempt": self._parent[0], "step": self._parent[1]}
        progress = {
            "step": self.step,
            **self._loader.progress(self.step),
            "world_size": self._group.world_size,
            "seed": self._seed,
            "finished": self._finished,
            "cut": self._cut,
            "diverged": sorted(self._divergence.parts),
            **self._gradients.progress(before_step=self._in_step),
        }
        states = {name: state_of(part) for name, part in self._parts.items()}
        return {"parent": parent, "progress": progress, **states}

    def _restore(self) -> None:
        found = self._saver.restore()
        if found is None:
            return
        content, attempt, step = found
        self._check_parts(set(content) - _RESERVED)
        progress = content["progress"]
        if progress["seed"] != self._seed:
            raise CheckpointError(f"the run began with seed {progress['seed']}, and the seed is now {self._seed}")
        self._loader.restore(progress)
        self._inexact = self._reasons_for_doubt()
        if progress["world_size"] != self._group.world_size:
            self._inexact.append(f"{self._group.world_size} ranks instead of {progress['world_size']}")
        for name, part in self._parts.items():
            try:
                load_state(part, content[name])
            except (ValueError, RuntimeError, KeyError) as error:
                raise CheckpointError(f"{name} does not take the checkpoint's state: {error}. {_REMEDY}") from error
        self._inexact += self._gradients.restore(progress)
        self._divergence.parts = set(progress.get("diverged", []))
        self._inexact += [f"{name} differed between ranks, all have rank 0's" for name in progress.get("diverged", [])]
        if progress.get("cut"):
            self._inexact.append(f"step {step - 1} was left in an evaluation: what comes after that in it was left out")
        self.step, self._parent, self._finished = step, (attempt, step), list(progress.get("finished", []))

    def _check_parts(self, saved: set[str]) -> None:
        if missing := self._parts.keys() - saved:
            raise CheckpointError(f"the checkpoint has no {_listed(missing)}; it has {_listed(saved)}. {_REMEDY}")
        if extra := saved - self._parts.keys():
            raise CheckpointError(f"the checkpoint also has {_listed(extra)}, which run() was not given. {_REMEDY}")

    def _reasons_for_doubt(self) -> list[str]:
        """Why a resumed run may differ from the uninterrupted one in its last bits, or more."""
        reasons = [*(["rng='user'"] if self._rng == "user" else []), *self._loader.doubts]
        reasons += [f"{name} has parameters that no part saves" for name in self._partly_saved]
        for name, part in self._parts.items():
            for module in ddp_modules(part):
                if not module.broadcast_buffers and next(module.buffers(), None) is not None:
                    reasons.append(f"{name} has buffers of its own on each rank (broadcast_buffers=False)")
                if self._group.world_size > 2 and (doubt := wrapping.doubt(module)):
                    reasons.append(f"{name} {doubt}")
        return reasons


def _then(first: Callable[..., None], second: Callable[[], None]) -> Callable[..., None]:
    """Both, one after the other; the arguments are the first one's."""

    def both(*values: Any, **options: Any) -> None:
        first(*values, **options)
        second()

    return both


def _with_unsaved_parameters(parts: Mapping[str, Stateful], saved: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the optimizers that train a parameter, of a loss module say, which is in no part's state."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in saved.values()}
    found = []
    for name, part in parts.items():
        groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else []
        parameters = [parameter for group in groups for parameter in group["params"]]
        unsaved = sum(parameter.untyped_storage().data_ptr() not in storages for parameter in parameters)
        if unsaved:
            found.append(name)
            words = f"{unsaved} of {name}'s {len(parameters)} parameters are in no part of ctx.run() and are not saved"
            remedy = "give it the module that has them too, as in ctx.run(criterion=criterion, ...)"
            say(f"{words}: {remedy}")
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _farewell(step: int, reason: str, committed: int | None, problem: str | None) -> str:
    if problem is None:
        return f"stopped ({reason}) at step {step}, checkpoint {committed} committed"
    rest = f"; the run goes on from step {committed}" if committed is not None else ""
    return f"stopped ({reason}) at step {step}, not saved: {problem}{rest}"
