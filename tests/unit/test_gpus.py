"""What NVML says of a rank's GPUs: read by a stand-in of nvidia-ml-py, reported, shown, and counted against a node."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from clusterddp.cli import list as table
from clusterddp.environment import RankEnvironment
from clusterddp.failures import exclusion
from clusterddp.failures.hangs import EXPLAINED_S, Hang, StillSlow, Watch
from clusterddp.history.failures import GpuFault, Hung, Slow
from clusterddp.messages import orders
from clusterddp.messages.reports import End, Gpu, Report
from clusterddp.report import efficiency as report_gpus
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.timing import GPU_FIGURES, TimedInterval, TimingLines, read_timings
from clusterddp.slurm.run_states import Cause, RunState
from clusterddp.supervisor.attempt_state import FAULT_S, Broadcast, GpuFigures, Record, State
from clusterddp.supervisor.decide import step
from clusterddp.supervisor.verdict import FirstFailure, RankEnd, failure_text, judge
from clusterddp.worker import gpus
from tests.histories import view
from tests.reports import beat_of, reported
from tests.timings import write_timings
from tests.unit.test_decide import HANG, JOB, NOW, after
from tests.wording import raises

NVML = Path(__file__).parents[1] / "nvml"
ONE = {"uuid": "GPU-a", "pci": "0000:3B:00.0", "minor": 5, "busy": 40, "used": 61, "milliwatts": 412_300, "celsius": 66}
OTHER = {"uuid": "GPU-b", "pci": "0000:5E:00.0", "minor": 6, "busy": 80, "used": 10, "milliwatts": 300_000}


class Driver:
    """The stand-in's state."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def has(self, *found: Mapping[str, Any], xids: list[tuple[int, int]] | None = None) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps({"gpus": found, "xids": xids or []}))
        part.replace(self.file)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.syspath_prepend(str(NVML))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("NVML_STATE", str(tmp_path / "nvml.json"))
    driver = Driver(tmp_path / "nvml.json")
    driver.has(ONE, OTHER)
    return driver


def numbers(found: list[gpus.Gpu]) -> list[int | None]:
    return [gpu.number for gpu in found]


@pytest.mark.parametrize(
    ("listed", "local_rank", "ranks", "expected"),
    [
        (None, 1, 2, [6]),
        ("1,0", 0, 2, [6]),
        ("GPU-b", 3, 4, [6]),  # Slurm has bound it
        ("0,1", 0, 1, [5, 6]),
        ("", 0, 1, []),
        ("7", 0, 1, []),
    ],
)
def test_a_ranks_gpus_are_those_that_cuda_shows_it(
    driver: Driver, listed: str | None, local_rank: int, ranks: int, expected: list[int]
) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert numbers(gpus.visible(environ, local_rank, ranks)) == expected


@pytest.mark.parametrize(("identity", "number"), [("b", 6), ("0000:3B:00.0 on n3", 5), ("c", None)])
def test_a_gpu_is_found_by_what_torch_calls_it(driver: Driver, identity: str, number: int | None) -> None:
    """Its UUID, or with an old torch its PCI address."""
    gpu = gpus.identified(identity)
    assert (gpu and gpu.number) == number


T = TypeVar("T")


def watched() -> tuple[gpus.GpuWatch, queue.Queue[Report]]:
    reports: queue.Queue[Report] = queue.Queue()
    return gpus.GpuWatch(lambda: gpus.visible({}, 0, 1), reports.put, "n3", first_s=0.0, every_s=0.0), reports


def next_of(reports: queue.Queue[Report], kind: type[T]) -> T:
    while True:
        if isinstance(found := reports.get(timeout=20), kind):
            return found


def test_a_rank_reports_what_its_gpus_do_and_each_xid_once(driver: Driver) -> None:
    driver.has({**ONE, "reasons": 0x44}, {**OTHER, "ecc": 2})
    watch, reports = watched()
    assert next_of(reports, Gpu).figures == (60, 61, 356, 66, 50, 2)
    driver.has(ONE, OTHER, xids=[(1, 31), (1, 79), (1, 79), (0, 79)])
    found = [next_of(reports, GpuFault) for _ in range(3)]
    driver.has(ONE, {**OTHER, "lost": True}, xids=[(1, 31), (1, 79), (1, 79), (0, 79)])
    found.append(next_of(reports, GpuFault))
    assert [(one.xid, one.gpu, one.host, one.hardware) for one in found] == [
        *((31, 6, "n3", False), (79, 6, "n3", True), (79, 5, "n3", True)),
        (None, None, "n3", True),
    ]
    watch.use([])


