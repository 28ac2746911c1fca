"""How often to save: the formula, and what the history counts as an interruption."""

from __future__ import annotations

from typing import Any

import pytest

from clusterddp.training.save_interval import between_interruptions_s, interval_s
from tests.histories import view


@pytest.mark.parametrize(
    ("stall_s", "durable_s", "between_s", "seconds"),
    [
        (0.5, 1.0, 10_000.0, 100.0),  # sqrt(2 x 0.5 x 10,000)
        (2.0, 1.0, 10_000.0, 200.0),
        (0.0001, 0.1, 3600.0, 10.0),  # not more often than every 10 s
        (0.0001, 30.0, 3600.0, 60.0),  # half of the time the disk rests
        (600.0, 600.0, 1e6, 3600.0),  # an hour at most
    ],
)
def test_the_interval_balances_what_saves_and_interruptions_cost(
    stall_s: Any, durable_s: Any, between_s: Any, seconds: Any
) -> None:
    assert interval_s(stall_s, durable_s, between_s) == pytest.approx(seconds)


def test_only_interruptions_that_cost_steps_count() -> None:
    day = 86400.0
    events = [
        {"attempt": 0, "time": 0.0, "event": "started"},
        {"attempt": 0, "time": day, "event": "requeued"},
        {"attempt": 1, "time": 2 * day, "event": "resumed", "redone": 0},
        {"attempt": 1, "time": 3 * day, "event": "checkpoint"},
        {"attempt": 2, "time": 3 * day, "event": "resumed", "redone": 40},
    ]
    assert between_interruptions_s(view([]), 0.0) == day
    assert between_interruptions_s(view(events[:2]), day) == 2 * day
    assert between_interruptions_s(view(events[:4]), 3 * day) == 3 * day
    assert between_interruptions_s(view(events), 4 * day) == 2 * day
