"""The time that a rank's steps spend on waiting for the batch, own work, waiting for other ranks, and a save.

The steps of all ranks take equally long, because each waits for the slowest in DDP's all_reduce. That wait is the time
from the end of the backward until DDP has reduced the last gradients, between two callbacks at the end of the backward.
It includes communication that did not overlap with the backward. Waits are also DDP's broadcasts of buffers, in which
rank 0 waits for all others (gloo sends once the receiver is ready), and the collectives of ``ctx`` and of the loop. Own
work is what remains of a step: forward, backward, optimizer. It includes the script's own collectives, in which a rank
may wait for a straggler. Evaluations and ``ctx.unwatched()`` belong to no phase.

On a GPU all times are those of the stream, between CUDA events that are queried once a later step begins: the training
thread never waits for the GPU, and time in which the GPU still works on earlier steps counts as work, not as a wait for
the batch.

A step itself makes six marks, and two for each broadcast of buffers. Steps are counted several at a time: once a
heartbeat has asked for the totals, or when there are BATCH.
"""

from __future__ import annotations

import operator
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from clusterddp.distributed import torch_patches
from clusterddp.distributed.wrapping import ddp_modules
from clusterddp.history.event import Reported
from clusterddp.history.steps import WaitsForData
from clusterddp.messages.reports import Alive, Totals
from clusterddp.protocol import IDLE, OWN, WAIT
from clusterddp.reporter import counted
from clusterddp.rundir.timing import PHASES

#: The pace, by which stragglers are found, is the median of this many samples, each the mean of this many steps.
SAMPLE_STEPS, SAMPLES = 20, 5
#: A rank stalls if it waits in a step for its batch and for other ranks for more seconds than this, and for longer than
#: so many steps take: the network was cut off, or a file system did not answer.
STALL_S, STALL_STEPS = 30.0, 5
#: The number of steps that are counted at a time, and the most that wait for the GPU to pass their events. Beyond
#: that, the oldest are not counted.
BATCH, MOST_PENDING = 32, 64


class Clock(Protocol):
    """Makes marks in the course of a step."""

    def mark(self) -> Any: ...
    def passed(self, marks: Iterable[Any]) -> bool:
        """Whether the times of all of the marks are known. Does not wait."""
        ...

    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two marks that were passed."""
        ...

    def reuse(self, marks: Iterable[Any]) -> None:
        """Takes back marks that are no longer needed."""
        ...


class HostClock:
    """Marks are seconds."""

    mark = staticmethod(time.perf_counter)

    def passed(self, _marks: Iterable[float]) -> bool:
        return True

    def between(self, begin: float, end: float) -> float:
        return end - begin

    def reuse(self, marks: Iterable[float]) -> None:
        """Has no pool, because marks are numbers."""


class StreamClock:
    """Marks are CUDA events on the current stream of a device, from a pool. None while a graph is being captured: an
    event would become a part of the graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: list[torch.cuda.Event] = []
        #: The stream of the last mark.
        self._stream: torch.cuda.Stream | None = None

    def mark(self) -> torch.cuda.Event | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream(self._device)
        event.record(self._stream)
        return event

    def is_idle(self) -> bool:
        """Whether the stream has nothing left to do."""
        return self._stream is None or self._stream.query()

    def passed(self, marks: Iterable[torch.cuda.Event | None]) -> bool:
        return all(mark is None or mark.query() for mark in marks)  # type: ignore[no-untyped-call]

    def between(self, begin: torch.cuda.Event | None, end: torch.cuda.Event | None) -> float:
        return begin.elapsed_time(end) / 1000 if begin is not None and end is not None else 0.0

    def reuse(self, marks: Iterable[torch.cuda.Event | None]) -> None:
        self._pool += [mark for mark in marks if mark is not None]


class _Step:
    """The marks of a step: the loop asks for the batch, gets it, the step's work is done, and the loop continues.

    Pairs of marks: ``waits`` for other ranks, those from index ``late`` on after the work, and ``asides``, which belong
    to no phase.
    """

    __slots__ = ("asides", "asked", "begun", "done", "late", "left", "waits")

    def __init__(self, asked: Any) -> None:
        self.asked = asked
        self.begun = self.done = self.left = None
        self.late: int | None = None
        self.waits: list[Any] = []
        self.asides: list[Any] = []

    def marks(self) -> list[Any]:
        """All marks, of which the first also belongs to the next step. They may be passed in any order, because the
        script may have changed the stream meanwhile."""
        return [self.left, self.asked, self.begun, self.done, *self.waits, *self.asides]


