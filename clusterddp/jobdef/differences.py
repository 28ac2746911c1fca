"""Which values of two job definitions differ, for messages."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping
from typing import Any

from clusterddp.jobdef.job import Job, written
from clusterddp.jobdef.secrets import without_secrets


def list_differences(recorded_job: Job, given_job: Job) -> list[str]:
    """One line per value that differs: ``nodes: 2 recorded, 4 given``."""
    recorded, given = _flat(written(recorded_job)), _flat(written(given_job))
    before, after = (_flat(written(without_secrets(job)[0])) for job in (recorded_job, given_job))
    lines = []
    for key in dict.fromkeys([*recorded, *given]):
        was, now = before.get(key), after.get(key)
        if isinstance(was, tuple) and isinstance(now, tuple) and key.startswith("args"):
            was, now = _where_they_differ(recorded[key], given[key], was, now)
        if recorded.get(key) != given.get(key):
            lines.append(f"{key}: {_shown(was)} recorded, {_shown(now)} given")
    return lines


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _where_they_differ(
    recorded: tuple[str, ...], given: tuple[str, ...], before: tuple[str, ...], after: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments that only one of two command lines has, an option with its value.

    They are returned as in ``before`` and ``after``, where secrets are masked.
    """
    mine, theirs = _options(recorded), _options(given)
    matcher = difflib.SequenceMatcher(
        None, [recorded[part] for part in mine], [given[part] for part in theirs], autojunk=False
    )
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()
    for kind, low, high, other_low, other_high in matcher.get_opcodes():
        if kind != "equal":
            only_before += tuple(word for part in mine[low:high] for word in before[part])
            only_after += tuple(word for part in theirs[other_low:other_high] for word in after[part])
    return only_before, only_after


def _options(words: tuple[str, ...]) -> list[slice]:
    """The parts of a command line: each option with its value, and each other word."""
    parts: list[slice] = []
    start = 0
    while start < len(words):
        with_value = words[start].startswith("-") and "=" not in words[start] and start + 1 < len(words)
        end = start + (2 if with_value and not words[start + 1].startswith("--") else 1)
        parts.append(slice(start, end))
        start = end
    return parts


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    text = shlex.join(value) if isinstance(value, tuple) else str(value)
    return text if text and text.isprintable() else repr(text)
