"""What the monitor posts while the ranks train: the controller's answers, and that a newer attempt exists."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from clusterddp.errors import SlurmError, SlurmMissing, SlurmUnavailable
from clusterddp.supervisor import monitor
from clusterddp.supervisor.monitor import Monitor
from clusterddp.supervisor.state import ControllerFailed, Event, Notice, Stop, Superseded
from tests.unit.test_attempt import FakeController


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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(monitor, "LOOK_S", 0.01)
    monkeypatch.setattr(monitor, "ASK_S", 0.01)
    yield


def posted(count: int, *answers: Notice | Exception) -> list[Event]:
    """The first events."""
    events: queue.Queue[Event] = queue.Queue()
    watch = Monitor(Clockwork(*answers), lambda: False, events.put)
    found = [events.get(timeout=10) for _ in range(count)]
    watch.close()
    return found


def test_the_controllers_answers_are_posted_as_they_change() -> None:
    """An administrator may lower the time limit; a preemption may have signalled nobody."""
    answers = [Notice(9000.0), Notice(30.0), Notice(30.0, Stop.PREEMPTION)]
    assert posted(3, *answers) == answers


def test_a_controller_that_does_not_answer_is_queried_again() -> None:
    """An error is an answer, too: the controller is reachable."""
    away = SlurmUnavailable("Unable to contact slurm controller")
    assert posted(4, away, SlurmError("Invalid job id"), SlurmMissing("scontrol"), Notice(None)) == [
        ControllerFailed(str(away)),
        ControllerFailed("Invalid job id", reachable=True),
        ControllerFailed("scontrol", missing=True),
        Notice(None),
    ]


def test_the_controller_is_queried_at_once_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a node is silent, the answer decides whether it is lost."""
    monkeypatch.setattr(monitor, "LOOK_S", 600.0)
    monkeypatch.setattr(monitor, "ASK_S", 600.0)
    events: queue.Queue[Event] = queue.Queue()
    watch = Monitor(Clockwork(Notice(None)), lambda: False, events.put)
    events.get(timeout=10)
    watch.ask()
    assert events.get(timeout=10) == Notice(None)
    watch.close()


def test_a_newer_attempt_ends_the_monitor() -> None:
    """It is posted once, and the controller is not asked."""
    events: queue.Queue[Event] = queue.Queue()
    watch = Monitor(Clockwork(Notice(None)), lambda: True, events.put)
    assert events.get(timeout=10) == Superseded()
    watch.close()
    assert events.empty()