class _WholeStep(_Step):
    """A step of which only the beginning and the end are known: each is two marks in one."""

    __slots__ = ()

    def marks(self) -> list[Any]:
        return [self.left, self.asked, *self.waits, *self.asides]


class StepTimes:
    """Times the steps of a loop, for its thread. ``add_to`` is for any thread.

    Args:
        parts: those of the run, of which DDP modules are watched.
        clock: where the steps' work is done.
        alone: whether there is only one rank, which never waits.
    """

    def __init__(self, parts: Iterable[Any], clock: Clock, *, alone: bool = False) -> None:
        self._clock = clock
        self._step: _Step | None = None
        self._working = False  # between the batch and the end of the step
        self._pending: deque[_Step] = deque()
        self._wanted = False  # a heartbeat has asked for the totals since they were last counted
        self._warm = False  # the first step compiles and connects
        self._reducing = False
        self._knows_waits = alone
        self._steps = 0
        self._sums = [0.0] * len(PHASES)
        #: The steps and the sums, and when they were added up, on the monotonic clock.
        self._totals = self._steps, self._sums, time.monotonic()
        #: Of the pace: the steps, their own time and their whole time at the last sample; the samples.
        self._sampled = (0, 0.0, 0.0)
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._pace: tuple[float, float] | None = None
        #: Called with the seconds in each phase, once per sample.
        self.on_sample: Callable[[Sequence[float]], None] = lambda _: None
        #: Called after a step in which this rank stalled, with the seconds.
        self.on_stall: Callable[[float], None] = lambda _: None
        self._hooks: list[Any] = []
        for module in dict.fromkeys(module for part in parts for module in ddp_modules(part)):
            self._watch(module)

    # --- in the loop

    def ask(self) -> None:
        """The loop asks for the next batch. The step before it, and its save, are over."""
        self._step = _Step(self._leave())

    def begin(self) -> None:
        """The batch is there."""
        if self._step is not None:
            self._step.begun = self._clock.mark()
            self._working, self._reducing = True, False

    def end(self) -> None:
        """The step's work is done. A save may follow."""
        if self._working and self._step is not None:
            self._step.done = self._clock.mark()
            self._working = False

    def turn(self) -> None:
        """A step ends and the next one begins, for a loop of which only that is known. The first call is the end of the
        first step, which is not timed."""
        mark, step = self._clock.mark(), self._step
        if step is None:
            self._warm = True
        else:
            step.done = step.left = mark
            self._pending.append(step)
            if self._wanted or len(self._pending) >= BATCH:
                self._count_passed()
        self._step = following = _WholeStep(mark)
        following.begun = mark
        self._working, self._reducing = True, False

    def leave(self) -> None:
        """The loop has ended, except for the last save. Called again, counts steps that a GPU has made meanwhile."""
        self._leave()
        self._step = None
        self._count_passed()

    def close(self) -> None:
        """Counts the steps of a loop that was left early, and removes what was added to the modules."""
        with suppress(RuntimeError):  # of CUDA, which the script also gets
            self.leave()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        torch_patches.forget_broadcasts(self.waiting)

    def aside(self) -> AbstractContextManager[None]:
        """The body, such as an evaluation, is no part of the step. Only the outermost of several counts."""
        return self._span(self._step.asides) if self._working and self._step is not None else nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        """The body waits for other ranks. Inside ``aside`` and another wait it does not count."""
        step = self._step
        if step is None or (step.done is None and not self._working):
            return nullcontext()
        if not self._working and step.late is None:
            step.late = len(step.waits)
        return self._span(step.waits)

    @contextmanager
    def _span(self, marks: list[Any]) -> Iterator[None]:
        step = self._step
        assert step is not None
        in_main_thread = threading.current_thread() is threading.main_thread()
        if len(marks) % 2 or len(step.asides) % 2 or not in_main_thread:
            yield
            return
        marks.append(self._clock.mark())
        try:
            yield
        finally:
            marks.append(self._clock.mark())

    def _leave(self) -> Any:
        mark, step = self._clock.mark(), self._step
        if step is not None and step.done is not None:
            step.left = mark
            self._pending.append(step)
            if self._wanted or len(self._pending) >= BATCH:
                self._count_passed()
        return mark

    # --- DDP

    def _watch(self, module: DistributedDataParallel) -> None:
        """DDP queues its callback that waits for the reductions with the last gradient. A callback queued with any
        gradient therefore runs before it, and one queued in that callback runs after it."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        torch_patches.around_broadcasts(module, self.waiting)
        if trained:  # the last parameter usually gets its gradient first
            hook = trained[-1].register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _on_gradient(self, _parameter: torch.Tensor) -> None:
        if self._working and not self._reducing:
            self._reducing = True
            torch.autograd.Variable._execution_engine.queue_callback(self._before_reduction)

    def _before_reduction(self) -> None:
        if self._step is not None:
            self._step.waits.append(self._clock.mark())
            torch.autograd.Variable._execution_engine.queue_callback(self._after_reduction)

    def _after_reduction(self) -> None:
        if self._step is not None and len(self._step.waits) % 2:
            self._step.waits.append(self._clock.mark())
        self._reducing, self._knows_waits = False, True

    # --- where the device is

    def on_device(self) -> tuple[int, str] | None:
        """Where the device is: the step, relative to the number of steps that the host has completed, and OWN, WAIT or
        IDLE (``protocol.py``). None on a CPU and outside the loop.

        For a thread of ``device_thread``, while the loop's is at rest. Does not wait.
        """
        clock, current = self._clock, self._step
        if not isinstance(clock, StreamClock) or current is None:
            return None
        newest = 1 if current.done is None else 0
        steps = [*self._pending, current]
        for number, step in enumerate(steps, newest + 1 - len(steps)):
            if (does := _doing(step, clock)) is not None:
                return number, does
        if not clock.is_idle():
            return newest, OWN
        return newest, WAIT if len(current.waits) % 2 else IDLE

    # --- the results

    def _count_passed(self) -> None:
        """Counts the oldest steps, up to the first that the GPU has not passed. Drops surplus steps."""
        self._wanted = False
        pending, passed = self._pending, self._clock.passed
        while pending and passed(pending[0].marks()):
            self._count(pending.popleft())
        while len(pending) > MOST_PENDING:
            pending.popleft()
        self._totals = self._steps, self._sums, time.monotonic()

    def _count(self, step: _Step) -> None:
        between = self._clock.between
        wait_s = late_s = aside_s = 0.0
        if step.waits:
            wait_s = sum(map(between, step.waits[::2], step.waits[1::2]))
            if step.late is not None:
                late_s = sum(map(between, step.waits[step.late :: 2], step.waits[step.late + 1 :: 2]))
        if step.asides:
            aside_s = sum(map(between, step.asides[::2], step.asides[1::2]))
        own_s = max(0.0, between(step.begun, step.done) - (wait_s - late_s) - aside_s)
        seconds = (between(step.asked, step.begun), own_s, wait_s, between(step.done, step.left) - late_s)
        self._clock.reuse(step.marks()[1:])
        if not self._warm:
            self._warm = True
            return
        stalled_s = seconds[0] + wait_s
        if self._steps and stalled_s > max(STALL_S, STALL_STEPS * sum(self._sums) / self._steps):
            self.on_stall(round(stalled_s, 3))
        self._steps += 1
        self._sums = list(map(operator.add, self._sums, seconds))
        if self._steps % SAMPLE_STEPS == 0:
            self._sample()

    def _sample(self) -> None:
        """Adds to the pace."""
        data_s, own_s, wait_s, save_s = self._sums
        now = (self._steps, data_s + own_s, data_s + own_s + wait_s + save_s)
        steps, worked_s, all_s = (new - old for new, old in zip(now, self._sampled, strict=True))
        self._sampled = now
        self._samples.append(worked_s / steps)
        if self._knows_waits and len(self._samples) == SAMPLES:
            self._pace = (statistics.median(self._samples), all_s / steps)
        self.on_sample(self._sums)

    def add_to(self, beat: Alive) -> Alive:
        """The heartbeat with the pace, if it is known, and the totals up to the first step boundary since the last
        heartbeat, or a later one."""
        self._wanted = True
        steps, sums, counted_at = self._totals
        data_s, own_s, wait_s, save_s = (round(seconds, 6) for seconds in sums)
        split = (own_s, wait_s) if self._knows_waits else (None, None)
        timing: Totals = (steps, data_s, *split, save_s)
        pace_s, step_s = self._pace or (None, None)
        age_s = round(time.monotonic() - counted_at, 3)
        return replace(beat, timing=timing, timing_age_s=age_s, own_s=pace_s, step_s=step_s)


def _doing(step: _Step, clock: Clock) -> str | None:
    """Whether a device that is in this step does its OWN work there or WAITs. None if it has passed all marks."""
    late = len(step.waits) if step.late is None else step.late
    in_order = [(step.asked, OWN), (step.begun, OWN)]
    in_order += [(mark, WAIT if number % 2 else OWN) for number, mark in enumerate(step.waits)]
    in_order[2 + late : 2 + late] = [(step.done, OWN)]
    in_order.append((step.left, OWN))
    return next((does for mark, does in in_order if mark is not None and not clock.passed([mark])), None)


def step_times(parts: Iterable[Any], device: torch.device, world_size: int) -> StepTimes:
    """The timing of a rank's steps on its device."""
    clock = StreamClock(device) if device.type == "cuda" else HostClock()
    return StepTimes(parts, clock, alone=world_size == 1)


