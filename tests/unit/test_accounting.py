"""What a run's interruptions have cost, as ``status`` shows it."""

from __future__ import annotations

from typing import Any

import pytest

from clusterddp.cli.runs.accounting import cost


def event(attempt: int, time: float, name: str, **values: Any) -> dict[str, Any]:
    return {"attempt": attempt, "time": time, "event": name, **values}


PREEMPTED = [
    event(0, 100.0, "started"),
    event(0, 110.0, "training", step=0),
    event(0, 200.0, "stopping", step=90),
    event(0, 201.0, "requeued", step=90),
    event(1, 206.0, "started"),
    event(1, 210.0, "resumed", step=90, redone=0),
]


@pytest.mark.parametrize(
    ("more", "now", "words"),
    [
        ([], 300.0, "0 steps repeated, 90% of 200 s spent training".replace("200 s", "3 min")),
        ([event(1, 300.0, "completed")], 9999.0, "0 steps repeated, 90% of 3 min spent training"),
        ([event(1, 250.0, "rank_failed"), event(1, 260.0, "restarted")], 300.0, "0 steps repeated, 65% of 3 min"),
        (
            [
                event(1, 250.0, "rank_failed"),
                event(1, 251.0, "failed"),
                event(2, 260.0, "started"),
                event(2, 270.0, "resumed", redone=1),
            ],
            300.0,
            "1 step repeated, 80% of 3 min spent training",
        ),
    ],
)
def test_the_time_between_the_first_step_and_the_call_to_stop_is_training(more: Any, now: Any, words: str) -> None:
    found = cost([*PREEMPTED, *more], now)
    assert found is not None
    assert found.sentence().startswith(words)


def test_a_run_that_never_started_has_no_cost() -> None:
    assert cost([event(0, 1.0, "submitted")], 2.0) is None


def test_an_attempt_without_an_end_counts_to_its_last_event() -> None:
    """Its node died; the next attempt is training."""
    died = [event(0, 0.0, "started"), event(0, 10.0, "training"), event(0, 60.0, "checkpoint")]
    found = cost([*died, event(1, 90.0, "started"), event(1, 100.0, "resumed", redone=7)], 200.0)
    assert found is not None and (found.repeated, found.training_s, found.total_s) == (7, 150.0, 200.0)
