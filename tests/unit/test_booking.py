"""Where a run's time went: compared with a simulation that notes for each second what the run was doing.

The simulation shares no code with ``clusterddp/report``: it writes the history of a run while it spends its time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from clusterddp.events import BY_SLURM
from clusterddp.report.booking import CATEGORIES, Booking, Wait, book
from clusterddp.training import timing
from tests.histories import check_history

BEGAN = 1_795_000_000


@dataclass
class World:
    """A run on a cluster. ``did``: what it was doing in each second since its submission."""

    draw: random.Random
    did: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    attempt: int = 0
    #: Steps take a second. ``reached``: the most that any attempt has made; ``saved``: those of the newest checkpoint.
    step: int = 0
    reached: int = 0
    saved: int = 0
    #: First steps of attempts that an earlier attempt had made.
    first_steps: int = 0
    seen: float | None = None

    @property
    def now(self) -> float:
        return BEGAN + len(self.did)

    def spend(self, what: str, least: int = 1, most: int = 9) -> None:
        self.did += [what] * self.draw.randint(least, most)

    def tell(self, event: str, time: float | None = None, **values: Any) -> None:
        line = {"time": self.now if time is None else time, "attempt": self.attempt, "event": event, **values}
        self.events.append(line)

    def launch(self, submitted: float | None = None) -> None:
        """The job waits, starts, and its ranks come to their first step."""
        allocated = {"submitted": self.now if submitted is None else submitted}
        if self.draw.random() < 0.7:
            self.spend("held")
        allocated["eligible"] = self.now
        self.spend("queued", 0, 20)
        allocated["begun"] = self.now
        self.spend("launching")
        if submitted is not None:
            self.tell("submitted", job="7", submitted=submitted)
        self.start()
        self.tell("allocated", self.now - 1, **allocated)

    def start(self) -> None:
        """The supervisor launches the ranks."""
        seen = {} if self.seen is None else {"seen": self.seen}
        self.tell("started", job="7", restarts=0, nodes="n1", ranks=2, code={}, changed=[], **seen)
        self.spend("launching")
        for phase in ("importing", "rendezvous", "importing", "restoring", "importing"):
            self.tell("phase", rank=0, phase=phase)
            self.spend(phase)
        redone, self.step = self.step - self.saved, self.saved
        self.first_steps += self.saved < self.reached
        if self.saved:
            self.tell("resumed", rank=0, step=self.saved, parent={}, inexact=[], redone=redone)
        else:
            self.tell("training", rank=0, step=0, redone=redone)
        self.tell("phase", rank=0, phase="first_step")
        self.spend("first_step", 2, 5)
        self.step += 1
        self.tell("phase", rank=0, phase="repeating" if self.step < self.reached else "training")

    def train(self, steps: int) -> None:
        """Steps, some of which an attempt before made already."""
        for _ in range(steps):
            if self.step < self.reached:
                self.did.append("repeating")
                self.step += 1
                if self.step == self.reached:
                    self.tell("phase", rank=0, phase="training")
            else:
                self.did.append("training")
                self.step += 1
        self.reached = max(self.reached, self.step)
        self.seen = self.now

    def save(self, last: bool = False) -> None:
        """A save blocks training for a while, and is durable some steps later."""
        begun, step = self.now, self.step
        self.spend("saving", 1, 3)
        blocked = self.now - begun
        if not last:
            self.train(2)
        done = self.now - begun
        self.tell("checkpoint", rank=0, step=step, blocked_s=blocked, durable_s=done, bytes=1)
        self.saved = step

    def evaluate(self) -> None:
        begun = self.now
        self.spend("evaluating")
        self.tell("evaluated", rank=0, seconds=self.now - begun)

    def work(self) -> None:
        self.train(1)
        for _ in range(self.draw.randint(1, 4)):
            self.train(self.draw.randint(1, 30))
            self.draw.choice([self.save, self.evaluate, lambda: None])()

    # --- how an attempt ends

    def stop(self) -> None:
        self.tell("stopping", rank=0, step=self.step, reason="preemption")
        self.save(last=True)
        self.tell("phase", rank=0, phase="ending")
        self.spend("launching", 1, 3)

    def ended(self, event: str, cause: str, **values: Any) -> None:
        self.tell(event, reason=cause, cause=cause, step=self.step, checkpoint=self.saved, **values)
        self.attempt += 1

    def preempted(self) -> None:
        self.stop()
        self.ended("requeued", "preempted", window_s=0.1)
        self.launch()

    def requeued_by_slurm(self) -> None:
        """Without grace; it was requeued before its ranks had stopped, which Slurm's whole seconds do not show."""
        self.stop()
        self.ended("stopped", "preempted without grace", then=BY_SLURM)
        before = len(self.events)
        self.launch()
        allocated = next(event for event in self.events[before:] if event["event"] == "allocated")
        allocated["submitted"] += self.draw.choice([-1, 0, 1])

    def resubmitted(self) -> None:
        self.stop()
        self.ended("resubmitted", "preempted", job="8")
        self.launch(submitted=self.now)

    def killed(self) -> None:
        """A rank is killed, and all are restarted in place."""
        since = self.now
        self.spend("launching", 2, 5)
        self.tell("rank_failed", rank=1, host="n1", error="killed", since=since)
        self.ended("restarted", "failed")
        self.spend("launching")
        self.start()

    def hung(self) -> None:
        begun = self.now
        self.spend("hung", 10, 60)
        self.tell("hung", rank=1, late=[1], host="n1", step=self.step, seconds=self.now - begun, what="rank 1 hung")
        self.spend("hung", 3, 5)
        self.ended("restarted", "hung")
        self.spend("launching")
        self.start()

    def node_died(self) -> None:
        """The supervisor's own: nobody records the end, and Slurm requeues the job when it notices."""
        self.attempt += 1
        self.spend("down", 5, 60)
        self.launch()

    def halted(self) -> None:
        """The user stops the run, and submits it again another day."""
        self.stop()
        self.ended("stopped", "stopped")
        self.spend("down", 10, 90)
        self.launch(submitted=self.now)

    def complete(self) -> None:
        self.tell("finishing", rank=0, step=self.step)
        self.save(last=True)
        self.tell("progress", rank=0, step=self.step, steps=self.step)
        self.tell("phase", rank=0, phase="after_loop")
        self.spend("unknown", 0, 2)
        self.evaluate()
        self.tell("phase", rank=0, phase="ending")
        self.spend("launching")
        self.tell("completed", step=self.step, attempts=self.attempt + 1, reason="")


