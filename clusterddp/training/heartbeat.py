"""What a rank tells the supervisor of itself every few seconds: how far it is, and, while it does not move, what it is
at. A thread reads what the main thread leaves behind anyway: a step does nothing for it.

The supervisor finds out that the run hangs, and on which rank (``failures/hangs.py``). The stacks of all threads come
from here: a timer of faulthandler's, which needs no lock of Python's, writes them to standard error when the rank's
time is over.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from clusterddp.jobdef.job import Watchdog
from clusterddp.process import RunningClock
from clusterddp.reporter import say
from clusterddp.training.stack_location import place_of, sleeping, stand_of

#: A rank may be without a step for so many times as long as it was before.
GAP_FACTOR = 4.0
#: How many of the last collectives are written down: torch keeps 2000, a megabyte for each of perhaps a thousand ranks.
RECORDED = 100
#: How often in a row, and how far apart, a thread is looked at to see whether it moves.
LOOKS, LOOK_S = 4, 0.01


class Pace:
    """How long a rank may be without moving, from how long it was before. Pure: seconds are the caller's."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._seen: tuple[int, int | None, bool] | None = None
        self._longest_s = 0.0
        self._moved = 0.0
        #: None: it has not begun to train. Infinity: as long as it likes.
        self.allowed_s: float | None = None

    def look(self, now: float, count: int, begun_at: int | None, paused: bool) -> float:
        """For how long the rank has not moved; see ``Heartbeat`` for what it is told."""
        seen = (count, begun_at, paused)
        if seen == self._seen:
            return now - self._moved
        if self._seen and self._seen[1:] == seen[1:] and _past_first(*self._seen[:2]):
            self._longest_s = max(self._longest_s, now - self._moved)
        self._seen, self._moved = seen, now
        if begun_at is None:
            self.allowed_s = None if self.allowed_s is None else math.inf
        elif paused:
            self.allowed_s = math.inf
        elif not _past_first(count, begun_at):
            self.allowed_s = self._watchdog.start_s
        else:
            self.allowed_s = max(self._watchdog.step_s, GAP_FACTOR * self._longest_s)
        return 0.0


def _past_first(count: int, begun_at: int | None) -> bool:
    """The loop comes to a boundary before its first step, and to one after."""
    return begun_at is not None and count >= begun_at + 2


