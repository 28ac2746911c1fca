"""What is timed in a step, on a host and on a GPU, and the advice to a run that waits for its batches."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from clusterddp.distributed import torch_patches
from clusterddp.distributed.wrapping import Buffers
from clusterddp.messages.reports import Alive
from clusterddp.protocol import IDLE, OWN, WAIT
from clusterddp.training import step_timing
from clusterddp.training.step_timing import (
    BATCH,
    MOST_PENDING,
    SAMPLE_STEPS,
    SAMPLES,
    HostClock,
    InputWait,
    StepTimes,
    StreamClock,
)

BEAT = Alive(count=0, step=0, age_s=0.0)


class Stream:
    """A clock whose marks have the times that the test chooses, and pass when it says so."""

    def __init__(self, passed: bool = True) -> None:
        self.now = 0.0
        self.all_passed = passed
        self.pool: list[float] = []

    def mark(self) -> float:
        return self.now

    def passed(self, _: Iterable[float]) -> bool:
        return self.all_passed

    def between(self, begin: float, end: float) -> float:
        assert self.all_passed
        return end - begin

    def reuse(self, marks: Iterable[float]) -> None:
        self.pool += marks


def backward(times: StepTimes, reduce: Callable[[], None]) -> None:
    """A backward with two watched parameters, after which ``reduce`` does what DDP does: its callback, too, is queued
    with the last gradient."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    first, last = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    for parameter in (first, last):
        parameter.register_post_accumulate_grad_hook(times._on_gradient)
    last.register_post_accumulate_grad_hook(lambda _: queue(reduce))
    (2 * last * first).backward()


def make(times: StepTimes, clock: Stream, data: float, own: float, save: float = 0.0) -> None:
    """A step without reductions."""
    times.ask()
    clock.now += data
    times.begin()
    clock.now += own
    times.end()
    clock.now += save


def told(times: StepTimes) -> list[Any]:
    """The steps, and the seconds in each phase."""
    return list(times.add_to(BEAT).timing or ())


def test_a_step_is_split_into_data_own_work_wait_and_save() -> None:
    """The first step, an evaluation and a suspended watchdog are not counted."""
    clock = Stream()
    times = StepTimes([], clock)
    make(times, clock, data=5.0, own=50.0)
    assert told(times) == [0, 0.0, None, None, 0.0]
    times.ask()
    clock.now += 1.0
    times.begin()
    clock.now += 2.0
    with times.aside(), times.aside():
        clock.now += 100.0
    for _ in range(2):  # backwards
        backward(times, lambda: setattr(clock, "now", clock.now + 0.25))
        clock.now += 4.0
    times.end()
    clock.now += 0.125
    with times.aside():
        clock.now += 8.0
    assert told(times)[0] == 0
    times.leave()
    assert told(times) == [1, 1.0, 10.0, 0.5, 8.125]


def test_a_wait_for_other_ranks_is_no_work_and_no_save() -> None:
    """Such as a broadcast after the optimizer's step, and one that decides about a save. In an evaluation it does not
    count, and of two, the outer one."""
    clock = Stream()
    times = StepTimes([], clock)
    make(times, clock, data=1.0, own=1.0)

    def wait(seconds: float) -> None:
        with times.waiting(), times.waiting():
            clock.now += seconds

    wait(8.0)
    times.ask()
    wait(1.0)  # for the batch
    times.begin()
    backward(times, lambda: setattr(clock, "now", clock.now + 0.25))
    clock.now += 2.0
    wait(16.0)
    with times.aside():
        wait(32.0)
    times.end()
    clock.now += 0.5
    wait(64.0)
    wait(128.0)
    times.leave()
    assert told(times) == [1, 1.0, 2.0, 0.25 + 16.0 + 64.0 + 128.0, 0.5]