ENDS: tuple[Callable[[World], None], ...] = (
    *(
        World.preempted,
        World.requeued_by_slurm,
        World.resubmitted,
        World.killed,
        World.hung,
        World.node_died,
        World.halted,
    ),
)


def simulated(seed: int, interruptions: int = 12) -> World:
    world = World(random.Random(seed))
    world.launch(submitted=world.now)
    for _ in range(interruptions):
        world.work()
        world.draw.choice(ENDS)(world)
    world.work()
    world.complete()
    return world


def by_second(booking: Booking) -> list[str]:
    """What each second is booked to, by looking at its middle."""
    found: list[str] = []
    for one in booking.intervals:
        while BEGAN + len(found) + 0.5 < one.end:
            found.append(one.category)
    return found


def check_shape(booking: Booking) -> None:
    """Every second once."""
    assert all(one.seconds > 0 and one.category in CATEGORIES for one in booking.intervals)
    assert all(before.end == after.begin for before, after in pairwise(booking.intervals))
    assert sum(booking.seconds().values()) == pytest.approx(booking.total_s)


@pytest.mark.parametrize("seed", range(12))
def test_each_second_is_booked_to_what_the_run_was_doing(seed: int) -> None:
    world = simulated(seed)
    check_history(world.events)
    booking = book(world.events, now=world.now + 1e6)
    check_shape(booking)
    assert by_second(booking) == world.did
    assert not booking.provisional


