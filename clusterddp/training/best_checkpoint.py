"""The metric of the best checkpoint, which the script logs: ``ctx.run(best=...)`` or ``checkpoint.keep``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from clusterddp.jobdef.job import Keep, best_metric
from clusterddp.reporter import say
from clusterddp.rundir.files import finite


def metric_or_part(best: Any) -> tuple[str | None, dict[str, Any]]:
    """The metric of ``ctx.run(best=...)``, or a part with that name.

    Raises TypeError for a number, which is neither.
    """
    if isinstance(best, (bool, int, float)):
        raise TypeError(
            f"run(best={best!r}): expected a metric, such as 'accuracy', or '-score' for the smallest, or a part with "
            "state_dict() and load_state_dict()"
        )
    return (best, {}) if isinstance(best, str) else (None, {"best": best})


def with_best(keep: Keep, best: str | None, warns: bool = True) -> Keep:
    """The kept checkpoints, with the script's metric, unless the job definition names one.

    Args:
        keep: of the job definition.
        best: ``accuracy``, or ``-loss`` for the smallest value: see ``jobdef/job.py``.
        warns: whether to print that the job definition takes precedence.
    """
    if best is None:
        return keep
    if (found := best_metric(best)) is None:
        raise ValueError(f"run(best={best!r}): expected a metric, such as 'accuracy', or '-score' for the smallest")
    chosen = replace(keep, best=found[0], best_is="min" if found[1] else "max")
    if keep.best is None or (keep.best, keep.best_is) == (chosen.best, chosen.best_is):
        return chosen
    if warns:
        rule = f"the best checkpoint is chosen by {keep.best_rule} of the job definition"
        say(f"{rule}, not by ctx.run(best={best!r}). Leave one of them out")
    return keep


class BestSoFar:
    """The best value of the metric so far, and the value of the state that may be saved next, on rank 0."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self.metric = keep.best
        #: The value of the state that may be saved next; None if unknown.
        self.value: float | None = None
        #: As orders (``Keep.order``): of the best checkpoint, and of the one before a save that is in progress.
        self._best = self._before = float("inf")

    @property
    def exists(self) -> bool:
        """Whether there is a best value."""
        return self._best < float("inf")

    @property
    def better(self) -> bool:
        """Whether the state that may be saved next is the best so far."""
        return self.value is not None and self._keep.order(self.value) < self._best

    def resume(self, value: float) -> None:
        """The best checkpoint of earlier attempts has this value."""
        self._best = self._before = self._keep.order(value)

    def facts(self) -> dict[str, str]:
        """The entries of the state's file: the rule, and the value if it is known."""
        if self.metric is None:
            return {}
        value = {} if self.value is None else {"metrics": json.dumps({self.metric: self.value})}
        return {"best": str(self._keep.best_rule), **value}

    def save(self) -> dict[str, Any]:
        """The state is being saved. Returns the metric and its value for the history if it is the best so far."""
        new = {str(self.metric): finite(self.value)} if self.better else {}
        self._before = self._best
        if self.value is not None:
            self._best = min(self._best, self._keep.order(self.value))
        return new

    def failed(self) -> None:
        """That state was not saved."""
        self._best = self._before
