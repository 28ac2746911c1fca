"""When the commands that wait for runs ask the controller."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp.errors import SlurmUnavailable
from clusterddp.rundir.files import append_line
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import polling
from clusterddp.slurm.polling import QUIET_S, SILENT_AFTER_S, SILENT_S, Activity, Pace, PacedQueue, shared_jobs
from tests.fake_slurm import FakeSlurm
from tests.histories import happened

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


class Clock:
    """Both clocks."""

    now = 1000.0
    #: How far the other one is ahead.
    wall_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + self.wall_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(polling.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(polling.time, "time", clock.time)
    monkeypatch.setattr(polling.random, "uniform", lambda least, most: most)
    return clock


def asked_in(clock: Clock, seconds: float, seen: Callable[[], object], most_s: float = QUIET_S) -> int:
    """How often a command that looks every second asks."""
    one, count, end = Pace(), 0, clock.now + seconds
    while clock.now < end:
        if one.due(seen()):
            count += 1
            one.asked(most_s)
        clock.now += 1
    return count


def test_a_run_that_trains_for_an_hour_is_asked_about_at_most_twenty_times(clock: Clock) -> None:
    """With the 50 questions of its supervisor, that is the budget of 70."""
    assert 12 <= asked_in(clock, 3600, lambda: "running") <= 20


def test_a_change_is_asked_about_at_once_but_not_more_than_once_a_second(clock: Clock) -> None:
    one = Pace()
    for _ in range(12):
        while not one.due("running"):
            clock.now += 1
        one.asked()
    clock.now += 10
    assert not one.due("running") and one.due("requeued")
    one.asked()
    assert not one.due("started")
    clock.now += polling.SOON_S
    assert one.due("started")


def test_what_is_imminent_is_asked_about_often(clock: Clock) -> None:
    assert asked_in(clock, 600, lambda: "silent", SILENT_S) > 600 / 1.25 / SILENT_S


def event(run: RunDirectory, name: str, attempt: int = 0) -> None:
    happened(run, {"time": 1.0, "attempt": attempt, "event": name})


def test_only_the_start_and_the_end_of_an_attempt_are_changes(run: RunDirectory, clock: Clock) -> None:
    activity = Activity(run)
    event(run, "started")
    started = activity.seen()
    for _ in range(100):
        clock.now += 5
        append_line(run.metrics_file, {"step": 1, "attempt": 0, "time": 1.0})
        event(run, "checkpoint")
        assert activity.seen() == started
    event(run, "requeued")
    assert activity.seen() != started


def test_a_run_is_silent_after_a_minute_or_after_three_times_its_longest_pause(run: RunDirectory, clock: Clock) -> None:
    activity = Activity(run)
    event(run, "started")
    activity.seen()
    clock.now += SILENT_AFTER_S + 1
    activity.seen()
    assert activity.silent
    event(run, "checkpoint")
    activity.seen()
    assert not activity.silent
    clock.now += 40
    event(run, "checkpoint")
    activity.seen()
    clock.now += SILENT_AFTER_S + 1
    assert not activity.silent
    clock.now += 60
    assert activity.silent


def test_a_run_that_waits_in_the_queue_is_not_silent(run: RunDirectory, clock: Clock) -> None:
    activity = Activity(run)
    event(run, "requeued")
    activity.seen()
    clock.now += 10_000
    assert not activity.silent


def test_a_refreshed_view_keeps_slurms_last_answer_and_its_last_error(
    clock: Clock, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[object] = ["", SlurmUnavailable("no answer"), ""]
    asked: list[float] = []

    def squeue(*_: str) -> object:
        asked.append(clock.now)
        return answers.pop(0)

    fake_slurm["squeue"] = squeue
    monkeypatch.setenv("SLURM_CLUSTERS", "")  # no answer is shared
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    queue = PacedQueue()
    assert queue.jobs("a", ["1"], 1.0) == queue.jobs("a", ["1"], 1.0) == {}
    clock.now += 2
    for _ in range(2):
        with pytest.raises(SlurmUnavailable):
            queue.jobs("b", ["1"], 1.0)
    clock.now += 2
    assert queue.jobs("b", ["1"], 1.0) == {}
    assert asked == [1000.0, 1002.0, 1004.0]


# --- what the commands of a user share


@pytest.fixture
def asked(
    clock: Clock, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[tuple[float, list[str]]]:
    """When squeue was called, and with which ids. It knows job 1. The answers are shared in ``tmp_path``."""
    calls: list[tuple[float, list[str]]] = []

    def squeue(*words: str) -> str:
        calls.append((clock.now, words[words.index("-j") + 1].split(",")))
        return "1|RUNNING|n1|N/A|1:00|low|None\n"

    fake_slurm["squeue"] = squeue
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "Test/1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return calls


def answer_file(folder: Path) -> Path:
    return folder / f"clusterddp-squeue-{os.geteuid()}-test_1.json"


def test_five_commands_ask_as_often_as_one(clock: Clock, asked: list[tuple[float, list[str]]]) -> None:
    """Once they have run for some minutes."""
    queues = [PacedQueue() for _ in range(5)]
    for second in range(2 * 3600):
        if second == 3600:
            asked.clear()
        for queue in queues:
            assert queue.jobs("trains", ["1"], 1.0)["1"].nodes == "n1"
            clock.now += 0.2
    assert 1 <= len(asked) <= 12


def test_commands_that_watch_different_runs_ask_as_often_as_one(
    clock: Clock, asked: list[tuple[float, list[str]]]
) -> None:
    """Each asks for all jobs that a command has wanted in the last ten minutes."""
    watched = {"1": PacedQueue(), "2": PacedQueue(), "3": PacedQueue()}
    for second in range(2 * 3600):
        if second == 3600:
            asked.clear()
        for job_id, queue in watched.items():
            assert list(queue.jobs("trains", [job_id], 1.0)) == (["1"] if job_id == "1" else [])
            clock.now += 0.3
    assert 1 <= len(asked) <= 12
    assert {tuple(ids) for _, ids in asked} == {("1", "2", "3")}
    clock.now += polling.KEPT_S
    watched["1"].jobs("trains", ["1"], 1.0)
    assert asked[-1][1] == ["1"]


def test_an_answer_counts_only_if_slurm_was_asked_after_the_last_question_and_the_last_change(
    clock: Clock, asked: list[tuple[float, list[str]]], tmp_path: Path
) -> None:
    """And about these jobs."""
    first, at = shared_jobs(["1", "2"], 0.0, 1.0)
    clock.now += 7
    assert shared_jobs(["1"], 999.0, 1.0) == shared_jobs(["1", "2"], 999.0, 1.0) == (first, at) == (first, 1000.0)
    assert shared_jobs(["2"], 999.0, 1.0) == ({}, 1000.0)
    assert len(asked) == 1
    shared_jobs(["1"], 1000.0, 1.0)
    shared_jobs(["3"], 999.0, 1.0)
    assert asked[1:] == [(1007.0, ["1", "2"]), (1007.0, ["1", "2", "3"])]
    assert stat.S_IMODE(answer_file(tmp_path).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda file: file.write_text("[[1000.0, ["), id="torn"),
        pytest.param(lambda file: file.write_text('[1000.0, {"1": 1000.0}, {"1": [1]}]'), id="of another form"),
        pytest.param(lambda file: file.chmod(0o622), id="others can write it"),
        pytest.param(lambda file: file.symlink_to(file.rename(file.with_name("other"))), id="a link"),
        pytest.param(lambda file: (file.unlink(), file.mkdir()), id="a folder"),
        pytest.param(lambda file: os.chown(file, 1, -1), id="somebody else's", marks=AS_ROOT),
    ],
)
def test_slurm_is_asked_where_the_file_cannot_be_trusted(
    clock: Clock, asked: list[tuple[float, list[str]]], tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    shared_jobs(["1"], 0.0, 1.0)
    file = answer_file(tmp_path)
    spoil(file)
    jobs, _ = shared_jobs(["1"], 999.0, 1.0)
    assert (jobs["1"].nodes, len(asked)) == ("n1", 2)


def test_answers_of_an_unknown_cluster_and_of_a_clock_that_went_back_are_not_shared(
    clock: Clock, asked: list[tuple[float, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_jobs(["1"], 0.0, 1.0)
    clock.wall_s -= 60
    shared_jobs(["1"], 999.0, 1.0)
    monkeypatch.delenv("SLURM_CLUSTER_NAME")
    monkeypatch.setenv("SLURM_CLUSTERS", "")
    for _ in range(2):
        shared_jobs(["1"], 999.0, 1.0)
    assert len(asked) == 4
