"""A run over a loader that clusterddp did not make, and saves that the job's policies ask for: real gloo processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clusterddp.history.codec import sentence
from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.checkpoint_files import content_of
from tests.histories import event_of
from tests.trainings import events_of

SCRIPT = """
import sys, torch, clusterddp
from tests.stops import request_stop
from clusterddp.jobdef.job import Checkpointing; from clusterddp.jobdef.job import Keep
from clusterddp.errors import CheckpointError

class Letters:
    '''A loader of one's own: ten batches in each pass, every rank at a place of its own.'''
    def __init__(self, rank):
        self.rank, self.place = rank, 0
        self.num_workers = 2 if "workers" in sys.argv else 0
        self.length = 7 if rank == 1 and "uneven" in sys.argv else 10
    def __iter__(self):
        while self.place < self.length:
            self.place += 1
            if "random" in sys.argv and self.rank == 1:
                torch.rand(1)
            yield 10 * self.rank + self.place
        self.place = 0  # not before the next batch is asked for
    def set_epoch(self, epoch):
        self.epoch = epoch
    def state_dict(self):
        return {"place": self.place, "rank": self.rank}
    def load_state_dict(self, state):
        assert state["rank"] == self.rank
        self.place = state["place"]

run_dir, total, stop_at, every_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
by_time = "by time" in every_s
policy = Checkpointing(every_steps=None if by_time else 6, every_s=0.0 if by_time else None, keep=Keep(99))
ctx = clusterddp.init(run_dir=run_dir, checkpoint=policy)
model = ctx.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
best = "score" if "best" in sys.argv else None
letters = Letters(ctx.rank)
run = ctx.run(model=model, optimizer=optimizer, loader=letters, best=best)
for batch in run.steps(total):
    if best and run.every(epochs=1):
        run.log(score=run.step)
    print("took", batch, "in pass", run.epoch, flush=True)
    assert letters.epoch == run.epoch
    loss = model(torch.tensor([[float(batch)]])).sum()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    run.log(loss=loss)
    if run.step == stop_at and ctx.rank == 0:
        request_stop(ctx)
