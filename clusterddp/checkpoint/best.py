"""The best checkpoint: by a metric that the script logs, as ``ctx.run(best=...)`` or ``checkpoint.keep`` says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from clusterddp.jobdef.job import Keep
from clusterddp.reporter import say
from clusterddp.rundir.files import finite

#: A name in which one of these occurs is not taken for a metric whose largest value is best.
_SMALLEST = re.compile(r"(^|_)(loss|error|err|perplexity|ppl|nll|mse|mae|wer|cer|fid)($|_)", re.IGNORECASE)


def with_best(keep: Keep, best: str | None, told: bool = True) -> Keep:
    """Which checkpoints are kept, with the metric that the script asks for; one in the job definition takes precedence.

    Args:
        keep: of the job definition.
        best: ``accuracy`` or ``accuracy max`` for the largest value, ``-loss`` or ``loss min`` for the smallest.
        told: whether to say that the job definition takes precedence.
    """
    if best is None:
        return keep
    match = re.fullmatch(r"(-?)([^\s-]\S*)(?: (max|min))?", best)
    if match is None or (match[1] and match[3]):
        raise ValueError(
            f"run(best={best!r}): expected a metric, such as 'accuracy', or '-loss' for the smallest value"
        )
    sign, name, wanted = match.groups()
    if not sign and not wanted and _SMALLEST.search(name):
        raise ValueError(
            f"run(best={best!r}) would keep the largest {name}: write best='-{name}' for the smallest; '{name} max' if "
            "you mean the largest"
        )
    chosen = replace(keep, best=name, best_is="min" if sign or wanted == "min" else "max")
    if keep.best is None or (keep.best, keep.best_is) == (chosen.best, chosen.best_is):
        return chosen
    if told:
        say(f"the job definition applies, best: {keep.best_rule}, rather than ctx.run(best={best!r})")
    return keep


class BestSoFar:
    """The best value of the metric so far, and the value of the state that may be saved next; known to rank 0."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self.metric = keep.best
        #: The value of the state that may be saved next; None: not known.
        self.value: float | None = None
        #: As orders (``Keep.order``): of the best checkpoint, and of the one before a save that is in progress.
        self._best = self._before = float("inf")

    @property
    def found(self) -> bool:
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
        """What the file of the state says: the rule, and the value if it is known."""
        if self.metric is None:
            return {}
        value = {} if self.value is None else {"metrics": json.dumps({self.metric: self.value})}
        return {"best": str(self._keep.best_rule), **value}

    def save(self) -> dict[str, Any]:
        """The state is being saved; returns the metric and its value for the history if it is the best so far."""
        new = {str(self.metric): finite(self.value)} if self.better else {}
        self._before = self._best
        if self.value is not None:
            self._best = min(self._best, self._keep.order(self.value))
        return new

    def failed(self) -> None:
        """That state was not saved."""
        self._best = self._before
