"""The judge of ``benchmarks/soak/booking.py``, alone and on the files of a recorded soak."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import booking_truth
from benchmarks.soak.booking import UNKNOWN, Soaked
from benchmarks.soak.booking_truth import Record, seconds, spans
from clusterddp.events import sentence
from clusterddp.report.booking import book
from clusterddp.report.stragglers import waits
from clusterddp.report.timeline import lanes
from clusterddp.rundir.records import EVENT, read_lines
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.timing import read_timings

RECORDED = Path(__file__).parents[1] / "soaked"


def test_the_recomputation_shares_no_code_with_what_it_judges() -> None:
    """Nothing but the standard library."""
    tree = ast.parse(Path(booking_truth.__file__).read_text())
    names = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def rank(attempt: int, begin: float, steps: range, until: float | None = None) -> list[Record]:
    """Rank 0 from its first line: a second each until the first step, then a step per second; it saves at its end."""
    who = f"{attempt}-0"
    phases = ("importing", "rendezvous", "restoring", "importing", "first_step")
    lines: list[Record] = [(begin + at, who, what, None) for at, what in enumerate(phases)]
    lines += [(begin + 5 + number, who, "step", step) for number, step in enumerate(steps)]
    lines.append((begin + 5.1, who, "stepping", None))
    if until is not None:
        last = begin + 4 + len(steps)
        lines += [(last + 0.2, who, "saving", None), (until, who, "left", None)]
    return lines


def test_a_run_that_was_preempted_hung_and_stopped_is_added_up() -> None:
    """Attempt 0 is preempted; of attempt 1 rank 1 hangs, after it was slow; attempt 2 repeats its steps, and completes
    after the user has submitted the run again."""
    records: list[Record] = [
        (100.0, "slurm", "submitted", None),
        (103.0, "slurm", "started", 101.0),
        (103.5, "proc", "supervisor", 122.5),
        (103.6, "proc", "rank", 120.5),
        (122.0, "slurm", "requeue", None),
        *rank(0, 105.0, range(8), until=120.0),
        (117.0, "injector", "preemption", 0),
        (132.0, "slurm", "started", 129.0),
        (132.5, "proc", "supervisor", 180.0),
        (132.6, "proc", "rank", 168.0),
        *rank(1, 134.0, range(8, 18)),
        (140.0, "1-1", "slow", None),
        (143.0, "1-1", "usual", None),
        (150.0, "injector", "hang", 1),
        (185.0, "slurm", "submitted", None),
        (187.0, "slurm", "started", None),
        (187.5, "proc", "supervisor", 215.0),
        (187.6, "proc", "rank", 213.0),
        *rank(2, 190.0, range(8, 22), until=212.0),
    ]
    waiting = {"queued": 2 + 3 + 2, "held": 1 + 7, "down": 5, "launching": 2 + 2 + 2 + 12 + 3 + 3}
    starting = {"importing": 6, "rendezvous": 3, "restoring": 3, "first_step": 3.3}
    training = {"training": 6.9 + 10.9 - 3 + 4, "repeating": 8.9, "saving": 3 + 4, "hung": 18, "straggler": 3}
    assert seconds(spans(records)) == pytest.approx({**waiting, **starting, **training})


# --- the recorded soak


def recorded(events: list[dict[str, Any]]) -> Soaked:
    """The soak, with these events booked."""
    run = RunDirectory(RECORDED)
    now = events[-1]["time"] + 1000
    booking = book(events, now, "completed", None, None, waits(read_timings(run).intervals))
    time = {"seconds": booking.seconds(), "total_s": booking.total_s}
    attempts = lanes(booking, events, sentence, "completed")
    records = [tuple(json.loads(line)) for line in (RECORDED / "independent.jsonl").read_text().splitlines()]
    return Soaked({"time": time, "attempts": attempts}, records)


def wrong(soaked: Soaked) -> list[tuple[object, ...]]:
    """What is booked otherwise than the recomputation says, in categories and in causes."""
    return [one for one in [*soaked.categories(), *soaked.interruptions()] if not one[-1]]


def test_the_recorded_soak_is_booked_as_the_recomputation_says() -> None:
    """At least 20 interruptions of at least six kinds, each with its cause on the timeline."""
    soaked = recorded(list(read_lines(RECORDED / "events.jsonl", EVENT)))
    assert wrong(soaked) == []
    assert soaked.unknown() <= UNKNOWN
    interruptions = soaked.interruptions()
    assert len(interruptions) >= 20 and len({kind for kind, *_ in interruptions}) >= 6


@pytest.mark.parametrize("lost", ["hung", "allocated", "phase", "checkpoint", "evaluated", "requeued"])
def test_a_booking_without_the_events_of_one_kind_is_found_wrong(lost: str) -> None:
    """The comparison can fail."""
    events = [event for event in read_lines(RECORDED / "events.jsonl", EVENT) if event["event"] != lost]
    assert wrong(recorded(events))
