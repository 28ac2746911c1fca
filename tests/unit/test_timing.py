"""``timing.jsonl``: what is written of the ranks' totals, how large it gets, and what is read of a damaged file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.timing import PARTS, PHASES, TimingFile, TimingLines, interval_s, read_timings
from tests.reports import beat_of
from tests.timings import BEGAN, timing_lines, write_timings

HOSTS = ["n1", "n1", "n2", "n2"]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_an_interval_has_what_the_totals_of_each_rank_have_grown_by(run: RunDirectory) -> None:
    """Rank 1 does not know how long it waits, rank 2 has not reported, rank 3 repeats what it said. An interval ends
    with the newest steps in the totals, which may be older than the heartbeat."""
    timing = TimingLines(3, 4, began=1000.0)
    timing.update(3, beat_of({"count": 9}), 1000.0)
    timing.update(0, beat_of({"timing": [10, 1.0, 2.0, 1.0, 0.5], "timing_age_s": 0.5}), 1005.0)
    assert not timing.due(1009.9)
    assert timing.due(1010.0)
    timing.update(1, beat_of({"timing": [10, 1.0, None, None, 0.5]}), 1006.0)
    timing.update(3, beat_of({"timing": [8, 0.5, 3.0, 0.1, 0.0], "timing_age_s": 2.0}), 1009.0)
    write_timings(run, timing.interval(1010.0, HOSTS))
    timing.update(0, beat_of({"timing": [30, 1.5, 8.0, 1.5, 0.5], "timing_age_s": 1.0}), 1018.0)
    write_timings(run, timing.interval(1020.0, HOSTS))
    read = read_timings(run)
    first, second = read.intervals
    assert (first.attempt, first.begin, first.end, first.hosts) == (3, 1000.0, 1007.0, tuple(HOSTS))
    assert (first.steps, first.seconds["own_s"]) == ((10, 10, None, 8), (2.0, None, None, 3.0))
    assert (second.begin, second.end) == (1007.0, 1017.0)
    assert (second.steps, second.seconds["own_s"]) == ((20, 0, None, 0), (6.0, None, None, 0.0))


def test_while_no_step_ends_an_interval_is_not_due_with_each_heartbeat(run: RunDirectory) -> None:
    timing = TimingLines(0, 1, began=0.0)
    timing.update(0, beat_of({"timing": [10, 1.0, 2.0, 1.0, 0.5], "timing_age_s": 0.0}), 5.0)
    timing.interval(15.0, ["n1"])
    timing.update(0, beat_of({"timing": [10, 1.0, 2.0, 1.0, 0.5], "timing_age_s": 10.0}), 15.0)
    assert not timing.due(16.0)


def test_an_attempt_that_ends_before_its_first_step_leaves_nothing(run: RunDirectory) -> None:
    timing = TimingLines(0, 1, began=0.0)
    timing.update(0, beat_of({"timing": [0, 0.0, None, None, 0.0]}), 5.0)
    assert not timing.due(1e9)
    assert timing.interval(20.0, ["n1"]) == []
    assert read_timings(run).intervals == ()


def test_the_file_of_a_week_with_many_attempts_stays_small() -> None:
    """64 ranks and 50 attempts: 3 MB. The intervals of 4,096 ranks are longer."""
    now, week, lines = 0.0, 7 * 86400.0, 0
    while now < week:
        now += interval_s(now, 64)
        lines += 1
    hosts = [f"node{rank // 8:03}" for rank in range(64)]
    simulated = timing_lines(hosts, 90_000.0, beat_s=900.0)
    interval = len(json.dumps(simulated[-1]))
    begins = len(json.dumps(simulated[0]))
    assert lines * interval + 50 * (begins + interval) < 3e6
    assert week / PARTS == interval_s(week, 64) < interval_s(week, 4096)


def test_torn_foreign_and_unknown_lines_are_skipped(run: RunDirectory) -> None:
    """Without the line of the hosts, the ranks' hosts are unknown."""
    lines = timing_lines(HOSTS, 60.0)
    one = lines[1]
    wrong = [
        {**one, "steps": [1, 2]},
        {**one, "steps": "many"},
        {**one, "own_s": [1, 2, 3, "4"]},
        {**one, "end": one["begin"] - 1},
        {name: value for name, value in one.items() if name != "wait_s"},
        {"attempt": 0, "later": "version"},
        {"attempt": 0, "hosts": [1, 2]},
    ]
    text = "\n".join(map(json.dumps, [*wrong, one, {**one, "attempt": 1}])) + '\nno json\n{"attempt": 0, "beg'
    run.timing_file.write_text(text)
    read = read_timings(run)
    assert [(interval.attempt, interval.hosts) for interval in read.intervals] == [(0, ()), (1, ())]
    assert read.skipped == 7
    write_timings(run, timing_lines(HOSTS, 60.0, attempt=2, begin=BEGAN + 100))  # after the torn line
    assert read_timings(run).intervals[-1].hosts == tuple(HOSTS)


def test_a_full_disk_is_reported_once_and_a_superseded_attempt_writes_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file, lines = TimingFile(run), timing_lines(HOSTS, 60.0)
    with monkeypatch.context() as full:
        full.setattr("clusterddp.rundir.timing.append_line", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
        file.append(lines)
        file.append(lines)
    assert capfd.readouterr().err.count("could not write timing.jsonl (No space)") == 1
    file.append(lines)
    assert len(read_timings(run).intervals) == len(lines) - 1
    file.close()
    file.append(lines)
    assert len(read_timings(run).intervals) == len(lines) - 1


def interval(begin: float, end: float, own_s: list[object]) -> dict[str, object]:
    """A line of ten steps. Other phases than ``own_s`` are unknown."""
    unknown = {phase: [None] * len(own_s) for phase in PHASES}
    times = {"begin": BEGAN + begin, "end": BEGAN + end}
    return {"attempt": 0, **times, "steps": [10] * len(own_s), **unknown, "own_s": own_s}


@pytest.mark.parametrize(
    "line",
    [
        interval(9, 0, [0.1]),
        interval(0, 9, [0.1]) | {"own_s": [1, 2]},
        interval(0, 9, [0.1]) | {"own_s": [float("nan")]},
        interval(0, 9, [0.1]) | {"own_s": ["1"]},
        interval(0, 9, [0.1]) | {"steps": [-1]},
        {"attempt": 0, "begin": 5, "steps": [1]},
        {"attempt": 0, "hosts": [1]},
        {"hosts": ["n1"]},
        [],
    ],
)
def test_a_line_of_another_program_is_left_out_and_counted(run: RunDirectory, line: object) -> None:
    """The lines around it are read."""
    good = json.dumps(interval(0, 9, [0.1, 0.1]))
    run.timing_file.write_text(f'{good}\n{json.dumps(line)}\n{{"attempt": 0, "news": 1}}\n{good}\n{good[:-9]}')
    found = read_timings(run)
    assert found.skipped == 1
    assert len(found.intervals) == 2
