"""``clusterddp.stop_requested()`` and ``requeue()``: in a loop that saves by itself, and inside a step of a run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.errors import UNCONFIRMED
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker.resume_watch import ResumeWatch
from tests import ddp
from tests.cli import clusterddp
from tests.preempting import preempting
from tests.reports import unreported
from tests.runs_on_disk import outcome_of
from tests.waiting import preempt_local, wait_until

LOOKED_AT = ("saved", "not_read")
SCRIPT = Path(__file__).parents[1] / "scripts" / "two_lines.py"


@pytest.mark.product
@pytest.mark.parametrize("forgets", [False, True])
def test_a_sharded_script_with_two_lines_loses_no_step(tmp_path: Path, forgets: bool) -> None:
    """It has its own process group. If attempt 1 forgets to resume, the history says so, and attempt 2 does not."""
    run = RunDirectory(tmp_path / "run")
    command = [sys.executable, "-m", "clusterddp.submit", "--local", "--run-dir", str(run), str(SCRIPT)]
    command += ["--device", "cpu", "--gpus", "2", "--", "saved", "12", *["forgets"] * forgets]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    for attempt in (0, 1) if forgets else (0,):
        wait_until(lambda: "at step 5" in output(run, attempt, 0) + output(run, attempt, 1), "step 5", timeout=60)  # noqa: B023
        preempt_local(run)
        (tmp_path / f"go-{attempt}").touch()
        wait_until(lambda: attempt + 1 in run.attempts(), "the next attempt", timeout=60)  # noqa: B023
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    said_by = [output(run, attempt, 0) + output(run, attempt, 1) for attempt in run.attempts()]
    begun = [re.findall(r"starts at step (\d+)", text) for text in said_by]
    stops = [re.findall(r"stops after step (\d+)", text) for text in said_by[:-1]]
    assert begun == [["0"] * 2] * len(stops) + [stops[-1]] and all(len(set(steps)) == 1 for steps in stops)
    told = [(event["attempt"], event["event"], event["file"]) for event in run.events() if event["event"] in LOOKED_AT]
    file = str(tmp_path / "saved")
    assert told == [(0, "saved", file), *[(1, "not_read", file), (1, "saved", file)] * forgets]
    not_resumed = f"attempt 1: NOT RESUMED: the script did not read {tmp_path / 'saved'}. It began again"
    assert (not_resumed in said) == forgets
    assert (outcome_of(run) or {})["state"] == "completed"


AT_ITS_LAST_STEP = """
import json, os, time, clusterddp
first = json.load(open("last.json")) if os.path.exists("last.json") and os.environ["READS"] == "yes" else 0
for step in range(6) if first == 0 and os.environ["CLUSTERDDP_ATTEMPT"] == "0" else ():
    print("step", step, flush=True)
    while step == 5 and not clusterddp.stop_requested():
        time.sleep(0.02)
    if clusterddp.stop_requested():
        json.dump(6, open("last.json", "w"))
        clusterddp.requeue(saved="last.json")
"""


@pytest.mark.parametrize(("reads", "code"), [("yes", 0), pytest.param("no", UNCONFIRMED, marks=pytest.mark.product)])
def test_a_script_that_was_stopped_at_its_last_step_and_reads_its_save_has_completed(
    tmp_path: Path, reads: str, code: int
) -> None:
    """It makes no further step. One that exits with code 0 without looking at its save may have done nothing."""
    script, run = tmp_path / "last.py", RunDirectory(tmp_path / "run")
    script.write_text(AT_ITS_LAST_STEP)
    with preempting("step 5"):
        submit(run, script, "--set", f"env.READS={reads}", ranks=1, code=code)
    outcome = outcome_of(run) or {}
    assert (outcome["state"], outcome["attempts"]) == ("completed", 2)


HANGS = """
import os, time, torch, clusterddp
import torch.distributed as dist
dist.init_process_group("gloo")
attempt, rank = os.environ["CLUSTERDDP_ATTEMPT"], os.environ["RANK"]
for step in range(6):
    while (attempt, rank, step) == ("0", "1", 4):
        time.sleep(60)
    dist.all_reduce(torch.ones(1))
    assert not clusterddp.stop_requested()
dist.destroy_process_group()
"""


HOLDS_THE_GIL = """
import ctypes, os, time, torch
weight = torch.nn.Parameter(torch.zeros(()))
optimizer = torch.optim.SGD([weight], lr=1.0)
for step in range(20):
    weight.sum().backward()
    optimizer.step()
    time.sleep(0.05)  # there are heartbeats
if os.environ["RANK"] == "1" and os.environ["CLUSTERDDP_ATTEMPT"] == "0":
    ctypes.PyDLL(None).pause()
