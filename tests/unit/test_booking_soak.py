"""The judge of ``tests/soak/test_booking.py``, on the files of a recorded soak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterddp.report.booking import book
from clusterddp.report.stragglers import waits
from clusterddp.report.timeline import lanes
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import EVENT
from clusterddp.rundir.timing import read_timings
from tests.histories import view
from tests.soak.booking_judging import UNKNOWN, Soaked

RECORDED = Path(__file__).parents[1] / "soaked"


# --- the recorded soak


def recorded(events: list[dict[str, Any]]) -> Soaked:
    """The soak, with these events booked."""
    run = RunDirectory(RECORDED)
    now = events[-1]["time"] + 1000
    history = view(events)
    booking = book(history, now, "completed", None, None, waits(read_timings(run).intervals))
    time = {"seconds": booking.seconds(), "total_s": booking.total_s}
    attempts = lanes(booking, history, "completed")
    records = [tuple(json.loads(line)) for line in (RECORDED / "independent.jsonl").read_text().splitlines()]
    return Soaked({"time": time, "attempts": attempts}, records)


def test_the_recorded_soak_is_booked_as_the_recomputation_says() -> None:
    """At least 20 interruptions of at least six kinds, each with its cause on the timeline."""
    soaked = recorded(list(read_lines(RECORDED / "events.jsonl", EVENT)))
    assert soaked.wrong() == []
    assert soaked.unknown() <= UNKNOWN
    interruptions = soaked.interruptions()
    assert len(interruptions) >= 20 and len({kind for kind, *_ in interruptions}) >= 6


@pytest.mark.parametrize("lost", ["hung", "allocated", "phase", "checkpoint", "evaluated", "requeued"])
def test_a_booking_without_the_events_of_one_kind_is_found_wrong(lost: str) -> None:
    """The comparison can fail."""
    events = [event for event in read_lines(RECORDED / "events.jsonl", EVENT) if event["event"] != lost]
    assert recorded(events).wrong()
