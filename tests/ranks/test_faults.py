"""Faults that need no cluster: a second TERM, a port that is taken, clocks that differ."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
import torch

from clusterddp.checkpoint.store import Checkpoints
from clusterddp.errors import LauncherEnvironmentError
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.files import append_line
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import rank
from tests import ddp
from tests.checkpoint_files import save
from tests.histories import happened
from tests.ranks.test_local import start, submit
from tests.trainings import STEPS, events_of
from tests.waiting import preempt_local, story, wait_until


@pytest.mark.product  # test_resume.py has ranks that get several signals, the simulator the requeue
def test_a_second_term_changes_nothing(run: RunDirectory, tmp_path: Path) -> None:
    """One save, one requeue, no repeated steps: the second comes while the rank stops."""
    marks = tmp_path / "marks"
    marks.mkdir()
    waiting = ["--", "--marks", str(marks), "--moments", "first step"]
    process = start(run, "tests/scripts/train.py", "--device", "cpu", "--gpus", "1", *waiting)
    wait_until((marks / "0-0").exists, "the rank in its first step")
    preempt_local(run)
    wait_until(lambda: events_of(run, "signal"), "the first TERM")
    preempt_local(run)
    (marks / "0-go").touch()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (requeued,) = events_of(run, "requeued")
    assert [event["step"] for event in events_of(run, "checkpoint")] == [requeued["checkpoint"], STEPS]
    assert re.search(r"attempt 1: resumed from step \d+, repeating 0 steps", err), err
    assert [line["step"] for line in read_lines(run.metrics_file)] == list(range(STEPS))


BREAKS = """
import os, time
import clusterddp.function  # as in a script that is told to exit when another rank has exited
from tests.connections import break_connection
if os.environ["RANK"] == "1":
    break_connection(int(os.environ["CLUSTERDDP_SUPERVISOR"].rpartition(":")[2]))
time.sleep(5)  # longer than the grace period of the other ranks
"""


def test_a_connection_to_the_supervisor_that_breaks_alone_costs_nothing(run: RunDirectory, tmp_path: Path) -> None:
    """It is reopened, and the other rank is not told to exit."""
    script = tmp_path / "breaks.py"
    script.write_text(BREAKS)
    process = start(run, str(script), "--device", "cpu", "--gpus", "2")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert run.attempts() == [0]
    assert re.search(r"rank 1 \(\S+\) lost its connection to the supervisor and reconnected", err), err


CATCHING = """
import contextlib, glob, os, signal, sys, time, torch
import clusterddp
from tests.connections import break_others
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, index): return torch.tensor([1.0, index % 7])
ctx = clusterddp.init()
model = ctx.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(Samples(), 2))
for batch in run.steps(40):
    with contextlib.suppress(BaseException):
        if run.step == 20 and ctx.rank == 1 and sys.argv[1] == "killed" and os.environ["CLUSTERDDP_ATTEMPT"] == "0":
            break_others(int(os.environ["CLUSTERDDP_SUPERVISOR"].rpartition(":")[2]))
            until = time.monotonic() + 2  # rank 0 would take milliseconds
            while time.monotonic() < until and not glob.glob(os.environ["CLUSTERDDP_RUN_DIR"] + "/checkpoints/*021.*"):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad(); model(batch).sum().backward(); optimizer.step()
print("sum", sum(p.sum().item() for p in model.parameters()).hex())
"""


def test_a_rank_0_that_catches_the_loss_of_a_peer_commits_no_step_that_it_made_alone(tmp_path: Path) -> None:
    """It goes on until the supervisor ends it, with weights that are not synchronized.

    A killed process closes its connections one after another, which takes a while on a busy machine. Here, that to the
    supervisor is the last, and open for seconds.
    """
    script = tmp_path / "catching.py"
    script.write_text(CATCHING)
    run = RunDirectory(tmp_path / "killed")
    done = submit(
        run, str(script), "--device", "cpu", "--gpus", "2", "--set", "checkpoint.every=1 steps", "--", "killed"
    )
    assert (done.returncode, run.attempts()) == (0, [0, 1]), story(run)
    left_alone = ddp.run(script, "left alone", ranks=2, folder=tmp_path / "out").output(0)
    ends = [re.findall("sum (.*)", said)[-1] for said in (left_alone, (run.attempt_logs(1) / "rank-0.out").read_text())]
    failed = [event for event in run.events() if event["event"] == "checkpoint_failed"]
    assert failed and all("rank 1 " in event["reason"] for event in failed)
    committed = [event["step"] for event in run.events() if event["event"] == "checkpoint" and event["attempt"] == 0]
    assert max(committed) == 20
    assert ends[0] == ends[1]


def test_rank_0_avoids_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs on one head node compute the same port; the second one finds it in use."""
    first = rank.reserve_port(None)
    taken = first.getsockname()[1]
    choices = iter([taken, taken, taken + 1 if taken % 2 else taken - 1])
    monkeypatch.setattr(rank.random, "choice", lambda _: next(choices))
    second = rank.reserve_port(None)
    assert second.getsockname()[1] != taken
    first.close()
    second.close()


def test_a_port_that_the_user_chose_and_that_is_in_use_is_an_error_that_names_it() -> None:
    """MASTER_PORT is used, so no other port is tried."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LauncherEnvironmentError, match=rf"MASTER_PORT {port} is in use on "):
            rank.reserve_port(str(port))


def test_clocks_that_differ_between_nodes_change_no_order(run: RunDirectory) -> None:
    """The clock of the second attempt's node is an hour slow: its newer files and lines look older."""
    run.create()
    for attempt, (first, last, clock) in enumerate([(0, 8, 7200.0), (6, 10, 3600.0)]):
        number = run.create_attempt()
        Checkpoints(run, number, Keep(9)).record_resume((0, 6) if attempt else None)
        happened(run, {"time": clock, "attempt": number, "event": "resumed", "step": first})
        for step in range(first, last):
            append_line(run.metrics_file, {"step": step, "attempt": number, "time": clock + step, "loss": attempt})
        for step in (6, 8) if attempt == 0 else (10,):
            save(run, number, step, {"model": {"weight": torch.ones(2)}}, keep=Keep(9))
    for path in run.checkpoints.glob("step-*"):
        clock = 7200 if path.name.endswith("attempt-0.safetensors") else 3600
        os.utime(path, (clock, clock))
    newest = Checkpoints(run, run.create_attempt(), Keep(9)).candidates()
    assert [(checkpoint.attempt, checkpoint.step) for checkpoint in newest] == [(1, 10), (0, 6)]
    assert [(line["step"], line["loss"]) for line in run.metrics()] == [
        *((s, 0) for s in range(6)),
        *((s, 1) for s in range(6, 10)),
    ]