def test_once_cuda_is_initialized_its_gpus_are_watched(driver: Driver) -> None:
    watch, reports = watched()
    assert next_of(reports, Gpu).figures[0] == 60
    watch.use(["b"])
    assert any(next_of(reports, Gpu).figures[0] == 80 for _ in range(100))
    assert numbers(watch.gpus) == [6]
    watch.use([])


def ranks(local_rank: int = 0) -> RankEnvironment:
    return RankEnvironment(local_rank, local_rank, 1, 1, 0, ("n3",), None, None, "slurm")


def test_without_the_package_there_is_no_thread_and_no_message(tmp_path: Path) -> None:
    """In a process of its own, whose sys.path has no pynvml."""
    code = (
        "import sys, threading, importlib.util; from clusterddp.worker import gpus\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'pynvml' else real(name)\n"
        "assert gpus.start({}, None, None, 'n3') is None\n"
        "assert threading.active_count() == 1 and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_a_driver_nothing_is_reported(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVML_STATE")
    reports: list[Report] = []
    gpus.start({}, ranks(), reports.append, "n3")
    for thread in threading.enumerate():
        if thread.name == "gpus":
            thread.join(20)
    assert reports == [] and all(thread.name != "gpus" for thread in threading.enumerate())


def test_the_stand_in_has_the_names_and_numbers_of_the_real_package(driver: Driver) -> None:
    """If that is installed: its functions need a driver, its names do not."""
    code = (
        "import json, pynvml; print(json.dumps({name: value if isinstance(value, int) else 'function'"
        " for name, value in vars(pynvml).items() if name.startswith(('nvml', 'NVML_'))}))"
    )
    real = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if real.returncode:
        pytest.skip("nvidia-ml-py is not installed")
    names = json.loads(real.stdout)
    import pynvml

    own = {name: value for name, value in vars(pynvml).items() if name.startswith(("nvml", "NVML_"))}
    expected = {name: value if isinstance(value, int) else "function" for name, value in own.items()}
    assert {name: names.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("gpu", "problems"),
    [
        ({}, []),
        ({"reasons": 0x5}, []),  # idle, or at its power limit
        ({"reasons": 0x60}, ["its clock is reduced by heat"]),
        ({"ecc": 2}, ["2 uncorrectable memory errors since the driver was loaded"]),
        ({"rows": [0, 1, 1, 0]}, ["a faulty row of its memory will be replaced at its next reset"]),
        ({"rows": [0, 9, 0, 1]}, ["a faulty row of its memory could not be replaced"]),
    ],
)
def test_the_check_before_the_start_names_what_is_wrong_with_a_gpu(
    driver: Driver, gpu: dict[str, Any], problems: list[str]
) -> None:
    driver.has({**ONE, **gpu})
    found = gpus.identified("a")
    assert found is not None and found.problems() == problems


def test_a_lost_gpu_is_no_healthy_one(driver: Driver) -> None:
    driver.has({**ONE, "lost": True})
    with raises(gpus.GpuLost):
        gpus.identified("a")


# --- shown


def timed(run: RunDirectory, *reports: tuple[int, list[float | None]], data_s: float = 0.0) -> TimedInterval:
    timing = TimingLines(0, 2, began=0.0)
    for rank in (0, 1):
        timing.update(rank, beat_of({"timing": [0, 0.0, 0.0, 0.0, 0.0]}), 0.0)
        timing.update(rank, beat_of({"timing": [10, data_s, 100 - data_s, 0.0, 0.0]}), 100.0)
    for rank, figures in reports:
        timing.update_gpus(rank, tuple(figures))  # type: ignore[arg-type]  # six
    write_timings(run, timing.interval(100.0, ["n2", "n3"]))
    return read_timings(run).intervals[-1]


