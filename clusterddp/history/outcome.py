"""The outcome of a run that is over, in words: outcome.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterddp.history.words import at_step
from clusterddp.reporter import in_one_line


def is_unconfirmed(outcome: Mapping[str, Any]) -> bool:
    """Whether a run completed only by an exit code 0 that may mean something else."""
    return outcome["state"] == "completed" and outcome.get("confirmed") is False


def over_already(run: object, outcome: Mapping[str, Any]) -> str:
    """The message of a command that stops because the run is over."""
    return f"{run}: already {outcome['state']}{at_step(outcome['step'])}"


def how_it_ended(outcome: Mapping[str, Any]) -> str:
    """The state of a run that is over, its step, and the reason if that says more than the state."""
    state, reason = in_one_line(outcome["state"]), in_one_line(outcome["reason"])
    ended = f"{state}{at_step(outcome['step'])}"
    if is_unconfirmed(outcome):
        return f"{ended}, {reason}"
    return f"{ended}: {reason}" if reason != state else ended