"""


@pytest.mark.product
@pytest.mark.parametrize(
    ("text", "field", "late", "what"),
    [(HANGS, "rank", 1, ""), (HOLDS_THE_GIL, "late", [1], "without a heartbeat")],
    ids=["between two calls", "once the others have ended"],
)
def test_a_rank_that_stands_still_is_found_and_restarted(
    tmp_path: Path, text: str, field: str, late: object, what: str
) -> None:
    """The second as one that frees its process group while a thread of gloo waits for the GIL (torch 2.13)."""
    script, run = tmp_path / "script.py", RunDirectory(tmp_path / "run")
    script.write_text(text)
    submit(run, script, "--set", "watchdog.step_s=1", "--set", "watchdog.start_s=20")
    (hung,) = [event for event in run.events() if event["event"] == "hung"]
    assert hung[field] == late and what in hung["what"], hung
    assert run.attempts() == [0, 1] and (outcome_of(run) or {})["state"] == "completed"


def submit(
    run: RunDirectory, script: Path, *options: str, ranks: int = 2, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """In the folder of the script."""
    shape = ["--device", "cpu", "--gpus", ranks, *options]
    return clusterddp("submit", "--local", "--run-dir", run, script, *shape, code=code, cwd=script.parent)


def output(run: RunDirectory, attempt: int, rank: int) -> str:
    log = run.attempt_logs(attempt) / f"rank-{rank}.out"
    return log.read_text() if log.exists() else ""


IN_A_STEP = """
import sys, torch, clusterddp
from clusterddp.jobdef.job import Checkpointing
from tests.descent import Descent
from tests.stops import request_stop

how, folder = sys.argv[1:]
ctx = clusterddp.init(device="cpu", run_dir=folder, checkpoint=Checkpointing(every_steps=None, every_s=None))
model = torch.nn.Linear(4, 1)
run = ctx.run(model=model, optimizer=(optimizer := Descent(model)), loader=ctx.loader(torch.ones(64, 4), batch_size=2))
for x in run.steps(6):
    if how != "never" and run.step == 3 and ctx.attempt == 0:
        if ctx.rank == 1:
            request_stop(ctx)
        while not clusterddp.stop_requested():
            pass
        run.stop("in the evaluation") if how == "run.stop" else clusterddp.requeue()
    model(x).square().mean().backward()
    optimizer.step()
print("weight", model.weight.tolist(), flush=True)
"""


@pytest.mark.parametrize("how", ["run.stop", "requeue"])
def test_a_run_that_stops_within_a_step_is_saved_and_repeats_it(how: str, tmp_path: Path) -> None:
    script, run = tmp_path / "in_a_step.py", RunDirectory(tmp_path / "run")
    script.write_text(IN_A_STEP)
    ddp.start(script, how, run, ranks=2, folder=tmp_path / "out").expect(75)
    assert [path.name.partition(".")[0] for path in run.checkpoints.iterdir()] == [f"step-{3:012}"]
    resumed = ddp.run(script, how, run, ranks=2, folder=tmp_path / "out")
    whole = ddp.run(script, "never", tmp_path / "whole", ranks=2, folder=tmp_path / "out")
    assert [resumed.output(rank) for rank in range(2)] == [whole.output(rank) for rank in range(2)]


OUTSIDE = """
import sys, clusterddp
without_torch = "torch" not in sys.modules
answers = [clusterddp.stop_requested() for _ in range(3)]
clusterddp.requeue(saved="nowhere.pt")
print(without_torch, answers)
"""


def test_outside_of_a_run_both_lines_do_nothing() -> None:
    """And to import clusterddp does not import torch."""
    done = subprocess.run([sys.executable, "-c", OUTSIDE], capture_output=True, text=True, check=True)
    assert done.stdout == "True [False, False, False]\n"


STARTS_PROCESSES = """
import subprocess, sys
code = "import clusterddp; print(clusterddp.stop_requested(), clusterddp.stop_requested(), flush=True)"
for process in [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]:
    process.wait()
"""


def test_processes_of_the_script_are_told_that_they_get_no_stop_and_the_history_says_it_once(tmp_path: Path) -> None:
    """As those of torch.multiprocessing.spawn: they have the rank's environment, and no supervisor."""
    script, run = tmp_path / "starts.py", RunDirectory(tmp_path / "run")
    script.write_text(STARTS_PROCESSES)
    done = submit(run, script, ranks=1)
    said = "clusterddp.stop_requested() is always False in a process that a rank has started"
    assert done.stderr.count(f"attempt 0: {said}") == 1, done.stderr
    assert output(run, 0, 0) == "False False\n" * 2
    assert (run.attempt_logs(0) / "rank-0.err").read_text().count(said) == 2, "each process says it once"


def test_a_saved_file_is_read_by_any_process_of_the_node(tmp_path: Path) -> None:
    """Python's ``open`` is not the only way; and a listing of a folder reads none of its files."""
    file, folder = tmp_path / "save.pt", tmp_path / "sharded"
    (folder / "0").mkdir(parents=True)
    for path in (file, folder / "0" / "model"):
        path.write_text("state")
    watches = [ResumeWatch(str(path), unreported) for path in (file, folder, file, folder)]
    first, second = watches[:2]
    list(folder.rglob("*"))
    file.stat()
    assert [first.was_opened(), second.was_opened()] == [False, False]
    subprocess.run(["cat", str(file), str(folder / "0" / "model")], stdout=subprocess.DEVNULL, check=True)
    assert all(watch.was_opened() for watch in watches[2:])
    assert [watch.was_opened() for watch in watches] == [False, False, True, True]
    gone = ResumeWatch(str(file), unreported)
    file.unlink()
    assert [gone.was_opened(), ResumeWatch(str(tmp_path / "never"), unreported).was_opened()] == [False, False]
