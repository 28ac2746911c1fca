"""The benchmarks' own arithmetic, and that what they find wrong is found: nothing here needs a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.soak import __main__ as soak
from benchmarks.soak import faults, judging
from clusterddp.rundir.files import append_line, write_json
from clusterddp.rundir.run_directory import RunDirectory
from tests.checkpoint_files import file_bytes

# ---- the soak


def test_a_mixed_soak_has_every_kind_of_fault() -> None:
    cases = [soak.make_case(1, "cgroup", number, [0, 20], mixed=True) for number in range(60)]
    kinds = {getattr(fault, "kind", "preemption") for case in cases for fault in case.preemptions}
    assert kinds == set(faults.WORDS)


def test_a_fault_costs_the_time_to_the_next_new_step_and_the_repeated_steps() -> None:
    times = [(0, 0, 1.0), (0, 1, 2.0), (0, 2, 2.6), (1, 2, 8.0), (1, 3, 9.0), (1, 4, 14.0)]
    lines = [{"attempt": attempt, "step": step, "time": time} for attempt, step, time in times]
    events = [{"event": "rank_failed", "attempt": 0, "time": 3.0}]
    events += [{"event": "resumed", "attempt": 1, "time": 7.0, "redone": 1}]
    events += [{"event": "started", "attempt": attempt, "time": 6.0 * attempt} for attempt in range(2)]
    made = [{"kind": "kill", "asked": 2.5}, {"kind": "slurmd", "asked": 10.0}, {"kind": "cut", "asked": 12.0}]
    assert faults.costs(made, events, lines) == [
        {"kind": "kill", "said": 0.5, "seconds": 6.5, "redone": 1},
        {"kind": "slurmd", "said": None, "seconds": None, "redone": 0},  # the next fault came before
        {"kind": "cut", "said": None, "seconds": 2.0, "redone": 0},
    ]
    assert faults.unannounced_redone(made, events, lines) == (0, 1)
    assert faults.unannounced_redone([{"kind": "preemption", "asked": 2.5}], events, lines) == (1, 0)


def test_steps_repeated_after_an_attempt_without_a_step_are_not_the_next_preemptions() -> None:
    events = [{"event": "started", "attempt": attempt, "time": 10.0 * attempt} for attempt in range(3)]
    events += [{"event": "resumed", "attempt": attempt, "time": 10.0 * attempt + 1, "redone": 3} for attempt in (1, 2)]
    made = [{"kind": "kill", "asked": 5.0}, {"kind": "preemption", "asked": 12.0}]
    lines = [{"step": 22, "time": 4.0, "attempt": 0}]
    assert faults.unannounced_redone(made, events, lines) == (0, 3)


def test_two_attempts_without_a_checkpoint_are_spared_a_third() -> None:
    def attempt(number: int, *names: str) -> list[dict[str, Any]]:
        return [{"event": name, "attempt": number} for name in ("started", *names)]

    assert faults.fruitless(attempt(0, "checkpoint") + attempt(1) + attempt(2) + attempt(3)) == 2
    assert faults.fruitless(attempt(0) + attempt(1, "checkpoint") + attempt(2)) == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_samples_are_counted_over_whole_epochs_and_a_tail(ranks: int) -> None:
    steps = list(range(judging.STEPS))
    share = judging.BATCH * ranks
    assert judging.samples_wrong(steps, judging.STEPS, ranks) == 0
    assert judging.samples_wrong(steps, judging.STEPS - 1, ranks) >= share
    assert judging.samples_wrong([*steps, 7], judging.STEPS, ranks) == share
    assert judging.samples_wrong([step for step in steps if step != 7], judging.STEPS, ranks) == share


RESULT: dict[str, Any] = {
    "case": "cgroup-000",
    "grace": 20,
    "proctrack": "cgroup",
    "ranks": 2,
    "slurm": "22.05.8",
    "watched": False,
}


@pytest.fixture
def reference(tmp_path: Path) -> RunDirectory:
    return made_run(tmp_path / "reference", [(0, 0, judging.STEPS)])


def made_run(path: Path, attempts: list[tuple[int, int, int]], weight: float = 1.0) -> RunDirectory:
    """A finished run's files: for each attempt its number, the step it resumed at, and the one it ended before."""
    run = RunDirectory(path)
    run.create()
    for attempt, first, end in attempts:
        run.attempt_logs(attempt).mkdir()
        event(run, attempt, "started")
        if attempt:
            done = max(before_end for number, _, before_end in attempts if number < attempt)
            event(run, attempt, "resumed", step=first, redone=max(0, done - first))
        for step in range(first, end):
            append_line(run.metrics_file, {"step": step, "time": float(step), "attempt": attempt, "loss": step / 7})
    event(run, attempts[-1][0], "completed")
    write_json(run.outcome_file, {"state": "completed", "reason": "all ranks finished"})
    content = {"model": {"weight": torch.tensor([weight])}, "optimizer": {}}
    path = run.checkpoints / f"step-{judging.STEPS:012d}.attempt-{attempts[-1][0]}.safetensors"
    path.write_bytes(file_bytes(content))
    return run


def event(run: RunDirectory, attempt: int, name: str, **values: Any) -> None:
    append_line(run.events_file, {"time": 0.0, "attempt": attempt, "event": name, **values})


def judged(run: RunDirectory, reference: RunDirectory) -> judging.Result:
    result = judging.Result(**RESULT)
    judging.judge(result, run, reference)
    return result


def test_a_run_that_lost_nothing_has_no_problem(tmp_path: Path, reference: Any) -> None:
    run = made_run(tmp_path / "run", [(0, 0, 0), (1, 0, 100), (2, 100, judging.STEPS)])
    good = judging.Result(**RESULT, preemptions=2, before_first_step=1)
    assert judged(run, reference) == good


def test_a_repeated_step_is_found_though_every_step_counts_once(tmp_path: Path, reference: Any) -> None:
    result = judged(made_run(tmp_path / "run", [(0, 0, 100), (1, 98, judging.STEPS)]), reference)
    assert (result.steps_redone, result.samples_wrong, result.doubled) == (2, 0, False)
    assert len(result.problems) == 1


def test_a_skipped_step_is_found_in_steps_samples_and_losses(tmp_path: Path, reference: Any) -> None:
    result = judged(made_run(tmp_path / "run", [(0, 0, 100), (1, 101, judging.STEPS)]), reference)
    assert result.samples_wrong == judging.BATCH * 2
    assert len(result.problems) == 4


def test_other_weights_are_found(tmp_path: Path, reference: Any) -> None:
    result = judged(made_run(tmp_path / "run", [(0, 0, judging.STEPS)], weight=1.0000001), reference)
    assert result.weights_differ and result.problems == ["not the uninterrupted run's: .model.weight"]


def test_a_run_that_trains_again_after_its_end_is_found(tmp_path: Path, reference: Any) -> None:
    run = made_run(tmp_path / "run", [(0, 0, judging.STEPS)])
    event(run, 1, "started")
    assert judged(run, reference).doubled


def test_a_run_that_did_not_complete_is_lost(tmp_path: Path, reference: Any) -> None:
    run = made_run(tmp_path / "run", [(0, 0, judging.STEPS)])
    run.outcome_file.unlink()
    result = judged(run, reference)
    assert result.lost and result.problems == ["the outcome is None"]