@pytest.mark.parametrize("state", ["running", "pending", "held", "stopped", "unknown", "failed"])
def test_a_history_that_ends_anywhere_is_booked(state: str) -> None:
    """As of a run that is live, or whose supervisor was killed, or whose file is torn."""
    world = simulated(5, interruptions=6)
    for count in range(0, len(world.events) + 1, 2):
        booking = book(world.events[:count], now=world.now, state=state)
        check_shape(booking)
        if count and state != "failed":
            assert booking.total_s == pytest.approx(len(world.did)), count
            assert booking.provisional or count == len(world.events)


@pytest.mark.parametrize("seed", range(10))
def test_what_was_booked_before_an_attempt_does_not_depend_on_what_follows(seed: int) -> None:
    world = simulated(seed)
    starts = [index for index, event in enumerate(world.events) if event["event"] == "started"]
    for index in starts[1:]:
        now = world.events[index]["time"]
        booking = book(world.events[: index + 1], now=now, state="running")
        known = int(now - BEGAN) - 200  # the wait before the attempt is known once it is allocated
        assert by_second(booking)[: max(0, known)] == world.did[: max(0, known)]


def test_a_live_attempt_counts_up_to_now_and_a_dead_one_to_its_last_step() -> None:
    world = World(random.Random(1))
    world.launch(submitted=world.now)
    world.train(50)
    later = world.now + 100
    live = book(world.events, later, state="running", newest_step=world.now).seconds()
    dead = book(world.events, later, state="unknown", newest_step=world.now).seconds()
    assert (live["training"], live["unknown"]) == (150, 0)
    assert (dead["training"], dead["unknown"]) == (50, 100)


def test_steps_wait_for_a_straggler_from_its_report_until_it_keeps_up() -> None:
    """Its step takes twice the time of the others: of 40 s with it, 20 s were waited."""
    world = World(random.Random(1))
    world.launch(submitted=world.now)
    world.train(10)
    world.tell("slow", rank=1, host="n1", own_s=1.0, ratio=2.0)
    world.train(40)
    world.tell("straggler_recovered", rank=1, host="n1")
    world.train(30)
    booking = book(world.events, world.now, state="running")
    check_shape(booking)
    assert (booking.seconds()["straggler"], booking.seconds()["training"]) == (20, 60)


def test_what_was_measured_replaces_the_estimate() -> None:
    """Of 90 s: a quarter of the first 20 s was waited, before anyone noticed; nothing of the next 30 s, for part of
    which the event's ratio says half; of 20 s that were not measured that half; then nothing is known."""
    world = World(random.Random(1))
    world.launch(submitted=world.now)
    begun = world.now
    world.train(40)
    world.tell("slow", rank=1, host="n1", own_s=1.0, ratio=2.0)
    world.train(30)
    world.tell("straggler_recovered", rank=1, host="n1")
    world.train(20)
    waited = [Wait(begun, begun + 20, 0.25), Wait(begun + 20, begun + 50, 0.0), Wait(begun + 80, begun + 95, 0.0)]
    booking = book(world.events, world.now, state="running", waited=waited)
    check_shape(booking)
    assert (booking.seconds()["straggler"], booking.seconds()["training"]) == (5 + 10, 75)
    estimated = book(world.events, world.now, state="running").seconds()
    assert estimated["straggler"] == 15, "of 30 s"
    nothing = book(world.events, world.now, state="running", waited=[Wait(begun - 5, begun + 99, 0.0)]).seconds()
    assert nothing["straggler"] == 0


