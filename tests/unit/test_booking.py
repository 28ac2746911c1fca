"""Where a run's time went: compared with a simulation that notes for each second what the run was doing.

The simulation shares no code with ``clusterddp/report``: it writes the history of a run while it spends its time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from clusterddp.history.words import BY_SLURM
from clusterddp.jobdef.job import Job
from clusterddp.report.booking import CATEGORIES, HOLD_S, Booking, Wait, book
from clusterddp.report.efficiency import advice, spent
from clusterddp.training import step_timing
from tests.histories import check_history, view

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

    def freeze(self) -> None:
        """The node of rank 1 is frozen, and the others wait."""
        begun = self.now
        self.spend("hung", 10, 60)
        self.tell("suspended", rank=1, host="n1", seconds=self.now - begun)

    def stall(self) -> None:
        """The network between the nodes is cut off for a while."""
        begun = self.now
        self.spend("hung", 30, 60)
        self.tell("stalled", rank=0, seconds=self.now - begun)

    def work(self) -> None:
        self.train(1)
        for _ in range(self.draw.randint(1, 4)):
            self.train(self.draw.randint(1, 30))
            self.draw.choice([self.save, self.evaluate, self.freeze, self.stall, lambda: None])()

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
        for_s = self.now - begun
        told = {"seconds": for_s, "stalled_s": for_s}
        self.tell("hung", rank=1, late=[1], host="n1", step=self.step, what="rank 1 hung", **told)
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
    booking = book(view(world.events), now=world.now + 1e6)
    check_shape(booking)
    assert by_second(booking) == world.did
    assert not booking.provisional


def test_the_ratios_and_repeated_steps_are_those_of_the_simulation() -> None:
    world = simulated(4)
    counts = Counter(world.did)
    made = spent(book(view(world.events), now=world.now), view(world.events))
    assert made is not None
    productive = counts["training"] + counts["evaluating"]
    away = counts["queued"] + counts["held"] + counts["down"]
    assert made.ettr == pytest.approx(productive / len(world.did))
    assert made.goodput == pytest.approx(productive / (len(world.did) - away))
    assert made.repeated == counts["repeating"] + world.first_steps > 0


@pytest.mark.parametrize("state", ["running", "pending", "held", "stopped", "unknown", "failed"])
def test_a_history_that_ends_anywhere_is_booked(state: str) -> None:
    """As of a run that is live, or whose supervisor was killed, or whose file is torn."""
    world = simulated(5, interruptions=6)
    for count in range(0, len(world.events) + 1, 2):
        booking = book(view(world.events[:count]), now=world.now, state=state)
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
        booking = book(view(world.events[: index + 1]), now=now, state="running")
        known = int(now - BEGAN) - 200  # the wait before the attempt is known once it is allocated
        assert by_second(booking)[: max(0, known)] == world.did[: max(0, known)]


@pytest.mark.parametrize("seed", range(15))
def test_lost_foreign_and_disordered_events_change_nothing_but_categories(seed: int) -> None:
    world, draw = simulated(seed, interruptions=4), random.Random(seed)
    events = [event for event in world.events if draw.random() < 0.8]
    for event in draw.sample(events, len(events) // 4):
        name = draw.choice(list(event))
        if name not in ("event", "time", "attempt"):
            event[name] = draw.choice([None, -1, "x", 1e300, [], {}, True, 2**62, BEGAN + 40.5])
    draw.shuffle(events)
    events.append({"time": BEGAN + 3.0, "attempt": 2**40, "event": "from the future"})
    for state in ("running", "unknown"):
        booking = book(view(events), now=world.now, state=state)
        check_shape(booking)
        assert booking.total_s <= len(world.did) + 1


def test_a_live_attempt_counts_up_to_now_and_a_dead_one_to_its_last_step() -> None:
    world = World(random.Random(1))
    world.launch(submitted=world.now)
    world.train(50)
    later = world.now + 100
    live = book(view(world.events), later, state="running", newest_step=world.now).seconds()
    dead = book(view(world.events), later, state="unknown", newest_step=world.now).seconds()
    assert (live["training"], live["unknown"]) == (150, 0)
    assert (dead["training"], dead["unknown"]) == (50, 100)


def test_a_node_without_ranks_is_idle_while_an_attempt_runs() -> None:
    """A spare node, or one that the run has left. The end of attempt 0 is not recorded, and attempt 2 is live."""
    events = [
        {"time": 0.0, "attempt": 0, "event": "started", "job": "7", "spares": ["n3", "n4"]},
        {
            "time": 1000.0,
            "attempt": 1,
            "event": "started",
            "job": "8",
            "spares": ["n3"],
            "aside": ["n2"],
            "seen": 500.0,
        },
        {"time": 1600.0, "attempt": 1, "event": "restarted"},
        {"time": 1700.0, "attempt": 2, "event": "started", "job": "8", "aside": ["n2", "n3"]},
    ]
    made = spent(book(view(events), 2700.0, state="running"), view(events))
    assert made is not None and made.idle_node_s == 2 * 500 + 2 * 600 + 2 * 1000
    assert made.idle() == "idle nodes: 1.17 node-hours (spare nodes, and nodes that the run left)"


def test_a_run_that_waits_for_its_first_start_is_queued_or_held() -> None:
    for state, category in {"pending": "queued", "held": "held", "stopped": "down"}.items():
        seconds = book(view([]), BEGAN + 60, state=state, submitted=BEGAN).seconds()
        assert {name: value for name, value in seconds.items() if value} == {category: 60}
    assert spent(book(view([]), BEGAN), view([])) is None


def test_of_the_time_with_a_straggler_only_the_share_that_was_measured_is_a_wait() -> None:
    """Of 90 s: a quarter of the first 20 s, and half of 10 s later, whatever the event says."""
    world = World(random.Random(1))
    world.launch(submitted=world.now)
    begun = world.now
    world.train(40)
    world.tell("slow", rank=1, host="n1", own_s=1.0, ratio=2.0)
    world.train(30)
    world.tell("straggler_recovered", rank=1, host="n1")
    world.train(20)
    waited = [Wait(begun, begun + 20, 0.25), Wait(begun + 60, begun + 70, 0.5)]
    booking = book(view(world.events), world.now, state="running", waited=waited)
    check_shape(booking)
    assert (booking.seconds()["straggler"], booking.seconds()["training"]) == (5 + 5, 80)
    assert book(view(world.events), world.now, state="running").seconds()["straggler"] == 0, "it was not measured"


@pytest.mark.parametrize("event", [{"event": "stalled", "rank": 0}, {"event": "suspended", "rank": 1, "host": "n1"}])
def test_a_stall_that_one_rank_causes_is_not_booked_again_as_a_straggler(event: dict[str, Any]) -> None:
    """The others waited for 32 of 50 s, of which 30 are the stall: the share of the steps' time has both."""
    world = World(random.Random(1))
    world.launch(submitted=world.now)
    begun = world.now
    world.train(10)
    world.did += ["hung"] * 30
    world.tell(**event, seconds=30.0)
    world.train(10)
    booking = book(view(world.events), world.now, state="running", waited=[Wait(begun, begun + 50, 0.64)])
    check_shape(booking)
    seconds = booking.seconds()
    assert (seconds["hung"], seconds["straggler"], seconds["training"]) == pytest.approx((30, 2, 18))


