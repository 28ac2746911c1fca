"""A run's summary: from the ends of few files, whatever is in them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import SWEEP_FILE
from clusterddp.rundir.summary import summarize
from tests.histories import whole
from tests.runs_on_disk import BEGAN, event, jobs_of, of_job, recorded_run, started, steps, write_lines

HISTORY = [
    event("submitted", job="41", submitted=BEGAN),
    started(0),
    event("progress", step=0, steps=500, rank=0),
    event("training", step=0),
    event("checkpoint", step=100, blocked_s=0.1, durable_s=0.2, bytes=9),
    event("requeued", reason="preempted", cause="preempted", step=101, checkpoint=100, window_s=1.0),
    started(1),
    event("resumed", 1, step=100, parent={}, inexact=[]),
]


def test_a_summary_says_what_a_run_has_done(tmp_path: Path) -> None:
    """Steps, attempts and why they ended, the last save, the job and its nodes."""
    lines = [*steps(range(101), loss=0.5), *steps(range(100, 121), attempt=1, loss=0.25)]
    run = recorded_run(tmp_path / "net-0", HISTORY, metrics=lines, holder=of_job())
    found = summarize(run)
    assert (found.step, found.steps, found.attempts, found.ends) == (121, 500, 2, ("preempted",))
    assert found.metrics["loss"] == 0.25
    assert found.saved is not None and found.saved.step == 100
    assert (found.job_id, found.nodes, found.local, found.begun) == ("41", "n[1-2]", False, True)
    assert found.started == BEGAN
    assert found.seconds_per_step == pytest.approx(0.5)
    assert found.left_s == pytest.approx(0.5 * (500 - 121))


def test_a_step_that_was_seen_counts_before_its_time_is_recorded(tmp_path: Path) -> None:
    """Of a script whose steps have no numbers. Those of an earlier attempt do not count."""
    seen = [event("steps_seen", rank=0), event("not_read", 1, rank=0, file="a.pt", redone=7)]
    assert summarize(recorded_run(tmp_path / "a", [started(0), seen[0]])).made == 1
    found = summarize(recorded_run(tmp_path / "b", [started(0), seen[0], started(1), seen[1]]))
    assert (found.made, found.redone) == (None, 7)
    read = event("own_checkpoint_read", 1, rank=0, file="a.pt")
    assert summarize(recorded_run(tmp_path / "c", [started(0), seen[0], started(1), seen[1], read])).redone is None


def test_lines_of_steps_that_are_repeated_do_not_count(tmp_path: Path) -> None:
    """The second attempt resumed at 100 and has not made a step: 100 of the 151 steps count."""
    found = summarize(recorded_run(tmp_path / "net-0", HISTORY, metrics=steps(range(151), loss=0.5)))
    assert (found.step, found.metrics["step"]) == (100, 99)


def test_a_long_pause_does_not_change_the_speed(tmp_path: Path) -> None:
    """An evaluation of an hour, in the middle of the newest steps."""
    lines = steps(range(120), pace_s=2.0)
    for line in lines[90:]:
        line["time"] += 3600
    found = summarize(recorded_run(tmp_path / "net-0", HISTORY[:4], metrics=lines))
    assert found.seconds_per_step == pytest.approx(2.0)


def test_the_ends_of_a_long_history_are_enough(tmp_path: Path) -> None:
    """The number of steps is at its beginning, the newest attempt at its end; the number of attempts follows, also of
    those in between."""
    saves = [
        event("checkpoint", step // 1000, step=step, blocked_s=0.1, durable_s=0.2, bytes=9) for step in range(4000)
    ]
    history = [*HISTORY[:4], *saves, {**HISTORY[5], "attempt": 3}, started(4)]
    run = recorded_run(tmp_path / "net-0", history)
    assert run.events_file.stat().st_size > 10 * (1 << 15)
    found = summarize(run)
    assert (found.steps, found.attempts, found.ends) == (500, 5, ("preempted",))
    assert found.saved is not None and found.saved.step == 3999


def test_a_metric_that_few_steps_log_is_found_in_earlier_lines(tmp_path: Path) -> None:
    """If it is asked for. What the script logs after its last step counts, too."""
    lines = steps(range(300), loss=0.5)
    lines[200]["accuracy"] = 0.9
    lines[250]["nan"] = "NaN"
    run = recorded_run(tmp_path / "net-0", HISTORY[:4], metrics=lines)
    assert "accuracy" not in summarize(run).metrics
    found = summarize(run, ["accuracy", "nan", "never"]).metrics
    assert found["accuracy"] == 0.9 and found["step"] == 299 and math.isnan(found["nan"]) and "never" not in found
    write_lines(run.events_file, [{**event("result", step=300, rank=0, test=0.8), "time": BEGAN + 1e6}])
    assert summarize(run).metrics["test"] == 0.8


def test_a_run_without_any_record_is_one_that_has_not_started(tmp_path: Path) -> None:
    """Submitted, and waiting for its first start: the time is that of its job definition."""
    run = recorded_run(tmp_path / "net-0", submitted=of_job("7"))
    found = summarize(run)
    assert (found.step, found.steps, found.attempts, found.job_id, found.begun) == (None, None, 0, "7", False)
    assert found.started == found.updated == run.job_file.stat().st_mtime


def test_the_jobs_that_may_train_a_run_are_named_the_newest_first(tmp_path: Path) -> None:
    """A resubmitted job, and the one before it; not one that has let go, or of a copied directory."""
    run = recorded_run(tmp_path / "net-0", HISTORY, submitted=of_job("42"), holder=of_job("41"))
    assert jobs_of(summarize(run).claims) == ["42", "41"]
    record = json.loads(run.holder_file(1).read_text())
    run.holder_file(1).write_text(json.dumps({**record, "let_go": True}))
    assert summarize(run).released is None
    run.submitted_file.write_text(json.dumps({**record, "run": {"path": "/elsewhere", "inode": 1}}))
    found = summarize(run)
    assert found.claims == () and found.released is not None and found.released.job == "41"


def test_a_damaged_record_is_reported_and_nothing_else_is_lost(tmp_path: Path) -> None:
    """One run must not hide the others."""
    run = recorded_run(tmp_path / "net-0", HISTORY, metrics=steps(range(10)), outcome={"state": "completed"})
    run.outcome_file.write_text("{")
    found = summarize(run)
    assert found.error is not None and "outcome.json is not JSON" in found.error
    assert found.attempts == 2
    line = json.dumps(whole({"time": 1, "attempt": 0, "event": "started"})).encode()
    run.events_file.write_bytes(b'\0\0{"event": "started"}\n[]\n' + line + b"\ntorn")
    assert summarize(run).attempts == 1


def test_a_member_of_a_sweep_has_its_name(tmp_path: Path) -> None:
    """Its folder's name alone says only the values."""
    run = recorded_run(tmp_path / "lr" / "lr=0.1")
    assert (summarize(run).name, summarize(run).sweep) == ("lr=0.1", None)
    (tmp_path / "lr" / SWEEP_FILE).touch()
    assert (summarize(run).name, summarize(run).sweep) == ("lr/lr=0.1", "lr")
