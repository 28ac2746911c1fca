"""Stops at awkward moments, damaged files, full disks and superseded ranks: real gloo processes, a real SIGTERM.

test_exact_resume.py checks that a resume is exact.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.checkpoint_files import content_of, save
from tests.waiting import wait_until

EXACT = Path(__file__).parents[1] / "scripts" / "exact.py"
STEPS = 30


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = torch.load(run_dir / "final-0.pt", weights_only=True)["model"]
    return result


def assert_same_weights(one: Path, other: Path) -> None:
    a, b = weights(one), weights(other)
    differing = {name: int((a[name] != b[name]).sum()) for name in a if not torch.equal(a[name], b[name])}
    assert a.keys() == b.keys() and not differing, differing


def values(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics that count, without what may differ."""
    lines = RunDirectory(run_dir).metrics()
    return [{name: line[name] for name in line if name not in ("time", "attempt")} for line in lines]


def last_steps(ranks: ddp.Ranks) -> list[str]:
    return [
        [line for line in ranks.output(r).splitlines() if line.startswith("step")][-1].split()[1]
        for r in range(len(ranks.outputs))
    ]


def test_a_term_at_a_random_moment_to_a_random_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    ranks, workers = 3, 2
    ddp.run(EXACT, tmp_path / "whole", STEPS, "--workers", workers, ranks=ranks, folder=tmp_path / "out")

    stopped = tmp_path / "stopped"
    arguments = (EXACT, stopped, STEPS, "--workers", workers)
    first = ddp.start(*arguments, "--sleep", 0.2, ranks=ranks, folder=tmp_path / "out")
    first.wait_for(ranks - 1, f"step {random.randrange(2, 10)} ")
    time.sleep(random.random() * 0.2)
    first.signal(random.randrange(ranks))
    first.expect(75)
    assert len(set(last_steps(first))) == 1
    assert all("finally ran" in first.output(rank) and "all done" not in first.output(rank) for rank in range(ranks))
    second = ddp.run(*arguments, ranks=ranks, folder=tmp_path / "out")
    assert f"begin {int(last_steps(first)[0]) + 1}" in second.output(0)

    assert_same_weights(tmp_path / "whole", stopped)
    assert values(stopped) == values(tmp_path / "whole")
    assert [line["step"] for line in values(stopped)] == list(range(STEPS))


@pytest.mark.parametrize(
    ("moment", "step"), [pytest.param("evaluation batch", 6, marks=pytest.mark.product), ("evaluating", None)]
)
def test_a_stop_during_or_after_an_evaluation_inside_a_step_keeps_that_step(
    tmp_path: Path, moment: Any, step: Any
) -> None:
    # 98 samples: shares of 33, 33 and 32, which are 9, 9 and 8 batches of 4.
    options = ("--samples", 98, "--evaluate-in-step", 5)
    ddp.run(EXACT, tmp_path / "whole", 12, *options, ranks=3, folder=tmp_path / "out")
    run_dir = tmp_path / "stopped"
    first = ddp.start(EXACT, run_dir, 12, *options, "--sleep", 0.4, ranks=3, folder=tmp_path / "out")
    first.wait_for(0, moment)
    first.signal(1)
    first.expect(75)
    second = ddp.run(EXACT, run_dir, 12, *options, ranks=3, folder=tmp_path / "out")
    assert f"begin {step or ''}" in second.output(0)
    events = RunDirectory(run_dir).events()
    assert "left_loop" not in [event["event"] for event in events]
    (resumed,) = [event["inexact"] for event in events if event["event"] == "resumed"]
    cut = "step 5 was stopped during an evaluation, and the rest of its code did not run"
    assert resumed == ([cut] if step else []), resumed
    assert_same_weights(tmp_path / "whole", run_dir)
    assert values(run_dir) == values(tmp_path / "whole")


@pytest.mark.parametrize(("place", "changed"), [("before", False), ("after", True)])
def test_a_stop_after_parameters_changed_without_an_optimizers_step_is_no_exact_resume(
    tmp_path: Path, place: str, changed: bool
) -> None:
    """The step is repeated on top of the change, as no hook has shown that it was made."""
    script = Path(__file__).parents[1] / "scripts" / "changes_parameters.py"
    ddp.start(script, tmp_path / "run", place, ranks=1, folder=tmp_path / "out").expect(75)
    ddp.run(script, tmp_path / "run", place, ranks=1, folder=tmp_path / "out")
    (resumed,) = [event for event in RunDirectory(tmp_path / "run").events() if event["event"] == "resumed"]
    assert resumed["step"] == 3
    assert [reason for reason in resumed["inexact"] if "without a step of an optimizer" in reason] == (
        resumed["inexact"] if changed else []
    )
    assert bool(resumed["inexact"]) == changed