def test_what_ddp_broadcasts_is_a_wait_in_the_forward_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gloo, rank 0 sends its buffers once all others receive them. A copy of the module is not timed."""
    clock = Stream()
    monkeypatch.setattr(torch_patches, "_sync_buffers", lambda _: setattr(clock, "now", clock.now + 8.0))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.BatchNorm1d(2))
        copied = copy.deepcopy(model)
        parts = {"nets": torch.nn.ModuleList([model])}
        times = StepTimes(parts.values(), clock)
        for _ in range(2):
            times.ask()
            times.begin()
            clock.now += 1.0
            for module in (model, copied):
                module.require_forward_param_sync = True
                module(torch.ones(4, 2)).sum().backward()
            Buffers(parts, 1).share()
            times.end()
        times.leave()
        assert told(times) == [1, 0.0, 1.0 + 8.0, 8.0 + 8.0, 0.0]
        times.close()
        model._sync_buffers()
        # Else the function's return ends the group's threads, by DDP's reducer, with the GIL held: it hung there once.
        del model, copied, module, parts, times
    finally:
        dist.destroy_process_group()


def test_a_rank_alone_waits_for_nobody_and_others_only_know_what_ddp_reduced() -> None:
    clock = Stream()
    alone, several = StepTimes([], clock, alone=True), StepTimes([], clock)
    for times in (alone, several):
        make(times, clock, 1.0, 1.0)
        make(times, clock, 1.0, 2.0)
        times.leave()
    assert told(alone) == [1, 1.0, 2.0, 0.0, 0.0]
    assert told(several) == [1, 1.0, None, None, 0.0]


def test_a_step_that_is_cut_by_a_stop_or_an_exception_does_not_count() -> None:
    clock = Stream()
    times = StepTimes([], clock)
    make(times, clock, 1.0, 1.0)
    times.ask()
    times.begin()

    def fail() -> None:
        raise RuntimeError

    with contextlib.suppress(RuntimeError):
        backward(times, fail)
    times.leave()
    times.leave()
    times.end()
    make(times, clock, 1.0, 1.0)
    times.leave()
    assert told(times)[0] == 1


def test_the_pace_is_the_median_of_means_of_data_and_own_work() -> None:
    """A save and waits are none of it."""
    clock = Stream()
    times = StepTimes([], clock)
    make(times, clock, 9.0, 9.0)
    for step in range(SAMPLES * SAMPLE_STEPS):
        assert times.add_to(BEAT) == replace(BEAT, timing=ANY, timing_age_s=ANY)
        times.ask()
        clock.now += 1.0
        times.begin()
        clock.now += 1000.0 if step == 30 else 2.0
        backward(times, lambda: setattr(clock, "now", clock.now + 0.5))
        times.end()
        clock.now += 0.25
    times.leave()
    assert (times.add_to(BEAT).own_s, times.add_to(BEAT).step_s) == (3.0, 3.75)


@pytest.mark.parametrize(
    "data, own, wait, stalls",
    [
        (40.0, 1.0, 0.0, [40.0]),  # a file system that does not answer
        (0.0, 1.0, 40.0, [40.0]),  # a network
        (0.0, 300.0, 0.0, []),  # the script's own evaluation, for example
        (15.0, 1.0, 14.0, []),  # too short
    ],
)
def test_a_step_that_waits_far_longer_than_others_take_is_a_stall(
    data: float, own: float, wait: float, stalls: list[float]
) -> None:
    clock = Stream()
    found: list[float] = []
    times = StepTimes([], clock)
    times.on_stall = found.append
    for each in [(100.0, 1.0, 100.0), *[(0.5, 1.0, 0.5)] * 40, (data, own, wait), (0.5, 1.0, 0.5)]:
        times.ask()
        clock.now += each[0]
        times.begin()
        clock.now += each[1]
        with times.waiting():
            clock.now += each[2]
        times.end()
    times.leave()
    assert found == stalls


def test_steps_that_always_wait_for_long_do_not_stall() -> None:
    clock = Stream()
    found: list[float] = []
    times = StepTimes([], clock)
    times.on_stall = found.append
    for _ in range(50):
        make(times, clock, data=40.0, own=1.0)
    times.leave()
    assert found == []


def test_nothing_waits_for_a_gpu_that_is_behind() -> None:
    """Steps are counted once their events have passed; of very many, the newest. Events are used again."""
    clock = Stream(passed=False)
    times = StepTimes([], clock, alone=True)
    for _ in range(MOST_PENDING + 10):
        make(times, clock, 0.0, 1.0)
    assert told(times)[0] == 0
    assert not clock.pool
    clock.all_passed = True
    times.ask()
    assert told(times)[0] == MOST_PENDING  # and the first one of the loop
    assert len(clock.pool) == 3 * (MOST_PENDING + 1)


def test_steps_are_counted_when_the_totals_were_asked_for_or_there_are_many() -> None:
    """So that a step itself only makes marks. A loop that is left early is counted at the end of the process."""
    clock = Stream()
    times = StepTimes([], clock, alone=True)
    for _ in range(BATCH):
        make(times, clock, 0.0, 1.0)
    assert not clock.pool
    make(times, clock, 0.0, 1.0)
    assert told(times)[0] == BATCH - 1  # without the first
    make(times, clock, 0.0, 1.0)
    assert told(times)[0] == BATCH
    make(times, clock, 0.0, 1.0)
    make(times, clock, 0.0, 1.0)
    times.ask()
    times.begin()
    times.close()
    assert told(times)[0] == BATCH + 3


class Event:
    """A CUDA event. Its device works off events in the order in which they were recorded on a stream."""

    made: ClassVar[list[Event]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.stream: Any = None
        self.passed = False
        Event.made.append(self)

    def record(self, stream: Any) -> None:
        self.stream, self.passed = stream, False

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: Event) -> float:
        if not (self.passed and end.passed):
            raise RuntimeError("CUDA error: device not ready")
        return 1500.0

    def synchronize(self) -> None:
        raise AssertionError("it must never wait")

    wait = synchronize


class UsedStream(NamedTuple):
    """A stream of a device that has nothing to do but the events on it."""

    name: str
    device: torch.device

    def query(self) -> bool:
        return all(event.passed for event in Event.made if event.stream == self)


class Gpu:
    """The current stream of a GPU, and whether it captures a graph."""

    stream, capturing = "the usual", False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = step_timing.torch.cuda
        monkeypatch.setattr(Event, "made", [])
        monkeypatch.setattr(cuda, "Event", Event)
        monkeypatch.setattr(cuda, "current_stream", lambda device: UsedStream(self.stream, device))
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(cuda, "synchronize", lambda *_: pytest.fail("it must never wait"))

    def work_off(self, stream: str, events: int | None = None) -> None:
        """``events``: how many more; all if None."""
        due = [event for event in Event.made if event.stream[0] == stream and not event.passed]
        for event in due[:events]:
            event.passed = True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def gpu_step(times: StepTimes) -> None:
    times.ask()
    times.begin()
    times.end()


def test_the_marks_of_a_gpu_are_events_on_its_stream_from_a_pool(gpu: Gpu) -> None:
    times = step_timing.step_times([], torch.device("cuda:1"), world_size=1)
    assert isinstance(times._clock, StreamClock)
    for _ in range(10):
        for _ in range(BATCH):
            gpu_step(times)
        gpu.work_off("the usual")
    times.leave()
    assert {event.stream for event in Event.made} == {("the usual", torch.device("cuda:1"))}
    assert len(Event.made) < 3 * (MOST_PENDING + 2)
    assert told(times)[0] > 8 * BATCH
    assert told(times)[1:] == [1.5 * told(times)[0], 1.5 * told(times)[0], 0.0, 1.5 * told(times)[0]]


def test_where_the_device_is_follows_from_the_marks_that_it_has_passed(gpu: Gpu) -> None:
    """In step 2 of a host that makes step 4: in its own work, in the reduction, after it; in the next; at its end."""
    times = step_timing.step_times([], torch.device("cuda:1"), world_size=2)
    assert times.on_device() is None  # outside the loop
    for _ in range(2):
        times.ask()
        times.begin()
        backward(times, lambda: None)
        times.end()
    times.ask()
    times.begin()
    found: list[Any] = []
    while (before := sum(event.passed for event in Event.made)) < len(Event.made):
        if not found or found[-1] != times.on_device():
            found.append(times.on_device())
        gpu.work_off("the usual", events=1)
        assert sum(event.passed for event in Event.made) == before + 1
    assert found == [(-1, OWN), (-1, WAIT), (-1, OWN), (0, OWN), (0, WAIT), (0, OWN), (1, OWN)]
    assert times.on_device() == (1, IDLE)
    with times.waiting():
        assert times.on_device() == (1, OWN)
        gpu.work_off("the usual")
        assert times.on_device() == (1, WAIT)  # with its host
    times.end()
    gpu.work_off("the usual")
    assert times.on_device() == (0, IDLE)


def test_no_event_is_recorded_while_a_graph_is_captured(gpu: Gpu) -> None:
    """It would become a part of the graph. What lacks a mark takes 0 s."""
    times = step_timing.step_times([], torch.device("cuda:1"), world_size=1)
    gpu_step(times)
    times.ask()
    times.begin()
    made = len(Event.made)
    gpu.capturing = True
    with times.aside():
        pass
    assert len(Event.made) == made
    gpu.capturing = False
    times.end()
    times.ask()
    gpu.work_off("the usual")
    times.leave()
    assert told(times) == [1, 1.5, 1.5, 0.0, 1.5]


def test_a_mark_on_another_stream_that_is_not_passed_yet_raises_nothing(gpu: Gpu) -> None:
    """A script may evaluate on a stream of its own, which the usual one never waits for."""
    times = step_timing.step_times([], torch.device("cuda:1"), world_size=1)
    gpu_step(times)
    times.ask()
    times.begin()
    gpu.stream = "for evaluations"
    with times.aside():
        gpu.stream = "the usual"
    times.end()
    times.ask()
    gpu.work_off("the usual")
    times.leave()
    assert told(times)[0] == 0
    gpu.work_off("for evaluations")
    times.leave()
    assert told(times)[0] == 1


def test_an_error_of_cuda_does_not_hide_the_scripts_own(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call fails after it, also those at the end of the process."""
    times = step_timing.step_times([], torch.device("cuda:1"), world_size=1)
    gpu_step(times)
    times.ask()

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for name in ("record", "query", "elapsed_time"):
        monkeypatch.setattr(Event, name, fail)
    times.close()
    assert told(times)[0] == 0


