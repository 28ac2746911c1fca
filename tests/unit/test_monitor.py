"""What the supervisor notices while the ranks train: the clock, a preemption that signalled nobody, a newer attempt."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import pytest

from clusterddp.errors import SlurmUnavailable
from clusterddp.jobdef.job import Job, Timeouts
from clusterddp.supervisor import monitor
from clusterddp.supervisor.controller import Notice, Stop
from clusterddp.supervisor.monitor import Monitor, stop_margin_s


class Clockwork:
    """A controller that answers from a list, the last answer for ever."""

    def __init__(self, *answers: Notice | Exception) -> None:
        self._answers = list(answers)

    def notice(self) -> Notice:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Told:
    """An attempt that notes what it is told; it hears the second notice."""

    def __init__(self, newer: bool = False) -> None:
        self.notices: queue.Queue[str] = queue.Queue()
        self.superseded_: queue.Queue[None] = queue.Queue()
        self.controller: queue.Queue[str | None] = queue.Queue()
        self.newer = newer

    def superseded(self) -> bool:
        return self.newer

    def stop_margin_s(self) -> float:
        return 60.0

    def heard(self) -> bool:
        return self.notices.qsize() >= 2

    def on_notice(self, stop: Stop, why: str) -> None:
        assert stop.value in ("preemption", "time limit")
        self.notices.put(why)

    def on_superseded(self) -> None:
        self.superseded_.put(None)

    def on_controller(self, away: str | None) -> None:
        self.controller.put(away)

    def on_controller_missing(self, why: str) -> None:
        self.controller.put(why)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(monitor, "LOOK_S", 0.01)
    monkeypatch.setattr(monitor, "ASK_S", 0.01)
    monkeypatch.setattr(monitor, "SETTLE_S", 0.01)
    yield


def notices(told: Told, *answers: Notice | Exception) -> list[str]:
    watch = Monitor(Clockwork(*answers), told)  # type: ignore[arg-type]
    heard = [told.notices.get(timeout=10), told.notices.get(timeout=10)]
    watch.close()
    return heard


def test_the_ranks_are_told_in_time_for_a_limit_that_was_lowered_meanwhile() -> None:
    """First hours, then, by an administrator, half a minute; told again until a rank has heard it."""
    later, soon = Notice(time.time() + 9000), Notice(time.time() + 30)
    assert all("the time limit is" in why for why in notices(Told(), later, later, soon))


def test_a_preemption_that_began_before_there_were_ranks_is_passed_on() -> None:
    """Slurm signals the steps that run, and there was none."""
    assert notices(Told(), Notice(None), Notice(None, Stop.PREEMPTION)) == ["the job is being preempted"] * 2


def test_a_controller_that_does_not_answer_is_asked_again() -> None:
    """Told once when it goes, once when it comes back; the ranks train on."""
    away = SlurmUnavailable("Unable to contact slurm controller")
    told = Told()
    notices(told, away, away, Notice(None, Stop.PREEMPTION))
    assert [told.controller.get_nowait() for _ in range(2)] == [str(away), None]
    assert told.controller.empty()


def test_a_newer_attempt_ends_the_watch() -> None:
    """Once."""
    told = Told(newer=True)
    watch = Monitor(Clockwork(Notice(None)), told)  # type: ignore[arg-type]
    told.superseded_.get(timeout=10)
    watch.close()
    assert told.superseded_.empty()


@pytest.mark.parametrize(
    ("time_s", "last_save_s", "lead"), [(None, 0.0, 120), (86400, 100.0, 310), (120, 0.0, 30), (120, 100.0, 30)]
)
def test_slow_saves_get_more_notice_and_short_limits_keep_most_of_their_time(
    time_s: int | None, last_save_s: float, lead: float
) -> None:
    """Three times the last save and ten seconds, at least as asked for, at most a quarter of the limit."""
    job = Job(name="x", module="x", time_s=time_s, timeouts=Timeouts(notice_s=120))
    assert stop_margin_s(job, last_save_s) == lead
