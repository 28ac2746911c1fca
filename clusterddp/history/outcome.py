"""The outcome of a run that is over: outcome.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clusterddp.codec import Count
from clusterddp.history.ends import Cancelled, Completed, Failed
from clusterddp.history.words import at_step
from clusterddp.reporter import in_one_line


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    ``state``: the name of a ``RunEnd``, or a name that only another version of clusterddp knows. ``step``: None if the
    script recorded none. ``attempts``: how many attempts started their ranks. ``confirmed``: False if all that speaks
    for a completion is exit code 0, which may mean something else.
    """

    state: str
    reason: str
    step: Count | None = None
    attempts: Count | None = None
    confirmed: bool | None = None

    @property
    def completed(self) -> bool:
        """Whether the run completed, confirmed or not."""
        return self.state == Completed.name

    @property
    def unconfirmed(self) -> bool:
        """Whether the run completed, but this is not confirmed."""
        return self.completed and self.confirmed is False

    @property
    def failed(self) -> bool:
        """Whether the run failed."""
        return self.state == Failed.name

    @property
    def cancelled(self) -> bool:
        """Whether the run was cancelled."""
        return self.state == Cancelled.name


def in_file(outcome: Outcome) -> dict[str, Any]:
    """The outcome as in its file."""
    always = {"state": outcome.state, "step": outcome.step, "attempts": outcome.attempts, "reason": outcome.reason}
    return always if outcome.confirmed is None else {**always, "confirmed": outcome.confirmed}


def over_already(run: object, outcome: Outcome) -> str:
    """The message of a command that stops because the run is over."""
    return f"{run}: already {outcome.state}{at_step(outcome.step)}"


def how_it_ended(outcome: Outcome) -> str:
    """The state of a run that is over, its step, and the reason if that says more than the state."""
    state, reason = in_one_line(outcome.state), in_one_line(outcome.reason)
    ended = f"{state}{at_step(outcome.step)}"
    if outcome.unconfirmed:
        return f"{ended}, {reason}"
    return f"{ended}: {reason}" if reason != state else ended