def test_the_hosts_clock_is_the_steps_clock_on_a_cpu() -> None:
    assert isinstance(step_timing.step_times([], torch.device("cpu"), 2)._clock, HostClock)


def test_a_loop_of_which_only_the_boundaries_are_known_is_timed_between_them() -> None:
    """The first boundary is the end of the first step. Each mark is used again once, also as a part of two steps."""

    class Marks(Stream):
        """Marks are objects, as events are."""

        def mark(self) -> Any:
            self.made = [*getattr(self, "made", []), [self.now]]
            return self.made[-1]

        def between(self, begin: Any, end: Any) -> float:
            return float(end[0] - begin[0])

    clock = Marks()
    times = StepTimes([], clock)
    for step in range(BATCH + 1):
        clock.now += 100.0 if step == 0 else 2.0
        if step == 1:
            with times.waiting():
                clock.now += 0.5
            with times.aside():
                clock.now += 7.0
        times.turn()
    times._knows_waits = True
    assert told(times) == [BATCH, 0.0, 2.0 * BATCH, 0.5, 0.0]
    assert len({id(mark) for mark in clock.pool}) == len(clock.pool) == BATCH + 4
    times.close()


# --- A run that waits for its batches is told so once, and what to change


def reported(shares: list[float], seconds: float = 60.0, workers: int = 0) -> list[Any]:
    """The events of a run with a sample of so many seconds for each share of waiting."""
    events: list[Any] = []
    wait = InputWait(events.append, lambda: 500, workers)
    data = other = 0.0
    for share in shares:
        data, other = data + share * seconds, other + (1 - share) * seconds
        wait.look((data, other * 0.5, other * 0.25, other * 0.25))
    return events


