"""When a rank records a profile, and what becomes of it when the run ends or stops."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from clusterddp.distributed.process_group import StoreAddress
from clusterddp.environment import RankEnvironment
from clusterddp.jobdef.job import Job, ProfiledSteps
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.training.profiling import Profiling, activities
from clusterddp.training.settings import Settings
from tests.waiting import wait_until

CPU, CUDA = ProfilerActivity.CPU, ProfilerActivity.CUDA
Told = list[tuple[str, dict[str, Any]]]


class Recorder:
    """Stands for torch's profiler, which crashed this process once (2.13, kineto, in a test among thousands).

    tests/ranks/test_steering.py records with torch's.
    """

    def __init__(self, *, activities: object) -> None:
        assert activities == [CPU]

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text('{"traceEvents": []}')


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clusterddp.training.profiling.profile", Recorder)


def rank_of(run: RunDirectory, planned: ProfiledSteps | None = None, rank: int = 0) -> tuple[Profiling, Told]:
    told: Told = []
    job = Job("x", module="x", profile=planned)
    ranks = RankEnvironment(rank, rank, 4, 4, 0, ("n1",), None, None, "local")
    settings = Settings(ranks, run, 1, "cpu", "gloo", job, 0, StoreAddress("", 0, ""), {}, profile=True)
    report = lambda event, **values: told.append((event, values))  # noqa: E731
    return Profiling(settings, 1, torch.device("cpu"), report, nullcontext), told


def make_steps(profiling: Profiling, begin: int, count: int) -> None:
    for step in range(begin, begin + count):
        profiling.at_boundary(step)
        torch.ones(4).sum()


def test_a_gpu_is_recorded_where_the_rank_has_one_and_torch_can() -> None:
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    assert activities(gpu, {CPU, CUDA}) == [CPU, CUDA]
    assert activities(gpu, {CPU}) == activities(cpu, {CPU, CUDA}) == [CPU]


def test_a_profile_that_ends_with_the_training_has_the_steps_until_there(run: RunDirectory) -> None:
    """And the script's end waits for it."""
    profiling, told = rank_of(run, ProfiledSteps(steps=50, at=2, ranks=(0, 3)))
    make_steps(profiling, 0, 5)
    profiling.end()
    profiling.close(wait=True)
    file = "profiles/attempt-1/rank-0-step-2.pt.trace.json.gz"
    assert told == [("profiling", {"step": 2, "steps": 50}), ("profiled", {"step": 2, "steps": 3, "file": file})]
    assert (run.path / file).exists()


def test_only_the_named_ranks_record_the_jobs_profile(run: RunDirectory) -> None:
    profiling, told = rank_of(run, ProfiledSteps(steps=2, at=1, ranks=(0, 3)), rank=1)
    make_steps(profiling, 0, 5)
    assert told == []


def test_a_rank_records_one_profile_at_a_time(run: RunDirectory) -> None:
    """A request that is refused changes nothing, and the rank records again when the first is done."""
    profiling, told = rank_of(run, ProfiledSteps(steps=9, at=4))
    assert profiling.request("7", 2) is None
    assert profiling.request("8", 2) == "it is already recording a profile"
    make_steps(profiling, 3, 2)
    assert profiling.request("8", 2) == "it is already recording a profile"
    assert [words for _, words in told][1:] == [{"reason": "a different profile is being recorded at step 4"}]
    make_steps(profiling, 5, 1)
    assert profiling.request("9", 1) is None
    make_steps(profiling, 6, 2)
    profiling.close(wait=True)
    stored = [words for event, words in told if event == "profiled"]
    assert [(words["request"], words["step"], words["steps"]) for words in stored] == [("7", 3, 2), ("9", 6, 1)]


def test_a_stop_drops_what_is_being_recorded(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a call of the profiler, which could take seconds to end."""
    profiling, told = rank_of(run)
    profiling.request("7", 20)
    make_steps(profiling, 3, 6)
    recording = profiling._recording
    assert recording is not None
    with monkeypatch.context() as patched:
        patched.setattr(recording.profiler, "stop", lambda: pytest.fail("the stop waits for the profiler"))
        profiling.drop("preemption")
        profiling.close(wait=True)
    recording.profiler.stop()
    words = "the run stopped (preemption) after 5 of 20 steps of the profile"
    assert told[1:] == [("not_profiled", {"reason": words, "request": "7"})]
    assert profiling.request("8", 1) == "the run stopped (preemption)"
    assert not run.profiles.exists()


def test_a_stop_drops_what_is_being_stored(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended, and leaves nothing."""
    endless = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr("clusterddp.training.profiling.module_command", lambda _: endless)
    profiling, told = rank_of(run)
    profiling.request("7", 1)
    make_steps(profiling, 3, 2)
    profiling.drop("preemption")
    wait_until(lambda: len(told) == 2, "the thread to report")
    file = "profiles/attempt-1/rank-0-step-3.pt.trace.json.gz"
    words = f"could not store {file}: the run stopped (preemption)"
    assert told[1] == ("not_profiled", {"reason": words, "request": "7"})


def test_a_failed_script_does_not_wait_for_its_profile_and_says_what_became_of_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is being recorded or, as the loop has ended it already, stored."""
    endless = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr("clusterddp.training.profiling.module_command", lambda _: endless)
    for ended, words in (
        (False, "the script failed after 1 of 9 steps of the profile"),
        (True, "could not store profiles/attempt-1/rank-0-step-3.pt.trace.json.gz: the script failed"),
    ):
        profiling, told = rank_of(run)
        profiling.request("7", 9)
        make_steps(profiling, 3, 2)
        recording = profiling._recording
        assert recording is not None
        if ended:
            profiling.end()
        profiling.close(wait=False)
        if not ended:
            recording.profiler.stop()
        assert told[1:] == [("not_profiled", {"reason": words, "request": "7"})]
        assert profiling._process is None or profiling._process.poll() is not None


def test_a_request_that_waits_for_a_step_is_answered_when_there_is_none(run: RunDirectory) -> None:
    for end, words in (("drop", "the run stopped (TERM)"), ("close", "its training ended")):
        profiling, told = rank_of(run)
        assert profiling.request("7", 2) is None
        profiling.drop("TERM") if end == "drop" else profiling.close(wait=True)
        assert told == [("not_profiled", {"reason": f"{words} before its next step", "request": "7"})]


def test_a_profiler_of_the_script_is_left_alone(run: RunDirectory) -> None:
    profiling, told = rank_of(run)
    with profile(activities=[CPU]) as own:
        profiling.request("7", 2)
        make_steps(profiling, 3, 3)
    assert [event for event, _ in told] == ["not_profiled"] and "is running torch's profiler itself" in told[0][1][
        "reason"
    ]
    assert any(event.key == "aten::sum" for event in own.key_averages())
    assert profiling.request("8", 2) is None


def test_a_profile_that_cannot_be_stored_says_why(run: RunDirectory) -> None:
    """Training continues."""
    run.profiles.write_text("not a folder")
    profiling, told = rank_of(run)
    profiling.request("7", 1)
    make_steps(profiling, 3, 2)
    profiling.close(wait=True)
    assert told[1][0] == "not_profiled" and "could not store " in told[1][1]["reason"]
