"""What a script logs: the metrics of a step, and those behind the loop; a new best checkpoint follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from clusterddp.errors import Superseded
from clusterddp.rundir.files import finite
from clusterddp.rundir.records import NOT_VALUES
from clusterddp.training.log import values as logged
from clusterddp.training.steps.position import Position

if TYPE_CHECKING:
    from clusterddp.distributed.process_group import ProcessGroup
    from clusterddp.training.agreement import Agreement
    from clusterddp.training.heartbeat import Heartbeat
    from clusterddp.training.log.media import Media
    from clusterddp.training.saving import Saver
    from clusterddp.training.timing import StepTimes


class Logging(Position):
    """The part of ``Run`` that logs; documented there."""

    _group: ProcessGroup
    _agreement: Agreement
    _heartbeat: Heartbeat
    _saver: Saver
    _times: StepTimes
    _values: logged.Values
    _media: Media
    #: Adds an event to the history, by rank 0.
    _report: Callable[..., None]
    #: The content of a checkpoint.
    _content: Callable[[], dict[str, Any]]
    #: Whether all ranks take part in a save, because each has a state.
    _together: bool
    #: The metric of the best checkpoint; empty if there is none.
    _best_metric: str
    #: Whether the last loop is complete.
    _done = False

    def log(self, *unnamed: NoReturn, reduce: logged.Reduction | None = None, **values: Any) -> None:
        """Logs metrics of the current step to metrics.jsonl: rank 0's values, merged over the calls in a step.

        Logs the values that tensors have at the call, and never waits for a GPU. Outside a step the values are recorded
        in the history as a ``result``.

        Args:
            unnamed: nothing: a value without its name, such as a dict, is refused.
            reduce: logs one value of all ranks' values, as a float64: their "mean", "sum", "min" or "max". All ranks
                call it in the same step; a rank that does not is left out. No collective: the values travel beside
                the training.
            values: numbers, or tensors of one element, by name.

        Raises TypeError for other values and for reserved names, ValueError for more than 1 MB per step or result and
        for another ``reduce``, RuntimeError for ``reduce`` outside a step.
        """
        if unnamed:
            raise TypeError(
                "run.log() takes values by name, as in run.log(loss=loss), or from a dict, run.log(**values)"
            )
        if not NOT_VALUES.isdisjoint(values):
            taken = NOT_VALUES & values.keys()
            raise TypeError(f"run.log({', '.join(sorted(taken))}=...): the name is reserved; choose another")
        if self._making:
            self._values.add(values, reduce)
            if self._best_metric in values:
                self._log_best(values[self._best_metric], reduce)
            return
        if reduce is not None:
            raise RuntimeError("run.log(reduce=...) works in a step; outside, use ctx.all_reduce_mean() on all ranks")
        logged.Values(keeps_own=False).add(values)
        if self._group.rank == 0:
            result = {name: finite(logged.number(name, value)) for name, value in values.items()}
            self._report("result", step=self.step, **result)
            if self._done and (best := self._best_metric) in values:
                self._saver.log_best(self.step, float(logged.number(best, values[best])), self._content, last=True)

    def log_media(
        self,
        *,
        images: Mapping[str, Any] | None = None,
        histograms: Mapping[str, Any] | None = None,
        text: Mapping[str, str] | None = None,
    ) -> None:
        """Logs images, histograms and texts of the current step to media.jsonl and the run's trackers: rank 0's.

        Copies tensors at the call, and never waits for a GPU.

        Args:
            images: by name: a tensor of height x width or channels x height x width, or a numpy array of height x width
                or height x width x channels; 1, 3 or 4 channels, uint8, or floats from 0 to 1; 4 MB at most.
            histograms: by name: a tensor or numpy array of at most 10 million real numbers.
            text: by name, at most 100,000 characters.

        Raises TypeError for other values, ValueError for larger ones and for more than 64 MB in a step, RuntimeError
        outside a step.
        """
        if not self._making:
            raise RuntimeError("run.log_media() belongs to a step: call it inside the loop over run.steps()")
        if self._group.rank == 0:
            self._media.add(images, histograms, text)

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