#: Shorter evaluations are reported together, so that one in every step does not fill the history.
SHORTEST_S = 1.0


class Evaluations:
    """Adds up evaluations, and passes their seconds to ``report`` when they are worth an event."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self._report = report
        self._running = 0
        self._begun = self._seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """The body is an evaluation, or a part of one that is already measured."""
        if not self._running:
            self._begun = time.monotonic()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._seconds += time.monotonic() - self._begun
                if self._seconds >= SHORTEST_S:
                    self.report()

    def report(self) -> None:
        """Reports evaluations that have not been reported yet."""
        if self._seconds:
            self._report(round(self._seconds, 4))
            self._seconds = 0.0


#: Waiting is reported once it was more than MOST of the last SAMPLES samples, and, to spare short runs, LEAST_S in all.
MOST, LEAST_S = 0.10, 10.0


class InputWait:
    """Looks at the totals of the step timing now and then.

    Args:
        report: adds an event to the history.
        step: the step of the run.
        workers: the number of workers that read for this rank.
    """

    def __init__(self, report: Callable[[Reported], None], step: Callable[[], int], workers: int) -> None:
        self._report, self._step, self._workers = report, step, workers
        #: The seconds of data and of all phases, at the last samples.
        self._totals: deque[tuple[float, float]] = deque(maxlen=SAMPLES + 1)
        self._said = False

    def look(self, sums: Sequence[float]) -> None:
        """``sums``: the seconds in each phase so far, of which the first is the wait for batches."""
        self._totals.append((sums[0], sum(sums)))
        if self._said or len(self._totals) <= SAMPLES or sums[0] < LEAST_S:
            return
        (data_before, all_before), (data, everything) = self._totals[0], self._totals[-1]
        share = (data - data_before) / max(everything - all_before, 1e-9)
        if share > MOST:
            self._said = True
            self._report(WaitsForData(step=self._step(), percent=round(100 * share), advice=self._advice()))

    def _advice(self) -> str:
        cpus = len(os.sched_getaffinity(0))
        if not self._workers:
            return f"the training process reads the samples itself. Pass num_workers={min(4, cpus)} to the loader"
        if self._workers < cpus:
            more = f"increase the loader's num_workers, which is {self._workers}"
            return f"{more}, because this process may use {counted(cpus, 'CPU')}"
        most = f"{counted(self._workers, 'worker')} may use only {counted(cpus, 'CPU')}"
        return f"{most}. Request more CPUs (cpus_per_task), or make the samples cheaper to read"