def test_waiting_for_more_than_a_tenth_of_the_time_is_said_once() -> None:
    (event,) = reported([0.2] * 50)
    assert (event.name, event.step, event.percent) == ("waits_for_data", 500, 20)
    assert not reported([0.09] * 50)


def test_what_counts_is_the_time_since_the_last_samples() -> None:
    assert not reported([0.9] + [0.0] * 50), "the start of the workers"
    assert reported([0.0] * 50 + [0.3] * SAMPLES)


def test_a_short_run_is_not_told() -> None:
    assert not reported([0.5] * 50, seconds=0.1)
    assert reported([0.5] * 50, seconds=1.0)


def test_the_advice_depends_on_workers_and_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing.os, "sched_getaffinity", lambda _: range(8))
    advice = [reported([0.2] * 50, workers=workers)[0].advice for workers in (0, 2, 8)]
    assert "num_workers=4" in advice[0] and "num_workers, which is 2" in advice[1] and "cpus_per_task" in advice[2]


def test_the_step_timing_passes_its_totals_on() -> None:
    """By the clock that it has anyway."""
    times, seen = StepTimes([], HostClock(), alone=True), []
    times.on_sample = lambda sums: seen.append(len(sums))
    for _ in range(3 * SAMPLE_STEPS):
        times.ask()
        times.begin()
        times.end()
    times.close()
    assert seen == [4, 4]
