"""Where a run is: its step and epoch, and the places for evaluations, which follow from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from clusterddp.data.training_loader import TrainingLoader
    from clusterddp.training.state.run_state import RunState


class Step:
    """The step being made. Class attributes, which few steps change: one is made in every step."""

    optimizer_stepped = False
    #: Whether the metric of the best checkpoint that it has logged is that of the state before it.
    best_before = False
    #: Whether it has one of the following.
    special = False
    #: Whether the script was told that an evaluation is due.
    evaluates = False
    #: Whether ``finish`` made it the last one.
    last = False
    #: How many batches are skipped after it.
    skip = 0


class Position:
    """The part of ``Run`` that says where it is; documented there."""

    _state: RunState
    _loader: TrainingLoader
    #: Between two steps, and outside the loop, there is none.
    _making: Step | None
    #: How often the script has asked for a place, in this attempt.
    _asked = 0

    @property
    def step(self) -> int:
        """The number of completed steps; inside the loop, therefore, the number of the current step, from 0."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the current step takes its first sample from."""
        return self._loader.epoch(self.step)

    @property
    def end_of_epoch(self) -> bool:
        """Whether the current step takes the last sample of an epoch.

        Raises TypeError with a loader that is not ``ctx.loader()``'s.
        """
        return self._loader.ends_epoch(self.step)

    @property
    def at_start_of_epoch(self) -> bool:
        """Whether the current step is the first of an epoch: step 0, and those at which ``every(epochs=1)`` is true.
        All ranks ask in the same steps.

        Raises TypeError without a loader, RuntimeError outside a step.
        """
        return self._place(self.step == 0 or self._loader.epochs_before(self.step, 1))

    def every(self, *unnamed: NoReturn, epochs: int | None = None, steps: int | None = None) -> bool:
        """Whether so many more epochs, or steps, are complete: the place for an evaluation, at the beginning of a step.
        All ranks call it in the same steps.

        What the script does there, before the step's training, is exact wherever the run is stopped: evaluate, step a
        scheduler, change the values of ``ctx.run(progress=...)``, and ``finish``. A stop in an evaluation saves the
        state from before the step, and the next attempt repeats it. A metric that is logged there belongs to checkpoint
        ``step``. After the last step of the loop there is no such place: evaluate once more behind the loop.

        Args:
            unnamed: nothing: a number without ``epochs`` or ``steps`` is refused.
            epochs: true in the first step after each so many epochs; of another library's loader, passes over it.
            steps: true in the steps whose number is a multiple of it, except step 0.

        Raises TypeError unless one of them is given, and for epochs without a loader; ValueError for anything but a
        whole number of at least 1; RuntimeError outside a step.
        """
        if unnamed or (epochs is None) == (steps is None):
            raise TypeError("run.every() takes epochs or steps, as in run.every(epochs=1) or run.every(steps=500)")
        for name, value in (("epochs", epochs), ("steps", steps)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"run.every({name}={value!r}): expected a whole number of at least 1")
        if epochs is not None:
            return self._place(self.step > 0 and self._loader.epochs_before(self.step, epochs))
        return self._place(self.step > 0 and self.step % (steps or 1) == 0)

    def _place(self, due: bool) -> bool:
        """Keeps the state before the step, if an evaluation is due."""
        if self._making is None:
            raise RuntimeError("run.every() and run.at_start_of_epoch say where an evaluation is due: ask in the loop")
        self._asked += 1
        if due and not self._making.evaluates and not self._making.optimizer_stepped:
            self._making.evaluates = self._making.special = True
            self._state.before.keep()
            self._state.per_rank.keep()
        return due
