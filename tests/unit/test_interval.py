"""How often to save: the formula, and what the history counts as an interruption."""

from __future__ import annotations

from clusterddp.training.saving import between_interruptions_s


def test_only_interruptions_that_cost_steps_count() -> None:
    day = 86400.0
    events = [
        {"attempt": 0, "time": 0.0, "event": "started"},
        {"attempt": 0, "time": day, "event": "requeued"},
        {"attempt": 1, "time": 2 * day, "event": "resumed", "redone": 0},
        {"attempt": 1, "time": 3 * day, "event": "checkpoint"},
        {"attempt": 2, "time": 3 * day, "event": "resumed", "redone": 40},
    ]
    assert between_interruptions_s([], 0.0) == day
    assert between_interruptions_s(events[:2], day) == 2 * day
    assert between_interruptions_s(events[:4], 3 * day) == 3 * day
    assert between_interruptions_s(events, 4 * day) == 2 * day
