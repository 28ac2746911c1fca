"""Logged values may be long, not finite or refused, and the history damaged: the run is preempted and resumed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.cli import clusterddp
from tests.runs_on_disk import outcome_of
from tests.waiting import story

SCRIPT = """
import os
from pathlib import Path

import pytest
import torch
import clusterddp
from tests.stops import request_stop
from tests.descent import Descent

ctx = clusterddp.init()
model = torch.nn.Linear(4, 2)
optimizer = Descent(model)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(torch.ones(64, 4), batch_size=4))
folder, attempt = Path(os.environ["CLUSTERDDP_RUN_DIR"]), int(os.environ["CLUSTERDDP_ATTEMPT"])
try:
    run.log(predictions=[0.5] * 100_000)
except TypeError as error:
    print(error, flush=True)
run.log(**{f"score {number}": 1 / 3 for number in range(20_000)})
run.log(before=1.0)
for batch in run.steps(40):
    model(batch).sum().backward()
    optimizer.step()
    run.log(**{f"transformer.layers.{number}.attention.weight/gradient norm": number / 7 for number in range(2000)})
    run.log(loss=float("nan") if run.step >= 3 else 0.5, scale=float("inf"))
    if run.step == 10 and attempt == 0:
        lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
        with open(folder / "events.jsonl", "r+") as file:  # as two writers on NFS do
            file.write("garbled " + lines[0][8:])
        request_stop(ctx)
"""


@pytest.mark.product  # the test below trains on, the fuzz tests have garbled lines
def test_a_run_with_long_values_and_a_garbled_history_is_resumed_and_completed(tmp_path: Path) -> None:
    """Metrics lines of 160 KB, a result of 700 KB, NaN, and a first event that cannot be read."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = RunDirectory(tmp_path / "run")
    said = ""
    for arguments in ([script, "--device", "cpu"], []):
        done = clusterddp("submit", *arguments, "--local", "--run-dir", run, code=None)
        said += done.stdout + done.stderr
        assert run.exists(), said
    events = run.events()
    assert (outcome_of(run) or {}).get("state") == "completed", story(run)
    assert [line["step"] for line in run.metrics()] == list(range(40))
    assert math.isnan(run.metrics()[-1]["loss"]) and run.metrics()[-1]["scale"] == math.inf
    assert (outcome_of(run) or {})["attempts"] == 2
    assert f"skipped {run.events_file}:1" in said and "To fix this, delete the line" in said
    results = [event for event in events if event["event"] == "result"]
    assert [(len(event) > 20_000, event.get("before")) for event in results] == [(True, None), (False, 1.0)] * 2
    assert "rejoined" not in [event["event"] for event in events]
    assert "run.log(predictions=...): expected a number" in (run.attempt_logs(0) / "rank-0.out").read_text()
    shown = clusterddp("status", run)
    assert "attempt 0: scale became Infinity at step 0. Training continues" in shown.stdout
    assert "attempt 0: loss became NaN at step 3. Training continues" in shown.stdout
    assert "attempts  2" in shown.stdout and f"skipped {run.events_file}:1, because another" in shown.stderr


AUTO = """
import sys
from pathlib import Path

import pytest
import torch
import clusterddp
from clusterddp.jobdef.job import Checkpointing
from clusterddp.training import saving

saving.FIRST_S = 0.0
ctx = clusterddp.init(run_dir=sys.argv[1], checkpoint=Checkpointing(None, None, auto=True))
model = ctx.wrap(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(torch.zeros(16, 4), batch_size=2))
history = Path(sys.argv[1], "events.jsonl")
history.unlink(missing_ok=True)
history.mkdir()
for batch in run.steps(1_000_000):
    model(batch).sum().backward()
    optimizer.step()
    saved = len(list(Path(sys.argv[1], "checkpoints").glob("step-*")))
    if saved > 1 and history.is_dir():  # it was to be read after the first
        history.rmdir()
    if history.is_file() and '"interval"' in history.read_text():
        run.finish()
"""


def test_a_temporarily_unreadable_history_does_not_stop_training(tmp_path: Path) -> None:
    """The interval that `every: auto` asks for is chosen after a later save."""
    script = tmp_path / "auto.py"
    script.write_text(AUTO)
    ranks = ddp.run(script, tmp_path / "run", ranks=1, folder=tmp_path / "out")
    assert "could not read the history ([Errno 21] Is a directory" in ranks.output(0)
    assert "Still saving every 0 s" in ranks.output(0)
    assert "interval" in [event["event"] for event in RunDirectory(tmp_path / "run").events()]