"""


@pytest.fixture
def script(tmp_path: Path) -> Any:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def taken(ranks: ddp.Ranks, rank: int) -> list[str]:
    return [line for line in ranks.output(rank).splitlines() if line.startswith("took")]


@pytest.mark.parametrize("stop_at", [13, 9], ids=["in mid-pass", "on the last batch of a pass"])
def test_each_rank_resumes_where_its_loader_was(tmp_path: Path, script: Any, stop_at: Any) -> None:
    whole = ddp.run(script, tmp_path / "whole", 25, -1, ranks=2, folder=tmp_path / "out")
    run = tmp_path / "run"
    first = ddp.start(script, run, 25, stop_at, ranks=2, folder=tmp_path / "out").expect(75)
    second = ddp.run(script, run, 25, -1, ranks=2, folder=tmp_path / "out")
    for rank in range(2):
        assert taken(first, rank) + taken(second, rank) == taken(whole, rank)
        assert taken(whole, rank)[10] == f"took {10 * rank + 1} in pass 1"
    (resumed,) = [event for event in RunDirectory(run).events() if event["event"] == "resumed"]
    assert resumed["inexact"] == []
    newest = content_of(max((run / "checkpoints").glob("step-*")))
    assert newest["progress"]["loaders"] == [{"place": 5, "rank": 0}, {"place": 5, "rank": 1}]


def test_each_rank_counts_its_own_passes(tmp_path: Path, script: Any) -> None:
    """Of 10 batches on rank 0, and of 7 on rank 1."""
    run, options = tmp_path / "run", ["by time", "uneven"]
    first = ddp.start(script, run, 25, 8, *options, ranks=2, folder=tmp_path / "out").expect(75)
    second = ddp.run(script, run, 25, -1, *options, ranks=2, folder=tmp_path / "out")
    for rank, length in enumerate([10, 7]):
        expected = [f"took {10 * rank + step % length + 1} in pass {step // length}" for step in range(25)]
        assert taken(first, rank) + taken(second, rank) == expected


def test_the_best_step_is_saved_by_all_ranks(tmp_path: Path, script: Any) -> None:
    """The evaluation is in the first step of the second pass, right before or after the stop."""
    ddp.run(script, tmp_path / "whole", 12, -1, "best", ranks=2, folder=tmp_path / "out")
    runs = [ddp.start(script, tmp_path / "run", 12, 9, "best", ranks=2, folder=tmp_path / "out").expect(75)]
    runs.append(ddp.run(script, tmp_path / "run", 12, -1, "best", ranks=2, folder=tmp_path / "out"))
    for rank in range(2):
        places = [int(line.split()[1]) - 10 * rank for run in runs for line in taken(run, rank)]
        assert places == [*range(1, 11), 1, 2]
    for run in ("whole", "run"):
        found = RunDirectory(tmp_path / run)
        assert [line["step"] for line in found.metrics() if "score" in line] == [10]
        bests = [event["step"] for event in found.events() if event["event"] == "checkpoint" and "best" in event]
        assert bests == [11]


@pytest.mark.parametrize(
    ("option", "inexact"),
    [
        ("random", "Letters draws from the global random generators"),  # on rank 1 alone
        ("workers", "the workers of Letters draw their own random numbers"),
    ],
)
def test_a_loader_that_may_not_repeat_its_batches_is_reported(
    tmp_path: Path, script: Any, option: Any, inexact: Any
) -> None:
    run = tmp_path / "run"
    ddp.run(script, run, 6, -1, option, ranks=2, folder=tmp_path / "out")
    ddp.run(script, run, 7, -1, option, ranks=2, folder=tmp_path / "out")
    (resumed,) = [event for event in RunDirectory(run).events() if event["event"] == "resumed"]
    assert resumed["inexact"] == [inexact]


@pytest.mark.parametrize(("options", "steps"), [((), {6, 12, 18, 24, 25}), (("by time",), {20, 25})])
def test_all_ranks_save_at_steps_that_all_of_them_know(tmp_path: Path, script: Any, options: Any, steps: Any) -> None:
    ddp.run(script, tmp_path / "run", 25, -1, *options, ranks=2, folder=tmp_path / "out")
    assert {int(path.name[5:17]) for path in (tmp_path / "run" / "checkpoints").iterdir()} == steps


def test_another_number_of_ranks_cannot_use_the_states_and_is_refused(tmp_path: Path, script: Any) -> None:
    ddp.run(script, tmp_path / "run", 4, -1, ranks=2, folder=tmp_path / "out")
    alone = ddp.start(script, tmp_path / "run", 8, -1, ranks=1, folder=tmp_path / "out").expect(1)
    assert "the checkpoint has the Letters states of 2 ranks, but the world size is now 1" in alone.output(0)


ITERABLE = """
import multiprocessing, os, random, signal, sys, time
import numpy, torch, clusterddp
from tests.stops import await_stop
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

class Numbers(IterableDataset):
    '''Thirty numbers in each pass, in another order each time; every worker of every rank has its part.'''
    def __init__(self, rank, ranks):
        self.rank, self.ranks, self.epoch = rank, ranks, 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        worker = get_worker_info()
        numbers = random.Random(self.epoch).sample(range(30), 30)
        for number in numbers[self.rank :: self.ranks][worker.id :: worker.num_workers]:
            yield number, random.random(), numpy.random.rand(), torch.rand(1)

run_dir, stop_at, persistent = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
ctx = clusterddp.init(run_dir=run_dir)
loader = DataLoader(Numbers(ctx.rank, ctx.world_size), 3, num_workers=2, persistent_workers=persistent)
model = ctx.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
for batch in run.steps(25):
    print("took", [part.tolist() for part in batch], "in pass", run.epoch, flush=True)
    loss = model(torch.stack([part.float().reshape(-1) for part in batch], dim=1)).sum()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    run.log(loss=loss)
    if run.step == stop_at and ctx.attempt == 0:  # Slurm signals all processes of a job
        for pid in [*(child.pid for child in multiprocessing.active_children()), os.getpid()]:
            os.kill(pid, signal.SIGTERM)
        await_stop(ctx)