def test_a_script_without_a_loop_is_not_importing_for_days() -> None:
    """Nobody knows what it does; unless it failed before its loop."""
    events = [
        {"time": 0.0, "attempt": 0, "event": "started", "pid": 7},
        {"time": 5.0, "attempt": 0, "event": "phase", "phase": "importing"},
    ]
    assert book(view(events), 105.0, state="running").seconds()["unknown"] == 100
    failed = {"time": 15.0, "attempt": 0, "event": "rank_failed", "since": 12.0}
    assert book(view([*events, failed]), 15.0, state="failed").seconds()["importing"] == 7


def test_a_script_whose_steps_are_known_by_its_output_alone_trains_from_the_first_on() -> None:
    """As one that starts its own processes per GPU: no optimizer steps in its rank."""
    events = [
        {"time": 0.0, "attempt": 0, "event": "started", "pid": 7},
        {"time": 5.0, "attempt": 0, "event": "phase", "phase": "importing"},
        {"time": 20.0, "attempt": 0, "event": "training", "rank": 0, "step": 0, "log": 0},
        {"time": 90.0, "attempt": 0, "event": "phase", "phase": "ending"},
    ]
    completed = {"time": 95.0, "attempt": 0, "event": "completed", "step": 9}
    seconds = book(view([*events, completed]), 95.0, "completed").seconds()
    assert (seconds["importing"], seconds["training"]) == (15, 70)
    late = [*events[:2], events[3], {**events[2], "time": 91.0}]
    assert book(view(late), 95.0, "completed").seconds()["training"] == 0


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
    seconds = book(view(events), 300.0, "failed").seconds()
    assert (seconds["repeating"], seconds["importing"]) == (98 + 29, 69 + 98)
    known = [*events, {"time": 3.0, "attempt": 0, "event": "training", "step": 0}]
    assert book(view(known), 300.0, "failed").seconds()["repeating"] == 0
    seen = [{"time": at, "attempt": 0, "event": "steps_seen"} for at in (10.0, 110.0, 210.0)]
    phases = [{"time": at, "attempt": at // 100, "event": "phase", "phase": "training"} for at in (10, 110, 210)]
    seconds = book(view([*events, *seen, *phases]), 300.0, "failed").seconds()
    assert (seconds["repeating"], seconds["training"], seconds["importing"]) == (89 + 29, 60 + 89, 27)
    unread = [*events, *seen, *phases, {"time": 212.0, "attempt": 2, "event": "not_read", "file": "a.pt"}]
    seconds = book(view(unread), 300.0, "failed").seconds()
    assert (seconds["repeating"], seconds["training"]) == (89 + 89, 89)
    logged = [*events, *seen, *phases, {"time": 11.0, "attempt": 0, "event": "training", "step": 0, "log": 0}]
    without = [*events, *seen, *phases]
    assert book(view(logged), 300.0, "failed").seconds() == book(view(without), 300.0, "failed").seconds()


def test_ranks_that_wait_for_a_dead_node_hang_until_they_have_exited() -> None:
    """Its connections break 15 s later; the other ranks waited from the moment at which it fell silent."""
    events = [
        {"time": 0.0, "attempt": 0, "event": "started", "job": "7"},
        {"time": 5.0, "attempt": 0, "event": "phase", "phase": "training"},
        {"time": 35.0, "attempt": 0, "event": "node_lost", "node": "n2"},
        {"time": 37.0, "attempt": 0, "event": "rank_failed", "since": 20.0},
        {"time": 38.0, "attempt": 0, "event": "resubmitted", "job": "8"},
    ]
    seconds = book(view(events), 38.0, state="pending").seconds()
    assert (seconds["training"], seconds["hung"], seconds["launching"]) == (15, 18, 5)


def test_a_run_hangs_from_the_last_step_of_any_rank() -> None:
    """The rank at fault has made steps after its last heartbeat."""
    events = [
        {"time": 0.0, "attempt": 0, "event": "started", "job": "7"},
        {"time": 5.0, "attempt": 0, "event": "phase", "phase": "training"},
        {"time": 50.0, "attempt": 0, "event": "hung", "seconds": 32.0, "stalled_s": 30.0},
    ]
    assert book(view(events), 50.0, state="running").seconds()["hung"] == 30
    for seen, hung in ((21.0, 29), (19.0, 31), (17.0, 30)):
        later = [*events, {"time": 60.0, "attempt": 1, "event": "started", "job": "7", "seen": seen}]
        assert book(view(later), 60.0, state="running").seconds()["hung"] == hung, "its last step was recorded"
    events[-1]["stalled_s"] = 31.0
    for seen, hung in ((18.0, 32), (16.0, 31)):  # a heartbeat may be 2 s younger than the step; more is no error of its
        later = [*events, {"time": 60.0, "attempt": 1, "event": "started", "job": "7", "seen": seen}]
        assert book(view(later), 60.0, state="running").seconds()["hung"] == hung


def test_a_run_that_slurm_requeues_by_itself_is_held_not_down() -> None:
    """From the moment its ranks have stopped, while it waits, too."""
    events = [
        {"time": 0.0, "attempt": 0, "event": "started", "job": "7"},
        {"time": 5.0, "attempt": 0, "event": "phase", "phase": "training"},
        {"time": 20.4, "attempt": 0, "event": "stopped", "reason": "preempted without grace", "then": BY_SLURM},
    ]
    live = book(view(events), 25.0, state="held").seconds()
    assert live["held"] == pytest.approx(4.6) and not live["down"]
    again = [
        {"time": 33.0, "attempt": 1, "event": "started", "job": "7"},
        {"time": 33.0, "attempt": 1, "event": "allocated", "submitted": 22.0, "eligible": 29.0, "begun": 31.0},
    ]
    seconds = book(view([*events, *again]), 33.0, state="running").seconds()
    assert seconds["held"] == pytest.approx(8.6) and (seconds["queued"], seconds["down"]) == (2, 0)


def test_a_run_begins_when_its_submission_says_rather_than_slurms_whole_seconds() -> None:
    """A submission by hand is known to Slurm alone."""
    submitted = {"time": 12.0, "attempt": 0, "event": "submitted", "job": "7", "submitted": 10.7}
    started = {"time": 12.0, "attempt": 0, "event": "started", "job": "7"}
    allocated = {"time": 12.0, "attempt": 0, "event": "allocated", "submitted": 10.0, "begun": 11.0}
    late = {**submitted, "submitted": 11.4}  # sbatch took a while to return
    histories = ([submitted, started, allocated], [late, started, allocated], [started, allocated])
    assert [book(view(events), 12.0).intervals[0].begin for events in histories] == [10.7, 11.0, 10.0]


def test_a_run_that_is_continued_is_not_over() -> None:
    """It failed, was submitted again a minute later, and waits in the queue."""
    failed = [
        {"time": 0.0, "attempt": 0, "event": "started", "job": "7"},
        {"time": 10.0, "attempt": 0, "event": "failed", "reason": "x"},
    ]
    over = book(view(failed), 100.0)
    assert (over.total_s, over.provisional) == (10, False)
    again = book(view(failed), 100.0, state="pending", submitted=70.0)
    assert (again.seconds()["down"], again.seconds()["queued"], again.provisional) == (60, 30, True)


# --- ETTR


def test_short_evaluations_are_reported_together_and_nested_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 0.4 s in every step makes an event for every third of them."""
    clock, reported = iter([0.0, 0.4, 1.0, 1.4, 2.0, 2.4, 3.0, 3.4, 5.0, 9.0]), list[float]()
    monkeypatch.setattr(step_timing.time, "monotonic", lambda: next(clock))
    measuring = step_timing.Evaluations(reported.append)
    for _ in range(4):
        with measuring.measured():
            pass
    assert reported == [pytest.approx(1.2)]
    with measuring.measured(), measuring.measured():
        pass
    assert reported[1:] == [pytest.approx(4.4)]
    measuring.report()
    assert len(reported) == 2


def test_a_local_run_has_no_queue() -> None:
    """Its loop starts the next attempt at once, unless the user stopped it."""
    for ended, category in {"requeued": "launching", "restarted": "launching", "stopped": "down"}.items():
        events = [
            {"time": 0.0, "attempt": 0, "event": "started", "pid": 7},
            {"time": 10.0, "attempt": 0, "event": ended},
            {"time": 30.0, "attempt": 1, "event": "started", "pid": 8},
        ]
        between = [one for one in book(view(events), 30.0, state="running").intervals if one.begin >= 10]
        assert [(one.category, one.seconds) for one in between] == [(category, 20)], ended


def test_a_wait_for_other_members_of_a_sweep_is_no_hold() -> None:
    """With --max-running, at first and after a requeue, whose hold is booked as such; while it lasts, too."""
    limit = {"event": "allocated", "limit": 2}
    events = [
        {"time": 0.0, "attempt": 0, "event": "submitted", "job": "7_1", "submitted": 0.0},
        {"time": 305.0, "attempt": 0, "event": "started", "job": "7_1"},
        {"time": 305.0, "attempt": 0, "submitted": 0.0, "eligible": 300.0, "begun": 304.0, **limit},
        {"time": 310.0, "attempt": 0, "event": "requeued", "job": "7_1", "reason": "preempted"},
        {"time": 1000.0, "attempt": 1, "event": "started", "job": "7_1"},
        {"time": 1000.0, "attempt": 1, "submitted": 310.0, "eligible": 990.0, "begun": 999.0, **limit},
    ]
    found = book(view(events), 1000.0, state="running")
    seconds = found.seconds()
    assert {name: seconds[name] for name in ("limited", "held", "queued", "launching")} == {
        "limited": 300 + (990 - 310 - HOLD_S), "held": HOLD_S, "queued": 4 + 9, "launching": 1 + 5 + 1
    }  # fmt: skip
    (words,) = advice(Job(name="net", module="net"), found, view(events))
    assert words.startswith("Slurm held the run 1 time after a requeue, for 2 min on average, 12% of its time")
    assert book(view(events[:1]), 50.0, state="limited").seconds()["limited"] == 50.0


@pytest.mark.parametrize("state", ["pending", "held", "limited", "stopped"])
def test_a_run_that_has_had_no_nodes_has_no_goodput(state: str) -> None:
    history = view([{"time": 0.0, "attempt": 0, "event": "submitted", "job": "7_1", "submitted": 0.0}])
    found = spent(book(history, 50.0, state), history)
    assert found is not None and (found.goodput, found.ettr) == (None, 0.0)
