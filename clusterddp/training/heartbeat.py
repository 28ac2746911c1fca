"""A rank's heartbeat to the supervisor every few seconds: its progress and, while there is none, where it is.

A thread reads counters that the main thread keeps anyway, so that steps do no work for it. From the heartbeats, the
supervisor finds hangs and the rank at fault (``failures/hangs.py``), and what the steps spend their time on. When the
rank's timeout is over, a timer of faulthandler, which does not need the GIL, writes all threads' stacks to stderr.
"""

from __future__ import annotations

import faulthandler
import json
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

from clusterddp.distributed.devices import device_thread
from clusterddp.failures.stack_traces import main_thread_line, main_thread_place, outward
from clusterddp.jobdef.job import Watchdog
from clusterddp.messages.reports import Alive, Row
from clusterddp.process import RunningClock, current_frames
from clusterddp.reporter import say
from clusterddp.rundir.files import write_atomically
from clusterddp.worker.rank_process import RankProcess

if TYPE_CHECKING:
    from clusterddp.training.settings import Settings

#: A step may take this many times as long as the longest one so far.
GAP_FACTOR = 4.0
#: The number of last collectives in the flight record: torch keeps 2000, a megabyte for each of perhaps 1000 ranks.
RECORDED = 100
#: Seconds that the order to exit after a hang waits for the flight record, less than the grace period for hung ranks.
RECORD_S = 1.5
#: Seconds for which the end waits for the last heartbeat.
CLOSE_S = 1.0
#: How many samples of a thread's stack show whether it makes progress, and the seconds between two.
STACK_SAMPLES, SAMPLE_INTERVAL_S = 4, 0.01


def phase(rank: int) -> float:
    """When in a period a rank sends its heartbeat, from 0 to 1: any number of ranks is spread evenly over it."""
    return rank * 0.6180339887498949 % 1  # the golden ratio's


class Pace:
    """The timeout to a rank's next boundary, from the times that it took before. Pure: the caller has the clock."""

    def __init__(self, watchdog: Watchdog, patient: bool = False) -> None:
        self._watchdog = watchdog
        #: After the first step; ``patient`` where evaluations and saves of the script are not known as such.
        self._step_s = max(watchdog.step_s, watchdog.start_s) if patient else watchdog.step_s
        self._seen: tuple[int, int | None, bool] | None = None
        self._longest_s = 0.0
        self._moved = 0.0
        #: The timeout in seconds; None before training, infinity while the watchdog is suspended.
        self.allowed_s: float | None = None

    def look(self, now: float, count: int, begun_at: int | None, paused: bool) -> float:
        """Seconds since the rank last made progress. The arguments are those of ``Heartbeat``."""
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
            self.allowed_s = max(self._step_s, GAP_FACTOR * self._longest_s)
        return 0.0


def _past_first(count: int, begun_at: int | None) -> bool:
    """The loop has a boundary before its first step, and one after it."""
    return begun_at is not None and count >= begun_at + 2


@dataclass(frozen=True)
class WatchedSteps:
    """The training of a rank, as its heartbeat sees it."""

    boundaries: Callable[[], int]
    """Returns the number of boundaries that the main thread has reached."""
    step: Callable[[], int]
    """Returns the number of completed steps."""
    device: torch.device | None = None
    patient: bool = False
    """Whether what the script does between two steps is unknown."""