def test_an_interval_has_the_mean_or_the_largest_of_what_was_reported_in_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    found = timed(run, (1, [40, 50, 300, 60, 0, None]), (1, [60, 70, 400, 90, 20, 1]))
    assert {name: values[1] for name, values in found.gpus.items()} == dict(
        zip(GPU_FIGURES, (50, 70, 350, 90, 10, 1), strict=True)
    )
    assert {values[0] for values in found.gpus.values()} == {None}
    assert report_gpus.gpu_sentence(report_gpus.newest_gpu_rows([found])) == (
        "50% busy, 70% of memory used, 350 W, at most 90 °C; rank 1 (n3) throttled 10% of the time at 90 °C; "
        "rank 1 (n3): 1 uncorrectable memory error"
    )
    assert report_gpus.newest_gpu_rows([timed(run)]) == []


@pytest.mark.parametrize(
    ("busy", "data_s", "words"),
    [
        (66, 30.0, "The GPUs were idle 34% of the time, mostly waiting for batches. "),
        (66, 2.0, "The GPUs were idle 34% of the time, mostly between kernels. "),
        (90, 30.0, ""),
    ],
)
def test_idle_gpus_are_advice_with_what_they_waited_for(tmp_path: Path, busy: int, data_s: float, words: str) -> None:
    figures: list[float | None] = [busy, 50, 300, 60, 0, 0]
    found = "".join(report_gpus.gpu_advice([timed(RunDirectory(tmp_path), (0, figures), (1, figures), data_s=data_s)]))
    assert found.startswith(words) and bool(found) == bool(words)


def test_list_shows_how_busy_gpus_are_while_the_run_trains_and_leaves_that_out_first(tmp_path: Path) -> None:
    from clusterddp.rundir.summary import summarize

    timed(RunDirectory(tmp_path), (0, [66, 50, 300, 60, 0, 0]))
    summary = summarize(RunDirectory(tmp_path))
    running, over = (table.Row(summary, RunState(word, "")) for word in ("running", "failed"))
    lines = table.table([running], table.columns([]))
    assert "GPUS" in lines[0] and "66%" in lines[1]
    assert "GPUS" not in table.table([over], table.columns([]))[0]
    assert "GPUS" not in table.table([running], table.columns([]), width=30)[0]


# --- the cause of a failure


FAULT_FIELDS: dict[str, Any] = {"host": "n2", "gpu": 5, "xid": 79, "what": gpus.HARDWARE[79], "hardware": True}
FAULT = reported(1, "gpu_fault", FAULT_FIELDS)
WORDS = "Xid 79 on n2 GPU 5: the GPU has fallen off the bus"


def test_a_fault_of_a_gpu_is_recorded_and_explains_a_failure_soon_after(tmp_path: Path) -> None:
    state, actions = step(after(), FAULT, NOW)
    assert actions == [Record(GpuFault(rank=1, **FAULT_FIELDS))]
    assert state.gpu_fault_of(1, NOW + 5) == state.gpu_fault_of(1, NOW + FAULT_S) == WORDS
    assert state.gpu_fault_of(1, NOW + FAULT_S + 1) == state.gpu_fault_of(0, NOW) == ""
    of_a_kernel = reported(1, "gpu_fault", {**FAULT_FIELDS, "xid": 31, "hardware": False})
    assert step(after(), of_a_kernel, NOW)[0].gpu_fault_of(1, NOW) == ""


def test_a_rank_whose_gpu_had_a_fault_failed_first_and_its_node_is_at_fault(tmp_path: Path) -> None:
    """Although the rank that waited for it failed before, and the error alone would be the script's."""
    peer = RankEnd(0, "n1", End.EXCEPTION, 1.0, "RuntimeError: an illegal memory access was encountered")
    faulty = RankEnd(1, "n2", End.EXCEPTION, 3.0, "RuntimeError: an illegal memory access was encountered", fault=WORDS)
    verdict = judge([peer, faulty], 1, False, lambda: Cause.NONE)
    assert verdict.first_failure == faulty and faulty.of_the_node and faulty.may_pass
    alone = judge([peer, dataclasses.replace(faulty, fault="")], 1, False, lambda: Cause.NONE)
    assert alone.first_failure is not None and alone.first_failure.rank == 0
    box = failure_text(RunDirectory(tmp_path), 0, FirstFailure(faulty, [peer]), NOW)
    assert f"likely cause: {WORDS}" in box
    failed = {"event": "rank_failed", "attempt": 0, "time": NOW, "suspect": "n2", "error": "x", "fault": WORDS}
    assert WORDS in exclusion.letter(view([failed]), "n2", NOW)


