"""The judges of the soak, and its cases: that what they look for is found. Nothing here needs a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.rundir.files import append_line, write_json
from clusterddp.rundir.run_directory import RunDirectory
from tests.checkpoint_files import file_bytes
from tests.histories import happened
from tests.soak import faults, judging
from tests.soak.judging import Injected
from tests.soak.test_soak import make_case


def test_a_soak_has_every_kind_of_fault() -> None:
    cases = [make_case(1, "cgroup", number) for number in range(60)]
    kinds = {getattr(fault, "kind", "preemption") for case in cases for fault in case.faults}
    assert kinds == {"preemption", *faults.WEIGHTS}


def test_only_a_fault_without_notice_excuses_repeated_steps() -> None:
    lines = [{"attempt": attempt, "step": step} for attempt, step in [(0, 0), (0, 1), (0, 2), (1, 2), (1, 3)]]
    events = [{"event": "started", "attempt": attempt, "time": 6.0 * attempt} for attempt in range(2)]
    events += [{"event": "resumed", "attempt": 1, "time": 7.0, "redone": 1}]
    assert judging.unannounced_redone([Injected("kill", 2.5)], events, lines) == (0, 1)
    assert judging.unannounced_redone([Injected("preemption", 2.5)], events, lines) == (1, 0)


def test_steps_repeated_after_an_attempt_without_a_step_are_not_the_next_preemptions() -> None:
    events = [{"event": "started", "attempt": attempt, "time": 10.0 * attempt} for attempt in range(3)]
    events += [{"event": "resumed", "attempt": attempt, "time": 10.0 * attempt + 1, "redone": 3} for attempt in (1, 2)]
    injected = [Injected("kill", 5.0), Injected("preemption", 12.0)]
    lines = [{"step": 22, "time": 4.0, "attempt": 0}]
    assert judging.unannounced_redone(injected, events, lines) == (0, 3)


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
    happened(run, {"time": 0.0, "attempt": attempt, "event": name, **values})


def test_a_run_that_lost_nothing_has_no_problem(tmp_path: Path, reference: RunDirectory) -> None:
    run = made_run(tmp_path / "run", [(0, 0, 0), (1, 0, 100), (2, 100, judging.STEPS)])
    assert judging.judge(run, reference, 2) == []


def test_a_repeated_step_is_found_though_every_step_counts_once(tmp_path: Path, reference: RunDirectory) -> None:
    run = made_run(tmp_path / "run", [(0, 0, 100), (1, 98, judging.STEPS)])
    assert judging.judge(run, reference, 2) == ["2 steps redone after preemptions that were announced"]


def test_a_skipped_step_is_found_in_steps_samples_and_losses(tmp_path: Path, reference: RunDirectory) -> None:
    run = made_run(tmp_path / "run", [(0, 0, 100), (1, 101, judging.STEPS)])
    problems = judging.judge(run, reference, 2)
    assert len(problems) == 4 and f"{judging.BATCH * 2} samples not consumed exactly once" in problems


def test_other_weights_are_found(tmp_path: Path, reference: RunDirectory) -> None:
    run = made_run(tmp_path / "run", [(0, 0, judging.STEPS)], weight=1.0000001)
    assert judging.judge(run, reference, 2) == ["not the uninterrupted run's: .model.weight"]


def test_a_run_that_trains_again_after_its_end_is_found(tmp_path: Path, reference: RunDirectory) -> None:
    run = made_run(tmp_path / "run", [(0, 0, judging.STEPS)])
    event(run, 1, "started")
    assert judging.judge(run, reference, 2) == ["1 terminal events; after the first one: ['started']"]


def test_a_run_that_did_not_complete_is_found(tmp_path: Path, reference: RunDirectory) -> None:
    run = made_run(tmp_path / "run", [(0, 0, judging.STEPS)])
    run.outcome_file.unlink()
    assert judging.judge(run, reference, 2) == ["the outcome is None"]
