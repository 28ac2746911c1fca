"""A run that is submitted again: differences are listed, mistakes are corrected, and completed steps stay completed."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from clusterddp.rundir.files import write_json
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from tests.preempting import preempting
from tests.ranks.test_local import start, submit
from tests.runs_on_disk import outcome_of
from tests.waiting import story, wait_until
from tests.wording import says

CHECKED = "import sys\nassert sys.argv[1:] == ['--lr', '0.1', '--steps', '5'], 'a mistake'\n"


def test_a_run_that_failed_before_its_first_step_is_corrected_without_change(run: RunDirectory, tmp_path: Path) -> None:
    """Differences are listed, and the new arguments are recorded. Once it completed, other arguments need --change."""
    script = tmp_path / "checked.py"
    script.write_text(CHECKED)
    options = [str(script), "--device", "cpu", "--"]
    assert submit(run, *options, "--lr", "0.2", "--steps", "5").returncode == 1
    corrected = submit(run, *options, "--lr", "0.1", "--steps", "5")
    assert corrected.returncode == 0, corrected.stderr
    said = f"{run} failed before its first step. Recording the new arguments: args: --lr 0.2 recorded, --lr 0.1 given"
    assert f"{said}\n" in corrected.stderr
    assert "--lr" in run.job_file.read_text() and "'0.1'" in run.job_file.read_text()
    refused = submit(run, *options, "--lr", "0.3", "--steps", "5")
    assert refused.returncode == 1
    says(refused.stderr)


def test_what_a_failed_script_left_in_its_run_directory_needs_change(run: RunDirectory, tmp_path: Path) -> None:
    """It may be its own checkpoint, which other arguments do not fit."""
    script = tmp_path / "own.py"
    script.write_text("import os, sys\nopen(os.environ['CLUSTERDDP_RUN_DIR'] + '/own.pt', 'w')\nsys.exit(3)\n")
    options = [str(script), "--device", "cpu", "--"]
    assert submit(run, *options, "1").returncode == 3
    refused = submit(run, *options, "2")
    assert refused.returncode == 1 and "add --change" in refused.stderr


@pytest.mark.parametrize("option", ["seed=5", "global_batch=128"])
def test_a_seed_that_no_checkpoint_fits_is_refused_and_a_completed_run_stays_so(run: RunDirectory, option: str) -> None:
    """With and without an outcome."""
    run.create()
    run.job_file.write_text("module: this\ndevice: cpu\nglobal_batch: 64\n")
    (run.checkpoints / "step-000000000005.attempt-0.safetensors").write_text("")
    outcome = {"state": "completed", "step": 5, "attempts": 1, "reason": "all ranks finished"}
    write_json(run.outcome_file, outcome)
    before = run.job_file.read_text()
    refused = submit(run, "--change", "--set", option)
    assert refused.returncode == 1
    key, _, value = option.partition("=")
    was = {"seed": "of the script", "global_batch": 64}[key]
    assert f"made with {key} {was} and cannot continue with {key} {value}. Use the" in refused.stderr
    assert (outcome_of(run), run.job_file.read_text()) == (outcome, before)


def test_a_killed_supervisor_is_reported_and_the_run_continues(run: RunDirectory, tmp_path: Path) -> None:
    """With the exit code that a shell gives for a KILL."""
    script = tmp_path / "waits.py"
    script.write_text("import os, time\ntime.sleep(60 if os.environ['CLUSTERDDP_ATTEMPT'] == '0' else 0)\n")
    process = start(run, str(script), "--device", "cpu")
    wait_until(lambda: run.events_file.exists() and "started" in run.events_file.read_text(), "the attempt", timeout=60)
    holder = read_json(run.holder_file(0)) or {}
    assert holder["host"] == socket.gethostname()
    os.kill(holder["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 137
    how = f"Stopped. Continue with: clusterddp submit --local --run-dir {run}"
    assert f"clusterddp: the supervisor was killed by signal 9 (Killed), and its ranks ended with it\n{how}\n" in err
    assert submit(run).returncode == 0


@pytest.mark.parametrize(("preempt_after", "code", "attempts"), [(2, 0, 2), (9, 1, 1)])
def test_a_preemption_after_a_step_that_rank_0_prints_happens_or_is_reported(
    run: RunDirectory, tmp_path: Path, preempt_after: int, code: int, attempts: int
) -> None:
    """The script prints steps 0 to 3. If it is to be preempted, its first attempt waits for that."""
    script = tmp_path / "prints.py"
    wait = "if '2' in sys.argv and os.environ['CLUSTERDDP_ATTEMPT'] == '0': time.sleep(60)\n"
    script.write_text(f"import os, sys, time\nfor step in range(4): print('iter', step, flush=True)\n{wait}")
    options = ["--device", "cpu", "--set", r"steps.log=iter (\d+)"]
    with preempting(preempt_after):
        done = submit(run, str(script), *options, "--", str(preempt_after))
    assert done.returncode == code, done.stderr
    outcome = outcome_of(run) or {}
    assert (outcome["state"], outcome["attempts"]) == ("completed", attempts)


WIDENED = """
import os
import torch
import clusterddp
from tests.descent import Descent
from tests.stops import request_stop

ctx = clusterddp.init(device="cpu")
model = torch.nn.Linear(4, 1 + ctx.attempt)
run = ctx.run(model=model, optimizer=Descent(model), loader=ctx.loader(torch.ones(64, 4), batch_size=1))
for batch in run.steps(20):
    model(batch).square().mean().backward()
    if run.step == 3 and ctx.attempt == 0:
        request_stop(ctx)
"""


@pytest.mark.product  # test_context.py has the refusal, unit/test_verdict.py what follows
def test_a_checkpoint_that_does_not_fit_is_refused_once(tmp_path: Path) -> None:
    """The same script fails again in the same way, so no restart follows, although the run has made progress."""
    script, run = tmp_path / "widened.py", RunDirectory(tmp_path / "run")
    script.write_text(WIDENED)
    assert submit(run, str(script), "--device", "cpu", "--gpus", "1").returncode == 130, story(run)
    assert submit(run).returncode == 1
    assert run.attempts() == [0, 1] and (outcome_of(run) or {})["state"] == "failed", story(run)
