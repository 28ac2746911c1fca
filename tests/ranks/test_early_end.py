"""A loop that ends before its last step: by ``run.finish()`` as if it were done, by ``break`` with nothing saved."""

from __future__ import annotations

import subprocess
from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.cli import clusterddp
from tests.trainings import events_of

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp

how, total, *run_dir = sys.argv[1:]
ctx = clusterddp.init(device="cpu", **({"run_dir": run_dir[0]} if run_dir else {}))
model = ctx.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    outcome = run.outcome()
    assert outcome is not None and outcome["step"] == 5
    assert not any(run.checkpoints.iterdir())


def test_an_exception_in_the_loop_is_not_answered_with_advice_about_break(tmp_path: Path) -> None:
    script, run = tmp_path / "early.py", RunDirectory(tmp_path / "run")
    script.write_text(SCRIPT)
    done = submitted(script, run, "raise", code=1)
    assert "the script left its loop with an exception or close() after step 5 of 20. Steps since the" in done.stderr
    assert "run.finish()" not in done.stderr and "ValueError: of the script" in done.stderr


def test_finish_outside_a_step_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text(SCRIPT.replace("made = []", "run.finish()"))
    ranks = ddp.start(script, "finish", 20, tmp_path / "run", ranks=1, folder=tmp_path / "out").expect(1)
    assert "run.finish() ends the loop over run.steps(). Call it inside that loop" in ranks.output(0)
