"""Lines of metrics.jsonl: which of them count, and their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clusterddp.rundir.schemas import is_text

_FLOATS = {text: float(text) for text in ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf")}  # the last three: 0.1


def with_floats(line: Mapping[str, Any]) -> dict[str, Any]:
    """A metrics line with floats for "NaN" and the infinities, which JSON cannot represent."""
    return {name: _FLOATS.get(value, value) if is_text(value) else value for name, value in line.items()}


def counts(first_steps: Mapping[int, int]) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a line of a step and an attempt counts: no later attempt began at its step or before."""
    return lambda line: all(line["step"] < step for later, step in first_steps.items() if later > line["attempt"])