class Heartbeat:
    """One per process. The rank is watched from ``begin`` to ``rest``, and never if the script calls neither.

    Args:
        watchdog: the settings. None turns it off.
        watched: the training that it reports.
        send: sends an event to the supervisor.
        flight_record: the file for torch's record of the last collectives after a timeout.
        rank, ranks: this rank, and the number of ranks.
    """

    def __init__(
        self,
        watchdog: Watchdog | None,
        watched: WatchedSteps,
        send: Callable[[Alive], None],
        flight_record: Path,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._boundaries, self._step = watched.boundaries, watched.step
        self._device, self._patient = watched.device, watched.patient
        self._send, self._flight_record = send, flight_record
        self._rank, self._ranks = rank, ranks
        #: Adds the figures about the steps to a heartbeat (``training/step_timing.py``).
        self.timed: Callable[[Alive], Alive] = lambda beat: beat
        #: Where the device is, relative to the completed steps (``training/step_timing.py``).
        self.on_device: Callable[[], tuple[int, str] | None] = lambda: None
        self._thread: threading.Thread | None = None
        self._begun_at: int | None = None
        self._paused = 0
        #: When the timer will write the stacks, on the monotonic clock.
        self._stacks_at = math.inf
        self._end = threading.Event()
        #: Writes the flight record of this timeout.
        self._recording: threading.Thread | None = None
        #: After a timeout: a heartbeat's ``device``, since when it has been at the same place, and its ``collectives``.
        self._stalled_device: tuple[int, str, float] | None = None
        self._device_since = 0.0
        self._collectives: Sequence[Row] = ()
        self._starting_record = threading.Lock()
        if watchdog is not None:
            self._thread = device_thread(watched.device, self._beat, args=(watchdog,), name="heartbeat")
            self._thread.start()

    def begin(self) -> None:
        """Training begins, and the rank is watched from now on."""
        self._begun_at = self._boundaries()

    def rest(self) -> None:
        """Training has ended, or saves, and has no timeout from now on."""
        self._begun_at = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """There is no timeout inside the ``with`` block."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def close(self) -> None:
        """Ends the thread, whose last heartbeat has the last figures about the steps."""
        self._end.set()
        faulthandler.cancel_dump_traceback_later()
        self._explain_stacks()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _beat(self, watchdog: Watchdog) -> None:
        try:
            self._beat_on(watchdog)
        finally:  # a rank whose heartbeat ends must not look as if it hung
            self._send(self.timed(Alive(self._boundaries(), self._step(), age_s=0.0, allowed_s=math.inf)))

    def _beat_on(self, watchdog: Watchdog) -> None:
        period_s = watchdog.period_s(self._ranks)
        self._end.wait(period_s * phase(self._rank))  # all ranks begin at about the same time
        pace, clock = Pace(watchdog, self._patient), RunningClock(period_s)
        still_since, used_s = 0.0, time.process_time()
        stood: set[object] = set()
        while not self._end.wait(period_s):
            stood_s, worked_s = clock.look(), time.process_time() - used_s
            used_s += worked_s
            if worked_s > stood_s / 2:  # the script has kept this thread from running, in a call that holds the GIL
                stood_s = 0.0
            if stood_s:
                say(f"this process was stopped for {stood_s:.0f} s by a signal, or because its job was suspended")
            self._explain_stacks()
            count = self._boundaries()
            age_s = pace.look(clock.now, count, self._begun_at, self._paused > 0)
            beat = self.timed(Alive(count, self._step(), age_s, pace.allowed_s, stood_s=round(stood_s, 1)))
            if age_s == 0:
                self._set_timer(pace.allowed_s)
                self._recording, self._stalled_device, self._collectives = None, None, ()
            else:
                place, waits = main_thread_place()
                line = main_thread_line() if waits else ""
                before, stood = stood, positions_of(threading.main_thread().ident or 0)
                still_since = still_since if len(stood) == 1 and stood == before else clock.now
                beat = replace(beat, place=place, waits=waits, line=line, still_s=clock.now - still_since)
                beat = replace(beat, device=self._stalled_device, collectives=self._collectives)
            self._send(beat)
            if age_s > (pace.allowed_s or math.inf):  # after the heartbeat: a driver that hangs may block this thread
                self._start_flight_record()
                self._look_at_device(clock.now)

    def _look_at_device(self, now: float) -> None:
        try:
            found = self.on_device()
        except RuntimeError:  # of CUDA, which the script also gets
            found = None
        if found is None:
            self._stalled_device = None
            return
        step, does = self._step() + found[0], found[1]
        if self._stalled_device is None or self._stalled_device[:2] != (step, does):
            self._device_since = now
        self._stalled_device = step, does, now - self._device_since

    def _explain_stacks(self) -> None:
        if time.monotonic() > self._stacks_at:
            self._stacks_at = math.inf
            say(
                "the stacks above were written because no step was completed within the watchdog's timeout. This rank "
                "may be hanging. If it is only slow, it continues"
            )

    def _set_timer(self, allowed_s: float | None) -> None:
        faulthandler.cancel_dump_traceback_later()  # waits for stacks that are being written
        self._explain_stacks()
        if self._end.is_set() or allowed_s is None or math.isinf(allowed_s):
            self._stacks_at = math.inf
        else:
            self._stacks_at = time.monotonic() + allowed_s  # before the timer, so that no stacks lack their reason
            faulthandler.dump_traceback_later(allowed_s, file=2)

    def write_flight_record(self) -> None:
        """Writes the last collectives, and which of them are not complete. torch itself does not print them.

        Once per timeout. Waits at most RECORD_S, because the file system or torch may hang.
        """
        self._start_flight_record().join(RECORD_S)

    def _start_flight_record(self) -> threading.Thread:
        with self._starting_record:  # the heartbeat and an order of the supervisor may coincide
            if self._recording is None:
                # NCCL's recorder queries its events.
                self._recording = device_thread(self._device, self._record_flight, name="flight record")
                self._recording.start()
            return self._recording

    def _record_flight(self) -> None:
        try:
            record = flight_record(torch._C._distributed_c10d)
            if record is None:
                say(f"torch {torch.__version__} has no Flight Recorder trace of the last collectives")
            else:
                from clusterddp.failures.hangs import outline  # only a hang needs it

                self._collectives = outline(record)
                write_atomically(self._flight_record, json.dumps(record) + "\n")
        except (OSError, RuntimeError, ValueError, LookupError) as error:
            say(f"could not write torch's Flight Recorder trace: {error}")


def flight_record(bound: Any) -> dict[str, Any] | None:
    """torch's Flight Recorder trace of the last collectives, at most RECORDED of each backend. None if there is none.

    ``bound`` is torch._C._distributed_c10d. NCCL has a separate record, which torch 2.4 has only pickled. In torch 2.15
    NCCL's usual process group is a different one, whose record has a different name. torch 2.9 has no record for gloo.
    """
    records: list[dict[str, Any]] = []
    if hasattr(bound, "_dump_nccl_trace_json"):
        records.append(json.loads(bound._dump_nccl_trace_json()))
    elif hasattr(bound, "_dump_nccl_trace"):
        records.append(pickle.loads(bound._dump_nccl_trace(includeStackTraces=False)))
    if hasattr(bound, "_dump_fr_trace_file"):  # came with that argument
        records.append(json.loads(bound._dump_fr_trace_json(backend="nccl2")))
    if hasattr(bound, "_dump_fr_trace_json"):
        records.append(json.loads(bound._dump_fr_trace_json()))
    records = [record for record in records if record.get("entries")]
    entries = [entry for record in records for entry in record["entries"][-RECORDED:]]
    return {**records[0], "entries": entries} if records else None


def positions_of(thread: int) -> set[object]:
    """Where a thread is at a few moments, which is one place while it waits.

    One sample is not enough: a tight loop releases the GIL at only a few places.
    """
    positions: set[object] = set()
    for _ in range(STACK_SAMPLES):
        positions.add(position_of(current_frames()[thread]))
        time.sleep(SAMPLE_INTERVAL_S)
    return positions


def position_of(frame: FrameType) -> tuple[tuple[CodeType, int], ...]:
    """A thread's position, to the instruction of each call: unchanged while it waits.

    torch's own calls count too: an evaluation may spend all of its time in one line of the user's code.
    """
    return tuple((one.f_code, one.f_lasti) for one in outward(frame))


def begin_heartbeat(process: RankProcess, read: Settings, attempt: int, watched: WatchedSteps) -> Heartbeat:
    """This rank's heartbeat, which is off without a supervisor to receive it."""
    logs = read.run_dir.attempt_logs(attempt) if read.run_dir else Path()
    heartbeat = Heartbeat(
        read.job.watchdog if process.supervised else None,
        watched,
        send=process.report,
        flight_record=logs / f"rank-{read.ranks.rank}.collectives.json",
        rank=read.ranks.rank,
        ranks=read.ranks.world_size,
    )
    process.on_hang(heartbeat.write_flight_record)
    return heartbeat
