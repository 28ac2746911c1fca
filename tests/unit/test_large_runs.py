"""Commands on long runs, and on many: what they do is in proportion to what there is to read, and little per line.

Counted in bytes and in Python instructions, of which each run executes the same number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from clusterddp.history.codec import decode
from clusterddp.history.view import RunView
from clusterddp.report.booking import book
from clusterddp.report.curves import curves, read_metrics
from clusterddp.rundir import json_lines, schemas
from clusterddp.rundir.run_directory import find_runs
from clusterddp.rundir.summary import best_saved, summarize
from tests.instructions import Instructions
from tests.runs_on_disk import BEGAN, event, of_job, recorded_run, started, steps

FEW, MANY = 500, 2000
#: Of an attempt of the history: saves, and steps from one to the next.
SAVES, APART = 18, 10


def instructions(work: Callable[[], object]) -> int:
    """Counted in a child process, as Python 3.11.2 may crash when it collects garbage after so much was traced."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with Instructions() as counted:
            counted.counting = True
            work()
            counted.counting = False
            os.write(write, str(counted.by_module.total()).encode())
            os._exit(0)  # before garbage is collected again
    os.close(write)
    with open(read, "rb") as answer:
        number = answer.read()
    os.waitpid(child, 0)
    return int(number)


def history(lines: int) -> RunView:
    return RunView(map(decode, _lines(lines)))


def _lines(lines: int) -> Iterator[dict[str, Any]]:
    """Attempts of 20 events, each of which is preempted a few steps after its last save."""
    for attempt in range(lines // (SAVES + 2)):
        begun, at = attempt * SAVES * APART, BEGAN + 100 * attempt
        yield {"time": at, **event("resumed", attempt, step=begun, parent={}, redone=3)}
        for save in range(1, SAVES + 1):
            saved = event("checkpoint", attempt, step=begun + save * APART, blocked_s=0.1, durable_s=0.2, bytes=9)
            yield {"time": at + 5 * save, **saved, "best": {"loss": 0.5}}
        yield {"time": at + 95, **event("requeued", attempt, reason="preempted", cause="preempted")}


@pytest.mark.parametrize(("what", "most"), [(best_saved, 150), (lambda history: book(history, BEGAN + 1e6), 600)])
def test_a_long_history_costs_the_same_per_event_as_a_short_one(what: Callable[[RunView], object], most: int) -> None:
    """The best checkpoint that counts, and where the time went, of thousands of attempts."""
    few, many = (instructions(partial(what, history(lines))) / lines for lines in (FEW, MANY))
    assert many < 1.05 * few
    assert many < most


def test_lines_are_read_many_at_a_time(tmp_path: Path) -> None:
    """Of a million lines of metrics a report has curves: each line may cost a few instructions."""
    run = recorded_run(tmp_path / "run", metrics=steps(range(MANY), loss=0.5, accuracy=0.9, samples=3, ok=True))
    assert instructions(lambda: list(json_lines.read_lines(run.metrics_file, schemas.METRICS))) / MANY < 150
    found = read_metrics(run)
    assert instructions(lambda: read_metrics(run)) / MANY < 350
    assert instructions(lambda: curves(found, {0: 1e9})) / MANY < 60


def test_lines_of_all_kinds_are_read_as_one_by_one(tmp_path: Path) -> None:
    """Among thousands: torn and lost ones, other keys, text, NaN, numbers that no float holds, and two objects in one
    line."""
    good = b'{"step": %d, "time": 1.0, "attempt": 0, "loss": 0.5}'
    odd = [
        b"", b"{}", b"[1, 2]", b"\0\0\0", b"not JSON", b"[" * 3000,
        b'{"step": 1, "attempt": 0}, {"step": 2, "attempt": 0}',
        b'\0\0{"step": 3, "attempt": 0, "loss": "NaN"}', b'{"step": 4, "attempt": 0, "loss": 1%s}' % (b"0" * 400),
        b'{"step": 5, "attempt": 0, "loss": "Infinity", "time": "now"}', b'{"step": 6, "attempt": 1, "loss": null}',
        b'{"step": 7, "attempt": 0, "text": "x"}', b'{"step": -1, "attempt": 0}', b"\xff\xfe", b'"', b'{"step": 8',
    ]  # fmt: skip
    lines = [line for step in range(100, 2700, 100) for line in [odd[step // 100 % len(odd)], *[good % step] * 99]]
    assert list(json_lines.parsed(lines, schemas.METRICS)) == [
        json_lines.parse(line, schemas.METRICS) for line in lines
    ]
    run = recorded_run(tmp_path / "run")
    run.metrics_file.write_bytes(b"\n".join([*lines, b'{"step": 9']))
    found = read_metrics(run)
    kept = [value for line in lines if (value := json_lines.parse(line, schemas.METRICS)[0]) is not None]
    assert found.lines == len(kept)
    assert sorted(set(found.not_finite["loss"])) == [3, 5]
    assert list(found.names) == ["loss"] and max(found.attempts[0].known("loss")[1]) == 1e300
    assert any("the last line of metrics.jsonl is incomplete" in note for note in found.notes)


def test_of_each_listed_run_only_the_ends_of_its_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is; and a run costs few instructions, so that ten thousand are listed in seconds."""
    metrics = steps(range(MANY), loss=0.5, accuracy=0.9)
    saves = [event("checkpoint", step=step, blocked_s=0.1, durable_s=0.2, bytes=9) for step in range(FEW)]
    for number in range(3):
        begun = [started(), event("training", step=0), *saves]
        recorded_run(tmp_path / f"run-{number}", begun, holder=of_job(), metrics=metrics)
    read = 0

    def counted(path: Path, file: BinaryIO, position: int, size: int) -> bytes:
        nonlocal read
        read += size
        return one(path, file, position, size)

    one = json_lines._read_at
    monkeypatch.setattr(json_lines, "_read_at", counted)
    runs = find_runs([str(tmp_path)])
    summaries = [summarize(run) for run in runs]
    assert [summary.step for summary in summaries] == [MANY] * 3
    assert read <= 3 * ((1 << 16) + (1 << 14))
    assert instructions(lambda: [summarize(run) for run in find_runs([str(tmp_path)])]) / 3 < 30_000
