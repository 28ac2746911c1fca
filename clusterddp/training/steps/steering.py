"""Batches that a run skips, as its script or its user wants: all ranks do, between the same two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from clusterddp.training.steps.position import Position

if TYPE_CHECKING:
    from clusterddp.training.agreement import Agreement
    from clusterddp.training.saving import Saver


class Steering(Position):
    """The part of ``Run`` that skips batches; documented there."""

    _agreement: Agreement
    _saver: Saver
    #: Adds an event to the history, by rank 0.
    _report: Callable[..., None]
    #: Whether a loop is being made.
    _in_loop = False
    #: Whether all ranks know that rank 0 may want to save after this step.
    _may_be_due = False

    def skip(self, steps: int) -> None:
        """Skips the batches of the next ``steps`` steps, after a spike of the loss. All ranks call it in the same step.

        The next step takes its batch from that much further on in the data. The number of steps of the run stays the
        same, as do schedules that count steps. The history and the checkpoints record it: a resumed run does not skip
        again, on any number of ranks. Another library's loader has to hand the batches out.

        Args:
            steps: how many global batches.

        Raises RuntimeError outside a step and without a loader, ValueError for anything but a whole number from 1 on.
        """
        if not self._making:
            raise RuntimeError("run.skip() skips what follows a step: call it inside the loop over run.steps()")
        if why := self._loader.why_not_skip(steps):
            raise (ValueError if self._loader.can_skip else RuntimeError)(f"run.skip({steps!r}): {why}")
        self._making.skip += steps
        self._making.special = True

    def _request_skip(self, request: str, batches: int) -> str | None:
        """The user's request, on rank 0 in another thread; why it is refused, if so."""
        why = self._loader.why_not_skip(batches)
        if why is None and not self._in_loop:
            why = "the script is not in its loop over run.steps()"
        if why is None:
            self._agreement.request_skip(batches, request)
        return why

    def _on_skip(self, batches: int, request: str) -> None:
        """The user's request, on all ranks at the same boundary; what it has changed is saved soon."""
        self._skip(self.step + (self._making is not None), batches, request=request)
        self._saver.request()

    def _skip(self, step: int, batches: int, **named: str) -> None:
        self._loader.skip(step, batches)
        self._may_be_due = True
        epoch = self._loader.epoch_steps
        more = {"epoch_steps": epoch} if epoch is not None and batches > epoch else {}
        self._report("skipped", step=step, batches=batches, batch=self._loader.batch(step), **named, **more)