"""


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.product)])
def test_an_iterable_dataset_with_workers_that_was_preempted_is_read_again_to_its_place(
    tmp_path: Path, persistent: bool
) -> None:
    """A pass is six batches of a rank, in two workers. What these draw is also the same again."""
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(ITERABLE)
    whole = ddp.run(script, tmp_path / "whole", -1, persistent, ranks=2, folder=tmp_path / "out")
    first = ddp.start(script, run, 8, persistent, ranks=2, folder=tmp_path / "out").expect(75)
    second = ddp.run(script, run, 8, persistent, ranks=2, folder=tmp_path / "out")
    (resumed,) = [event for event in RunDirectory(run).events() if event["event"] == "resumed"]
    assert resumed["step"] == 9
    for rank in range(2):
        assert taken(first, rank) + taken(second, rank) == taken(whole, rank)
        passes = [line.rpartition(" ")[2] for line in taken(whole, rank)]
        assert passes == [str(step // 6) for step in range(25)]
    assert "Reading its first 9 batches again took" in second.output(0)
    losses = [[line["loss"] for line in RunDirectory(path).metrics()] for path in (run, tmp_path / "whole")]
    assert losses[0] == losses[1]


POLICIES = """
import sys, torch, clusterddp
from clusterddp.jobdef.job import Checkpointing, Keep
from clusterddp.training import saving
saving.FIRST_S = 0.0
policy = {
    "best": Checkpointing(None, None, keep=Keep(last=1, best="f1")),
    "nan": Checkpointing(None, None, keep=Keep(last=1, best="f1")),
    "misspelt": Checkpointing(None, None, keep=Keep(last=1, best="F1")),
    "auto": Checkpointing(None, None, auto=True),
}[sys.argv[2]]
ctx = clusterddp.init(run_dir=sys.argv[1], checkpoint=policy)
model = ctx.wrap(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(torch.zeros(16, 4), batch_size=2))
scores = {3: 0.5, 7: 0.9, 11: 0.7, 15: 0.2} if sys.argv[2] != "nan" else {3: float("nan")}
for batch in run.steps(int(sys.argv[3])):
    model(batch).sum().backward()
    optimizer.step()
    if run.step in scores:
        run.log(f1=scores[run.step])
"""


def test_the_best_step_is_saved_itself_and_kept_across_attempts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(POLICIES)
    folder = tmp_path / "run" / "checkpoints"

    def steps() -> set[int]:
        return {int(path.name[5:17]) for path in folder.iterdir()}

    ddp.run(script, tmp_path / "run", "best", 9, ranks=2, folder=tmp_path / "out")
    assert steps() == {8, 9}
    ddp.run(script, tmp_path / "run", "best", 20, ranks=2, folder=tmp_path / "out")
    assert steps() == {8, 20}  # 0.7 and 0.2 of the second attempt are no better


def test_a_metric_that_no_step_logs_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(POLICIES)
    ranks = ddp.run(script, tmp_path / "run", "misspelt", 9, ranks=2, folder=tmp_path / "out")
    assert "no step has logged 'F1', the metric of the best checkpoint. Logged so far: f1" in ranks.output(0)
    assert "no step has logged" not in ranks.output(1)
    (said,) = events_of(RunDirectory(tmp_path / "run"), "no_best")
    assert (
        sentence(event_of(said))
        == "attempt 0: there is no best checkpoint, because the script never logged 'F1', only f1"
    )
    ranks = ddp.run(script, tmp_path / "nan", "nan", 9, ranks=1, folder=tmp_path / "out")
    assert "no step has logged" not in ranks.output(0)


def test_a_chosen_interval_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(POLICIES)
    ddp.run(script, tmp_path / "run", "auto", 50, ranks=2, folder=tmp_path / "out")
    chosen = [event for event in RunDirectory(tmp_path / "run").events() if event["event"] == "interval"]
    assert chosen
    for event in chosen:
        assert event["seconds"] >= 10 and event["stall_s"] > 0 and event["between_s"] >= 86400
        assert "saving every" in (sentence(event_of(event)) or "")


ON_REQUEST = (
    SCRIPT
    + """
    if run.step == 3:
        ctx._stopping.saver.request()
    if ctx._stopping.saver.committed == 20:
        print("committed before step", run.step)
        run.finish()
"""
)


def test_a_save_that_the_user_asks_for_comes_with_the_next_decision_of_all_and_is_reported_when_it_is_committed(
    tmp_path: Path,
) -> None:
    """After 20 steps, although the job saves every 100,000; a request must not wait for the save after that."""
    script = tmp_path / "script.py"
    script.write_text(ON_REQUEST.replace("else 6, ", "else 100_000, "))
    said = ddp.run(script, tmp_path / "run", 50_000, -1, ranks=1, folder=tmp_path / "out").output(0)
    assert re.search(r"committed before step \d+\n", said), said[-2000:]