def test_a_hang_of_a_gpu_with_a_fault_names_it_and_its_node(tmp_path: Path) -> None:
    state, _ = step(after(), FAULT, NOW)
    found = Hang(**{**dataclasses.asdict(HANG), "late": (0, 1)})
    record = next(action for action in step(state, found, NOW + 60)[1] if isinstance(action, Record))
    assert isinstance(record.event, Hung)
    assert record.event.what == f"{HANG.what}. {WORDS}" and record.event.suspect == "n2"


def test_figures_are_for_the_file_of_step_times_and_not_for_the_history() -> None:
    values = {"figures": [1, 2, 3, 4, 5, 6]}
    assert step(after(), reported(1, "gpu", values), NOW)[1] == [GpuFigures(1, (1, 2, 3, 4, 5, 6))]


# --- a slow node


def test_a_straggler_is_explained_once_after_ten_minutes(tmp_path: Path) -> None:
    watch = Watch(beat_s=2.0)

    def look(now: float, own_s: float) -> list[StillSlow]:
        watch._clock.now = now
        for rank, seconds in enumerate((0.1, own_s, 0.1)):
            beat = {"count": 9, "step": 8, "age_s": 0.0, "allowed_s": 60.0, "own_s": seconds, "step_s": 1.0}
            watch.update(rank, f"n{rank}", beat_of(beat))
        return [found for found in watch.look() if isinstance(found, StillSlow)]

    assert look(0.0, 0.5) == look(EXPLAINED_S - 1, 0.5) == []
    assert look(EXPLAINED_S - 0.5, 0.1) == look(EXPLAINED_S + 1, 0.5) == []  # it was not slow in between
    (found,) = look(2 * EXPLAINED_S + 2, 0.5)
    assert (found.rank, round(found.seconds)) == (1, EXPLAINED_S + 1)
    assert look(3 * EXPLAINED_S + 9, 0.5) == []
    assert step(State(JOB), found, NOW)[1] == [Broadcast(orders.Explain(5.0, 601), frozenset((1,)))]


@pytest.mark.parametrize(("own_s", "explained"), [(0.62, True), (0.59, False)])
def test_a_rank_is_explained_from_a_fifth_more_work_on(own_s: float, explained: bool) -> None:
    """Although it is no straggler: the work of single steps varies as much."""
    watch = Watch(beat_s=2.0)
    found = []
    for now in (0.0, EXPLAINED_S + 1):
        watch._clock.now = now
        for rank, seconds in enumerate((0.5, own_s, 0.5)):
            beat = {"count": 9, "step": 8, "age_s": 0.0, "allowed_s": 60.0, "own_s": seconds, "step_s": 1.0}
            watch.update(rank, f"n{rank}", beat_of(beat))
        found += watch.look()
    assert [(one.rank, one.ratio) for one in found if isinstance(one, StillSlow)] == ([(1, 1.24)] if explained else [])
    assert not any(isinstance(one, Slow) for one in found)


def test_the_facts_of_a_slow_node_are_its_clocks_and_its_load(driver: Driver) -> None:
    driver.has({**ONE, "clock": 1200, "most": 1980, "reasons": 0x40})
    watch, _ = watched()
    while not watch.gpus:
        pass
    found = gpus.node_facts(watch)
    watch.use([])
    assert found[:3] == ["GPU 5 runs at 1200 of 1980 MHz", "GPU 5 is slowed down by heat", "GPU 5 has 66 °C"]
    assert found[3].startswith("The load is ")


def test_the_busiest_processes_of_other_jobs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERDDP_RUN_DIR", "/runs/x")
    spin = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with (
        subprocess.Popen(spin, stdout=subprocess.PIPE, env={**os.environ, "CLUSTERDDP_RUN_DIR": "/runs/x"}) as own,
        subprocess.Popen(spin, stdout=subprocess.PIPE, env={**os.environ, "CLUSTERDDP_RUN_DIR": "/runs/y"}) as other,
    ):
        for process in (own, other):
            assert process.stdout is not None and process.stdout.readline()
        found = " ".join(gpus.busiest_others(most=1000, least_cpu=0.01))
        own.kill()
        other.kill()
    assert f"(process {other.pid})" in found and f"(process {own.pid})" not in found
