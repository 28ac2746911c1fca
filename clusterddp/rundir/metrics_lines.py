"""Lines of metrics.jsonl: which of them count, and their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clusterddp.history.steps import Result
from clusterddp.rundir.schemas import NOT_VALUES, is_text


def result_line(event: Result) -> dict[str, Any]:
    """What the script logged outside a step, such as an evaluation behind the loop, as a metrics line."""
    values = {name: value for name, value in event.others.items() if name not in NOT_VALUES}
    return {"step": event.step, "time": event.time, "attempt": event.attempt, **values}


_FLOATS = {text: float(text) for text in ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf")}  # the last three: 0.1


def with_floats(line: Mapping[str, Any]) -> dict[str, Any]:
    """A metrics line with floats for "NaN" and the infinities, which JSON cannot represent."""
    return {name: _FLOATS.get(value, value) if is_text(value) else value for name, value in line.items()}


def counts(first_steps: Mapping[int, int]) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a line of a step and an attempt counts: no later attempt began at its step or before."""
    return lambda line: all(line["step"] < step for later, step in first_steps.items() if later > line["attempt"])
