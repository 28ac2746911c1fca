"""A loop that ends before its last step: by ``run.finish()`` as if it were done, by ``break`` with nothing saved.

Several loops, each left by ``break``, are one training.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.cli import clusterddp
from tests.runs_on_disk import outcome_of
from tests.trainings import events_of

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp
from tests.descent import Descent

how, total, *run_dir = sys.argv[1:]
ctx = clusterddp.init(device="cpu", **({"run_dir": run_dir[0]} if run_dir else {}))
model = torch.nn.Linear(1, 1)
optimizer = Descent(model)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(TensorDataset(torch.ones(8, 1)), batch_size=1))
made = []
for (x,) in run.steps(int(total)):
    made.append(run.step)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    run.log(loss=loss)
    if run.step == 4:
        if how == "break":
            break
        if how == "raise":
            raise ValueError("of the script")
        run.finish()
run.log(made=len(made))
print("made", made, "at", run.step, flush=True)
"""


def submitted(script: Path, run: RunDirectory, how: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    shape = ["--local", "--device", "cpu", "--gpus", 1, "--run-dir", run, "--set", "limits.attempts=1"]
    return clusterddp("submit", *shape, script, "--", how, 20, code=code)


def made(script: Path, run: Path, total: int) -> str:
    said = ddp.run(script, "finish", total, run, ranks=2, folder=script.parent / "out")
    return said.output(1).splitlines()[-1]


def test_a_finished_loop_stays_done_in_a_resumed_run_and_continues_for_more_steps(
    tmp_path: Path,
) -> None:
    script, run = tmp_path / "early.py", tmp_path / "run"
    script.write_text(SCRIPT)
    assert made(script, run, 20) == "made [0, 1, 2, 3, 4] at 5"
    assert [path.name.partition(".")[0] for path in (run / "checkpoints").iterdir()] == [f"step-{5:012}"]
    assert made(script, run, 20) == "made [] at 5"
    assert made(script, run, 8) == "made [5, 6, 7] at 8"
    assert made(script, run, 20) == "made [] at 8"
    assert [line["step"] for line in RunDirectory(run).metrics()] == list(range(8))


def test_a_loop_left_by_break_is_reported_as_unsaved_and_loses_no_metrics(tmp_path: Path) -> None:
    script, run = tmp_path / "early.py", RunDirectory(tmp_path / "run")
    script.write_text(SCRIPT)
    done = submitted(script, run, "break")
    assert "the script left its loop with break or return after step 5 of 20. Steps since the newest" in done.stderr
    assert "call run.finish(), which saves" in done.stderr
    (result,) = events_of(run, "result")
    assert result["made"] == 5
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3, 4]
    outcome = outcome_of(run)
    assert outcome is not None and outcome["step"] == 5
    assert not any(run.checkpoints.iterdir())


def test_an_exception_in_the_loop_is_not_answered_with_advice_about_break(tmp_path: Path) -> None:
    script, run = tmp_path / "early.py", RunDirectory(tmp_path / "run")
    script.write_text(SCRIPT)
    done = submitted(script, run, "raise", code=1)
    assert "the script left its loop with an exception after step 5 of 20. Steps since the" in done.stderr
    assert "run.finish()" not in done.stderr and "ValueError: of the script" in done.stderr


def test_finish_outside_a_step_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text(SCRIPT.replace("made = []", "run.finish()"))
    ranks = ddp.start(script, "finish", 20, tmp_path / "run", ranks=1, folder=tmp_path / "out").expect(1)
    assert "run.finish() ends the loop over run.steps(). Call it inside that loop" in ranks.output(0)


#: Loops to the steps in its arguments, as "8:3", where ``break`` follows after so many batches: "8:3-" before the
#: optimizer's step, "8:3+" after it, "8:3f" after ``run.finish()``.
LOOPS = """
import sys
import torch
import clusterddp
from tests.stops import request_stop

stop_before, run_dir, *loops = sys.argv[1:]
ctx = clusterddp.init(device="cpu", run_dir=run_dir)
model = ctx.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.arange(32.0).unsqueeze(1)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(data, batch_size=1, shuffle=False))
seen = []
for number, (total, _, at) in enumerate(loop.partition(":") for loop in loops):
    if str(number) == stop_before:
        request_stop(ctx)
    for taken, x in enumerate(run.steps(int(total)), 1):
        seen.append((run.step, int(x.item() - ctx.rank) // ctx.world_size))
        if at == f"{taken}-":
            break
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(x=x)
        if at == f"{taken}f":
            run.finish()
        if at.strip("+f") == str(taken):
            break
print("seen", seen, "at", run.step, "weight", model.module.weight.item(), flush=True)
"""


def seen(folder: Path, *loops: str, stop_before: str = "", ranks: int = 2, code: int = 0) -> str:
    """What a rank has trained on, as (step, batch), where it ended, and its weight."""
    script = folder / "loops.py"
    script.write_text(LOOPS)
    done = ddp.start(script, stop_before, folder / "run", *loops, ranks=ranks, folder=folder / "out").expect(code)
    return next((line for line in done.output(ranks - 1).splitlines() if line.startswith("seen")), "")


def test_a_step_is_complete_if_the_loop_was_left_after_the_optimizers_step(tmp_path: Path) -> None:
    """The next loop continues with the step that follows. A step that was left earlier is repeated."""
    found = seen(tmp_path, "8:3+", "8:2-", "8")
    steps = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (4, 4), (5, 5), (6, 6), (7, 7)]
    assert found.startswith(f"seen {steps} at 8 ")
    assert [line["step"] for line in RunDirectory(tmp_path / "run").metrics()] == list(range(8))
    (tmp_path / "whole").mkdir()
    assert seen(tmp_path / "whole", "8").partition("at 8")[2] == found.partition("at 8")[2]


@pytest.mark.parametrize("left", ["3:3+", "8:3f"])
def test_the_state_is_saved_by_the_next_loop_if_the_script_left_a_loop_in_its_last_step(
    tmp_path: Path, left: str
) -> None:
    total = left.partition(":")[0]
    assert seen(tmp_path, left, total, ranks=1).startswith("seen [(0, 0), (1, 1), (2, 2)] at 3 ")
    assert [path.name.partition(".")[0] for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step-{3:012}"]
    assert seen(tmp_path, total, "10", ranks=1).startswith(f"seen {[(step, step) for step in range(3, 10)]} at 10 ")


def test_a_stop_at_the_beginning_of_the_next_loop_saves_the_step_before_the_break(tmp_path: Path) -> None:
    """Also if there is a checkpoint of the step before it."""
    seen(tmp_path, "3", "8:1+", "8", stop_before="2", code=75)
    (tmp_path / "whole").mkdir()
    resumed, whole = seen(tmp_path, "8"), seen(tmp_path / "whole", "8")
    assert resumed.startswith(f"seen {[(step, step) for step in range(4, 8)]} at 8 ")
    assert resumed.partition("at 8")[2] == whole.partition("at 8")[2]