class Heartbeat:
    """One per process. It is watched from ``begin`` to ``rest``; a script that does neither never is.

    Args:
        watchdog: None turns it off.
        boundaries: how many stop points the main thread has come to.
        step: how many steps are done.
        send: tells the supervisor.
        flight_record: where torch's record of the last collectives goes when the rank's time is over.
    """

    def __init__(
        self,
        watchdog: Watchdog | None,
        boundaries: Callable[[], int],
        step: Callable[[], int],
        send: Callable[..., None],
        flight_record: Path,
    ) -> None:
        self._boundaries, self._step, self._send, self._flight_record = boundaries, step, send, flight_record
        #: Seconds of a step that are this rank's own, and all of them; None: not known yet.
        self.pace: tuple[float, float] | None = None
        self._begun_at: int | None = None
        self._paused = 0
        #: When the timer writes the stacks, on the monotonic clock.
        self._stacks_at = math.inf
        self._end = threading.Event()
        if watchdog is not None:
            threading.Thread(target=self._beat, args=(watchdog,), name="heartbeat", daemon=True).start()

    def begin(self) -> None:
        """From now on one boundary follows the other."""
        self._begun_at = self._boundaries()

    def rest(self) -> None:
        """What comes now takes as long as it likes."""
        self._begun_at = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What is done inside takes as long as it likes."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        faulthandler.cancel_dump_traceback_later()

    def _beat(self, watchdog: Watchdog) -> None:
        try:
            self._beat_on(watchdog)
        finally:  # whoever says nothing more of itself is not to be taken for one that hangs
            self._send("alive", count=self._boundaries(), step=self._step(), age_s=0.0, allowed_s=math.inf)

    def _beat_on(self, watchdog: Watchdog) -> None:
        pace, clock = Pace(watchdog), RunningClock(watchdog.beat_s)
        recorded, still_since = False, 0.0
        stood: set[object] = set()
        while not self._end.wait(watchdog.beat_s):
            if stood_s := clock.look():
                self._say(f"this process stood still for {stood_s:.0f} s: it was stopped, or its job suspended")
            if time.monotonic() > self._stacks_at:
                self._stacks_at = math.inf
                self._say(
                    "the stacks above are what this rank was at when the watchdog's time was over without a step, "
                    "in case it hangs; one that works is left alone"
                )
            count = self._boundaries()
            age_s = pace.look(clock.now, count, self._begun_at, self._paused > 0)
            beat: dict[str, Any] = {"count": count, "step": self._step(), "age_s": age_s, "allowed_s": pace.allowed_s}
            if self.pace is not None:
                beat["own_s"], beat["step_s"] = self.pace
            if age_s == 0:
                self._set_timer(pace.allowed_s)
                recorded = False
            else:
                beat["place"], beat["waits"] = main_thread_place()
                before, stood = stood, stands_of(_main_thread())
                still_since = still_since if len(stood) == 1 and stood == before else clock.now
                beat["still_s"] = clock.now - still_since
            self._send("alive", **beat)
            if age_s > (pace.allowed_s or math.inf) and not recorded:
                recorded = True
                threading.Thread(target=self._record_flight, name="flight record", daemon=True).start()

    def _set_timer(self, allowed_s: float | None) -> None:
        if self._end.is_set() or allowed_s is None or math.isinf(allowed_s):
            faulthandler.cancel_dump_traceback_later()
            self._stacks_at = math.inf
        else:
            faulthandler.dump_traceback_later(allowed_s, file=2)
            self._stacks_at = time.monotonic() + allowed_s

    def _record_flight(self) -> None:
        """Write down the last collectives and which of them are not done; torch itself prints them nowhere."""
        try:
            record = flight_record(torch._C._distributed_c10d)
            if record is None:
                self._say(f"torch {torch.__version__} kept no record of the last collectives: no flight record written")
            else:
                self._flight_record.write_text(json.dumps(record) + "\n")
        except (OSError, RuntimeError, ValueError) as error:
            self._say(f"torch's flight record is not written: {error}")

    @staticmethod
    def _say(words: str) -> None:
        with suppress(OSError):  # a full disk: a heart that stopped for it would look like a hang
            say(words)


def flight_record(bound: Any) -> dict[str, Any] | None:
    """torch's record of the last collectives, at most RECORDED of them; None where it has none.

    ``bound`` is torch._C._distributed_c10d. A CUDA build has one record for NCCL and one for all other backends,
    of which one is empty. torch 2.4 has neither as JSON; torch 2.9 records nothing for gloo.
    """
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        record = json.loads(getattr(bound, name)()) if hasattr(bound, name) else {}
        if record.get("entries"):
            return {**record, "entries": record["entries"][-RECORDED:]}
    return None


def main_thread_place() -> tuple[str, bool]:
    """What the main thread is at, and whether it waits there for other ranks."""
    return place_of(
        sys._current_frames()[_main_thread()], sleeping(os.getpid())
    )  # Linux: the main thread has the process's id


def stands_of(thread: int) -> set[object]:
    """Where a thread stands at a few moments: one place while it waits.

    One look is not enough: Python hands its lock over at a few places of a tight loop only.
    """
    stands: set[object] = set()
    for _ in range(LOOKS):
        stands.add(stand_of(sys._current_frames()[thread]))
        time.sleep(LOOK_S)
    return stands


def _main_thread() -> int:
    main = threading.main_thread().ident
    assert main is not None
    return main
