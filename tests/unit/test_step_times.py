"""What is timed in a step: on a host, and on a GPU, whose events pass later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from clusterddp.training import timing
from clusterddp.training.timing import MOST_PENDING, SAMPLE_STEPS, SAMPLES, HostClock, StepTimes, StreamClock


class Stream:
    """A clock whose marks have the times that the test chooses, and pass when it says so."""

    def __init__(self, passed: bool = True) -> None:
        self.now = 0.0
        self.all_passed = passed
        self.pool: list[float] = []

    def mark(self) -> float:
        return self.now

    def passed(self, _: float) -> bool:
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
    found: list[Any] = times.told()["timing"]
    return found


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
    counts = times.told(histograms=True)["histograms"]
    assert counts == {"data_s": [[0, 1]], "own_s": [[3, 1]], "wait_s": [[-1, 1]], "save_s": [[3, 1]]}


def test_a_rank_alone_waits_for_nobody_and_others_only_know_what_ddp_reduced() -> None:
    clock = Stream()
    alone, several = StepTimes([], clock, alone=True), StepTimes([], clock)
    for times in (alone, several):
        make(times, clock, 1.0, 1.0)
        make(times, clock, 1.0, 2.0)
        times.leave()
    assert told(alone) == [1, 1.0, 2.0, 0.0, 0.0]
    assert told(several) == [1, 1.0, None, None, 0.0]
    assert several.told(histograms=True)["histograms"].keys() == {"data_s", "save_s"}


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
        assert "own_s" not in times.told()
        times.ask()
        clock.now += 1.0
        times.begin()
        clock.now += 1000.0 if step == 30 else 2.0
        backward(times, lambda: setattr(clock, "now", clock.now + 0.5))
        times.end()
        clock.now += 0.25
    times.leave()
    assert (times.told()["own_s"], times.told()["step_s"]) == (3.0, 3.75)


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
    assert told(times)[0] == MOST_PENDING - 1  # and the first one of the loop
    assert len(clock.pool) == 3 * MOST_PENDING


class Event:
    """A CUDA event that has passed once it was asked twice."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.recorded: list[Any] = []
        self.asked = 0

    def record(self, stream: Any) -> None:
        self.recorded.append(stream)
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def elapsed_time(self, end: Event) -> float:
        return 1500.0 if end is not self else 0.0

    def synchronize(self) -> None:
        raise AssertionError("it must never wait")

    wait = synchronize


def test_events_are_recorded_on_the_devices_stream_and_never_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capturing = False
    device = torch.device("cuda:1")
    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch.cuda, "current_stream", lambda device: ("stream of", device))
    monkeypatch.setattr(timing.torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", Event(True).synchronize)
    times = timing.step_times([], device, world_size=1)
    clock = times._clock
    assert isinstance(clock, StreamClock)
    first, second = clock.mark(), clock.mark()
    assert isinstance(first, Event) and isinstance(second, Event)
    assert first.recorded == [("stream of", device)]
    assert (clock.passed(first), clock.passed(first)) == (False, True)
    assert clock.between(first, second) == 1.5
    clock.reuse([first])
    assert clock.mark() is first
    capturing = True
    assert clock.mark() is None
    assert clock.passed(None)
    assert clock.between(None, second) == 0.0
    clock.reuse([None])
    capturing = False
    for _ in range(4):
        times.ask()
        times.begin()
        times.end()
    times.leave()
    assert told(times) == [2, 3.0, 3.0, 0.0, 3.0]  # the last one has not passed yet


def test_the_hosts_clock_is_the_steps_clock_on_a_cpu() -> None:
    assert isinstance(timing.step_times([], torch.device("cpu"), 2)._clock, HostClock)