def test_work_since_a_scripts_own_checkpoint_is_booked_as_repeated() -> None:
    """Its steps are unknown: what it did after the checkpoint that it continues from is done again, or all of it."""

    def run(attempt: int, at: float) -> list[dict[str, Any]]:
        shared = {"attempt": attempt, "rank": 0}
        return [
            {"time": at, "attempt": attempt, "event": "started", "pid": 1, "nodes": "n1", "ranks": 1},
            {"time": at + 1, **shared, "event": "phase", "phase": "importing"},
            {"time": at + 99, "attempt": attempt, "event": "rank_failed", "rank": 0, "host": "n1", "error": "killed"},
            {"time": at + 100, "attempt": attempt, "event": "restarted", "reason": "killed", "cause": "none"},
        ]

    resumed = {"time": 201.0, "attempt": 2, "event": "own_resume", "file": "a.pt", "written": 170.0, "before_s": 30.0}
    none = {"time": 101.0, "attempt": 1, "event": "own_resume", "patterns": ["a.pt"], "from_start": True}
    events = [*run(0, 0.0), none, *run(1, 100.0), resumed, *run(2, 200.0)]
    seconds = book(events, 300.0, "failed").seconds()
    assert (seconds["repeating"], seconds["importing"]) == (98 + 29, 69 + 98)
    known = [*events, {"time": 3.0, "attempt": 0, "event": "training", "step": 0}]
    assert book(known, 300.0, "failed").seconds()["repeating"] == 0
    seen = [{"time": at, "attempt": 0, "event": "steps_seen"} for at in (10.0, 110.0, 210.0)]
    phases = [{"time": at, "attempt": at // 100, "event": "phase", "phase": "training"} for at in (10, 110, 210)]
    seconds = book([*events, *seen, *phases], 300.0, "failed").seconds()
    assert (seconds["repeating"], seconds["training"], seconds["importing"]) == (89 + 29, 60 + 89, 27)
    logged = [*events, *seen, *phases, {"time": 11.0, "attempt": 0, "event": "training", "step": 0, "log": 0}]
    assert book(logged, 300.0, "failed").seconds() == seconds


def test_ranks_that_wait_for_a_dead_node_hang_until_they_have_exited() -> None:
    """Its connections break 15 s later; the other ranks waited from the moment at which it fell silent."""
    events = [
        {"time": 0.0, "attempt": 0, "event": "started", "job": "7"},
        {"time": 5.0, "attempt": 0, "event": "phase", "phase": "training"},
        {"time": 35.0, "attempt": 0, "event": "node_lost", "node": "n2"},
        {"time": 37.0, "attempt": 0, "event": "rank_failed", "since": 20.0},
        {"time": 38.0, "attempt": 0, "event": "resubmitted", "job": "8"},
    ]
    seconds = book(events, 38.0, state="pending").seconds()
    assert (seconds["training"], seconds["hung"], seconds["launching"]) == (15, 18, 5)


def test_a_run_that_slurm_requeues_by_itself_is_held_not_down() -> None:
    """From the moment its ranks have stopped, while it waits, too."""
    events = [
        {"time": 0.0, "attempt": 0, "event": "started", "job": "7"},
        {"time": 5.0, "attempt": 0, "event": "phase", "phase": "training"},
        {"time": 20.4, "attempt": 0, "event": "stopped", "reason": "preempted without grace", "then": BY_SLURM},
    ]
    live = book(events, 25.0, state="held").seconds()
    assert live["held"] == pytest.approx(4.6) and not live["down"]
    again = [
        {"time": 33.0, "attempt": 1, "event": "started", "job": "7"},
        {"time": 33.0, "attempt": 1, "event": "allocated", "submitted": 22.0, "eligible": 29.0, "begun": 31.0},
    ]
    seconds = book([*events, *again], 33.0, state="running").seconds()
    assert seconds["held"] == pytest.approx(8.6) and (seconds["queued"], seconds["down"]) == (2, 0)


# --- ETTR


def test_short_evaluations_are_reported_together_and_nested_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 0.4 s in every step makes an event for every third of them."""
    clock, reported = iter([0.0, 0.4, 1.0, 1.4, 2.0, 2.4, 3.0, 3.4, 5.0, 9.0]), list[float]()
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(clock))
    measuring = timing.Evaluations(reported.append)
    for _ in range(4):
        with measuring.measured():
            pass
    assert reported == [pytest.approx(1.2)]
    with measuring.measured(), measuring.measured():
        pass
    assert reported[1:] == [pytest.approx(4.4)]
    measuring.report()
    assert len(reported) == 2
