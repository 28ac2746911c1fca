"""What the monitor posts while the ranks train: the controller's answers, a newer attempt, a removed run directory."""

from __future__ import annotations

import queue
import shutil
import time

import pytest

from clusterddp.errors import SlurmError, SlurmMissing, SlurmUnavailable
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.attempt_state import ASK_S, ControllerFailed, Event, Notice, RunRemoved, Stop, Superseded
from clusterddp.supervisor.controller import Monitor, pause_s
from tests.fake_slurm import FakeController


class Clockwork(FakeController):
    """A controller that answers from a list and repeats the last answer."""

    def __init__(self, *answers: Notice | Exception) -> None:
        super().__init__()
        self._answers = list(answers)

    def notice(self) -> Notice:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def run(run: RunDirectory) -> RunDirectory:
    """A run that is in attempt 0."""
    run.job_file.write_text("name: x")
    run.create_attempt()
    return run


class Quick(Monitor):
    look_s = ask_s = 0.01
    removed_s = 0.2


class Slow(Monitor):
    look_s = ask_s = 600.0


class Calm(Quick):
    restless_s = 0.0


def watching(
    run: RunDirectory, events: queue.Queue[Event], *answers: Notice | Exception, kind: type[Monitor] = Quick
) -> Monitor:
    return kind(Clockwork(*answers), run, 0, events.put, lambda: 100.0, lambda error: None)


def posted(run: RunDirectory, count: int, *answers: Notice | Exception) -> list[Event]:
    """The first events."""
    events: queue.Queue[Event] = queue.Queue()
    watch = watching(run, events, *answers)
    found = [events.get(timeout=10) for _ in range(count)]
    watch.close()
    return found


def test_the_controllers_answers_are_posted_as_they_change(run: RunDirectory) -> None:
    """An administrator may lower the time limit; a preemption may have signalled nobody."""
    answers = [Notice(9000.0), Notice(30.0), Notice(30.0, Stop.PREEMPTION)]
    assert posted(run, 3, *answers) == answers


def test_a_controller_that_does_not_answer_is_queried_again(run: RunDirectory) -> None:
    """An error is an answer, too: the controller is reachable. What a submission without Slurm needs is left out."""
    away = SlurmUnavailable("Unable to contact slurm controller")
    missing = SlurmMissing("scontrol not found", "Submit from a Slurm login node")
    assert posted(run, 4, away, SlurmError("Invalid job id"), missing, Notice(None)) == [
        ControllerFailed(str(away)),
        ControllerFailed("Invalid job id", reachable=True),
        ControllerFailed("scontrol not found", missing=True),
        Notice(None),
    ]


def test_the_controller_is_queried_at_once_on_request(run: RunDirectory) -> None:
    """When a node is silent, the answer decides whether it is lost."""
    events: queue.Queue[Event] = queue.Queue()
    watch = watching(run, events, Notice(None), kind=Slow)
    events.get(timeout=10)
    watch.ask()
    assert events.get(timeout=10) == Notice(None)
    watch.close()


def test_a_newer_attempt_ends_the_monitor(run: RunDirectory) -> None:
    """It is posted once, and the controller is not asked."""
    run.create_attempt()
    events: queue.Queue[Event] = queue.Queue()
    watch = watching(run, events, Notice(None))
    assert events.get(timeout=10) == Superseded()
    watch.close()
    assert events.empty()


def test_a_run_directory_that_is_missing_for_a_moment_is_no_removed_one(run: RunDirectory) -> None:
    """An automounter may have lost it; and a deleted part of it ends nothing."""
    events: queue.Queue[Event] = queue.Queue()
    watch = watching(run, events, Notice(None))
    away = run.path.rename(run.path.with_name("away"))
    events.get(timeout=10)
    away.rename(run.path)
    shutil.rmtree(run.attempt_private(0))
    until = time.monotonic() + 0.4
    while time.monotonic() < until:
        assert events.get(timeout=10) == Notice(None)
    run.path.rename(away)
    while (event := events.get(timeout=10)) == Notice(None):
        pass
    assert event == RunRemoved(f"{run} was removed, renamed or replaced")
    watch.close()


def test_an_undisturbed_job_is_asked_about_once_a_minute_and_near_its_time_limit_often() -> None:
    """Slurm's controller serves thousands of jobs; an unreachable one is asked less and less often, up to that."""
    quiet = [pause_s(left_s) for left_s in (None, 9000.0) for _ in range(50)]
    assert 60 <= min(quiet) < 63 and 72 < max(quiet) <= 75
    assert [pause_s(left_s) for left_s in (30.0, 12.0, 5.0, -5.0)] == [22.0, ASK_S, ASK_S, ASK_S]
    assert [pause_s(None, failures) for failures in (1, 2, 3, 4, 99)] == [8.0, 16.0, 32.0, 60.0, 60.0]


def test_after_a_signal_the_controller_is_asked_often_for_a_while(run: RunDirectory) -> None:
    """Its record may follow the signal."""
    events: queue.Queue[Event] = queue.Queue()
    watch = watching(run, events, Notice(None), kind=Calm)
    events.get(timeout=10)
    watch.restless_s = 600.0
    watch.ask()
    assert [events.get(timeout=10) for _ in range(3)] == [Notice(None)] * 3
    watch.close()
