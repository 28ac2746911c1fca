"""A step longer than the notice: the previous save is kept, and the rank exits before it is killed."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.training.stopping import Deadline
from tests import ddp
from tests.waiting import wait_until

HANGS = """
import os, sys, time, torch, clusterddp
from clusterddp.jobdef.job import Checkpointing
ctx = clusterddp.init(run_dir=sys.argv[1], checkpoint=Checkpointing(every_steps=2, every_s=None))
model = ctx.wrap(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(torch.arange(64.0).reshape(16, 4), batch_size=2))
for batch in run.steps(8):
    if run.step == 5 and ctx.rank == 1 and "hang" in sys.argv:
        print("hanging", flush=True)
        time.sleep(1000)
    model(batch).sum().backward()
    optimizer.step()
print("done from", run.step, flush=True)
"""


@pytest.fixture
def acted() -> tuple[threading.Event, list[float]]:
    return threading.Event(), []


def deadline(acted: tuple[threading.Event, list[float]], **signals: float) -> Deadline:
    event, waited = acted

    def act(seconds: float) -> None:
        waited.append(seconds)
        event.set()

    return Deadline({f"signal {name}": seconds for name, seconds in signals.items()}, act)


def test_the_deadline_is_the_notice_less_the_last_save(acted: Any) -> None:
    deadline(acted, TERM=4.0).begin("signal TERM", save_s=0.75)
    assert acted[0].wait(30)
    assert acted[1][0] >= 2.0  # half of the notice at least, however long a save takes


def test_a_stop_that_has_begun_and_a_reason_without_a_notice_have_no_deadline(acted: Any) -> None:
    begun = deadline(acted, TERM=0.0)
    begun.end()
    begun.begin("signal TERM", save_s=0.0)
    deadline(acted, TERM=0.0).begin("asked for by the script", save_s=0.0)
    ended = threading.Event()
    other = deadline((ended, []), TERM=0.0)
    other.begin("signal TERM", save_s=0.0)  # begun after the others, at once: by its end they would have acted
    assert ended.wait(30)
    assert not acted[0].is_set()


@pytest.mark.parametrize("reasons", [("USR2", "TERM"), ("TERM", "USR2")])
def test_of_several_notices_the_nearest_end_counts_once(acted: Any, reasons: tuple[str, str]) -> None:
    """Slurm does not wait for the longer one."""
    several = deadline(acted, USR2=900.0, TERM=0.0)
    for reason in ("clusterddp stop", *reasons, "TERM"):
        several.begin(f"signal {reason}", save_s=0.0)
    assert acted[0].wait(30)
    wait_until(lambda: not any(timer.is_alive() for timer in several._timers if timer.interval == 0.0), "both timers")
    assert len(acted[1]) == 1
    several.end()


def test_a_hung_step_ends_with_the_checkpoint_before_it_and_the_stacks(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    where: dict[str, Any] = {"folder": tmp_path / "out", "CLUSTERDDP_TERM_NOTICE_S": "4"}
    ranks = ddp.start(script, tmp_path / "run", "hang", ranks=2, **where)
    ranks.wait_for(1, "hanging")
    wait_until(lambda: any((tmp_path / "run" / "checkpoints").glob("step-000000000004.*")), "checkpoint 4")
    ranks.signal(1)
    wait_until(lambda: ranks.processes[0].poll() is not None, "rank 0 to leave")
    assert ranks.processes[0].poll() == 75
    assert "the step did not end within" in ranks.output(0) and "most recent call first" in ranks.output(0)
    assert "exiting with checkpoint 4" in ranks.output(0)
    (overdue,) = [event for event in RunDirectory(tmp_path / "run").events() if event["event"] == "overdue"]
    assert overdue["seconds"] >= 2.0
    ranks.signal(1, signal.SIGKILL)
    assert "done from 8" in ddp.run(script, tmp_path / "run", ranks=2, folder=tmp_path / "out").output(0)
