"""Where the time of a real run went: its script measures what it does, and ``clusterddp/report`` must find the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from clusterddp.protocol import PREEMPT
from clusterddp.report.booking import book
from clusterddp.report.efficiency import spent
from clusterddp.rundir.run_directory import RunDirectory
from tests.histories import check_history, view
from tests.waiting import story

REPOSITORY = Path(__file__).resolve().parents[2]

#: Rank 0 notes when it does what: a line "time category" per change. Attempt 0 is preempted, attempt 1's rank 1 killed.
SCRIPT = """
import os, sys, time
said = open("said", "a") if os.environ["RANK"] == "0" else open(os.devnull, "w")
def now(what): print(repr(time.time()), what, file=said, flush=True)
now("importing")
import torch
from torch.utils.data import TensorDataset
import clusterddp
from tests.descent import Descent

init = clusterddp.init  # imports what it needs
now("rendezvous")
ctx = init()
now("importing")
time.sleep(0.4)
model = torch.nn.Linear(1, 1)
samples = TensorDataset(torch.ones(8, 1))

class Slow:
    def state_dict(self): return {}
    def load_state_dict(self, state): time.sleep(0.5)

optimizer = Descent(model)
now("restoring")
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(samples, batch_size=1), slow=Slow())
now("importing")
held_out = ctx.eval_loader(samples, batch_size=2)
begun = run.step
now("first_step")
for x, in run.steps(40):
    if run.step == begun + 1:
        now("repeating" if ctx.attempt == 2 else "training")
    elif ctx.attempt == 2 and run.step == 24:
        now("training")
    if run.step == begun:
        time.sleep(0.3)
    time.sleep(0.05)
    model(x).sum().backward()
    optimizer.step()
    if run.step == 30:
        now("evaluating")
        for _ in held_out:
            time.sleep(0.6)
        now("training")
    if ctx.attempt == 1 and run.step == 23:
        now("failed")
        if ctx.rank == 1:
            os.kill(os.getpid(), 9)
now("after")
"""


@pytest.mark.product  # unit/test_booking.py, and slurm/test_booking.py for a real run
def test_the_time_of_a_run_is_booked_to_what_its_script_did(tmp_path: Path) -> None:
    """Preempted after 10 steps, and a rank killed after 23, of which 20 were saved."""
    run, script = RunDirectory(tmp_path / "run"), tmp_path / "script.py"
    script.write_text(SCRIPT)
    shape = ["--local", "--run-dir", str(run), "--device", "cpu", "--nodes", "2", "--gpus", "1"]
    options = ["--set", "checkpoint.every=20 steps"]
    command = [sys.executable, "-m", "clusterddp.submit", str(script), *shape, *options]
    environ = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", PREEMPT: "[10]"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{done.stderr}\n{story(run)}"
    events = run.events()
    check_history(events)
    booking = book(view(events), now=events[-1]["time"] + 1000)
    measured: dict[str, float] = defaultdict(float)
    said = [line.split() for line in (tmp_path / "said").read_text().splitlines()]
    for (begin, what), (end, _) in pairwise(said):
        measured[what] += float(end) - float(begin)
    found = booking.seconds()
    for name in ("importing", "rendezvous", "restoring", "repeating", "evaluating"):
        assert found[name] == pytest.approx(measured[name], abs=0.5 + 0.05 * measured[name]), name
    made = spent(booking, view(events))
    assert made is not None and made.repeated == 4 and not made.provisional
    assert found["unknown"] < 0.02 * booking.total_s
    assert not found["queued"] + found["held"] + found["hung"] + found["straggler"]
    status = [sys.executable, "-m", "clusterddp", "status", str(run)]
    text = subprocess.run(status, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True).stdout
    assert f"time      {made.sentence()}" in text and made.breakdown() in text
    asked = subprocess.run([*status, "--json"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert json.loads(asked.stdout)["time"]["ettr"] == pytest.approx(made.ettr)
