"""What the JSON objects in a run's files must hold: keys, each with a check of its value."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any


def is_count(value: Any) -> bool:
    """Whether a value is a valid step or attempt number."""
    return type(value) is int and 0 <= value < 2**63


def is_time(value: Any) -> bool:
    """Whether a value is a unix time in seconds."""
    return type(value) in (int, float) and 0 <= value < 1e11


def is_text(value: Any) -> bool:
    """Whether a value is a string."""
    return isinstance(value, str)


def optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The same check, which a missing value passes."""
    return lambda value: value is None or check(value)


#: The keys that a JSON object must have, each with a check, which gets None for a missing key.
Schema = Mapping[str, Callable[[Any], bool]]

#: A line of events.jsonl. The other keys depend on the event; those of ``result`` are chosen by the script.
EVENT: Schema = {"time": is_time, "attempt": is_count, "event": is_text, "step": optional(is_count)}
#: A line of metrics.jsonl: of a step, or with ``"event": "result"`` what the script logged outside a step.
LOGGED: Schema = {"step": is_count, "attempt": is_count}
#: A line of a step. Readers of these pass over the others.
METRICS: Schema = {**LOGGED, "event": lambda value: value is None}
RESULT: Schema = {**LOGGED, "event": lambda value: value == "result"}
#: Keys of such a line that are not metrics, and names that a value cannot have, including those of an event.
NOT_METRICS = frozenset(("step", "time", "attempt", "event"))
NOT_VALUES = NOT_METRICS | {"rank"}
#: What an attempt resumed from: the step, and the checkpoint's attempt and step.
RESUMED: Schema = {
    "step": is_count,
    "parent": optional(lambda parent: schema_error(parent, LOGGED) is None),
}


def schema_error(value: Any, schema: Schema) -> str | None:
    """What is wrong with a value that should be an object of this schema. None if it is one."""
    if not isinstance(value, dict):
        return f"expected an object, got {json.dumps(value)[:60]}"
    for key, check in schema.items():
        if not check(value.get(key)):
            return f"{key!r} is {json.dumps(value.get(key))[:60]}"
    return None