def test_a_stop_during_the_final_evaluation_repeats_it_and_nothing_else(tmp_path: Path) -> None:
    first = ddp.start(EXACT, tmp_path / "run", 4, "--evaluate", "--sleep", 0.4, ranks=2, folder=tmp_path / "out")
    first.wait_for(0, "evaluation batch")
    first.signal(0)
    first.expect(75)
    second = ddp.run(EXACT, tmp_path / "run", 4, "--evaluate", ranks=2, folder=tmp_path / "out")
    assert "begin 4" in second.output(0) and "step 4" not in second.output(0) and "evaluating" in second.output(0)
    assert [line["step"] for line in values(tmp_path / "run")] == [0, 1, 2, 3]


def test_signals_before_the_first_step_stop_the_run_at_step_0(tmp_path: Path) -> None:
    ranks = ddp.start(EXACT, tmp_path / "run", 500, "--sleep", 0.02, ranks=2, folder=tmp_path / "out")
    for rank in range(2):
        ranks.wait_for(rank, "begin 0")
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
        ranks.signal(1, number)
    ranks.expect(75)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_the_newest_checkpoint_is_damaged_and_the_previous_one_is_used(tmp_path: Path) -> None:
    ddp.run(EXACT, tmp_path / "whole", 20, ranks=2, folder=tmp_path / "out")
    ddp.run(EXACT, tmp_path / "run", 10, "--every", 4, ranks=2, folder=tmp_path / "out")
    newest = tmp_path / "run" / "checkpoints" / "step-000000000010.attempt-0.safetensors"
    flip_a_bit(newest)
    second = ddp.run(EXACT, tmp_path / "run", 20, ranks=2, folder=tmp_path / "out")
    assert "step-000000000010.attempt-0.safetensors is damaged" in second.output(0) and "begin 8" in second.output(1)
    assert_same_weights(tmp_path / "whole", tmp_path / "run")
    assert [line["step"] for line in values(tmp_path / "run")] == list(range(20))


def test_all_checkpoints_are_damaged_and_no_rank_restarts_from_step_0(tmp_path: Path) -> None:
    ddp.run(EXACT, tmp_path / "run", 10, "--every", 4, ranks=2, folder=tmp_path / "out")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    ranks = ddp.start(EXACT, tmp_path / "run", 20, ranks=2, folder=tmp_path / "out").expect(1)
    for rank in range(2):
        assert "The run never restarts from step 0 on its own" in ranks.output(rank)
        assert "begin 0" not in ranks.output(rank)


def test_a_full_disk_does_not_stop_training_and_the_run_resumes_from_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    ddp.run(EXACT, run_dir, 4, ranks=2, folder=tmp_path / "out")
    first = ddp.start(EXACT, run_dir, 500, "--every", 30, "--sleep", 0.1, ranks=2, folder=tmp_path / "out")
    first.wait_for(0, "begin 4")
    resource.prlimit(writer_of(first.processes[0].pid), resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    first.wait_for(0, "step 30 was not saved: the checkpoint needs ")
    assert "Keeping step 4" in first.output(0)
    first.signal(1)
    first.expect(75)
    assert "The run continues from step 4" in first.output(0)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-000000000004.attempt-0.safetensors"]
    assert "begin 4" in ddp.run(EXACT, run_dir, 6, ranks=2, folder=tmp_path / "out").output(1)


def test_a_superseded_rank_exits_on_its_own_and_its_late_write_is_not_restored(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    directory = RunDirectory(run_dir)
    old = ddp.start(EXACT, run_dir, 500, "--every", 40, "--sleep", 0.01, ranks=2, folder=tmp_path / "out")
    old.wait_for(0, "step 40 ")
    ddp.run(EXACT, run_dir, 44, ranks=2, folder=tmp_path / "out")
    old.signal(0)
    old.expect(1)
    assert all("attempt 0 was superseded by attempt 1" in old.output(rank) for rank in range(2))

    # What a writer does that passed the fence just before it moved.
    newest = content_of(run_dir / "checkpoints" / "step-000000000044.attempt-1.safetensors")
    save(directory, 0, 400, newest, fenced=False)
    third = ddp.run(EXACT, run_dir, 46, ranks=2, folder=tmp_path / "out")
    assert "begin 44" in third.output(0)
    assert json.loads(directory.resume_record(2).read_text())["parent"] == {"attempt": 1, "step": 44}


def test_an_exception_in_one_rank_ends_all_of_them_at_once(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(
        "import torch, clusterddp\n"
        "ctx = clusterddp.init()\n"
        "model = ctx.wrap(torch.nn.Linear(4, 4))\n"
        "if ctx.rank == 1: raise ValueError('the first failure')\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
    )
    ranks = ddp.start(script, ranks=2, folder=tmp_path / "out").expect(1)
    assert "the first failure" in ranks.output(1)
    assert "Exception raised from" not in ranks.text()


def writer_of(pid: int) -> int:
    """The process that writes the checkpoints of a rank, once it is there."""

    def writers() -> list[int]:
        children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [child for child in children if b"checkpoint.writer" in Path(f"/proc/{child}/cmdline").read_bytes()]

    wait_until(writers, "the writer process")
    return writers()[0]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
