"""A loop over a DataLoader of the script's own, with workers."""

from __future__ import annotations

from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.ranks.test_child_processes import TRAINING
from tests.ranks.test_local import submit
from tests.waiting import story

SCRIPT = """
import multiprocessing
import os
import signal
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
import clusterddp


class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(600)


ctx = clusterddp.init(device="cpu")
loader = DataLoader(TensorDataset(torch.arange(1000)), batch_size=1, num_workers=2, persistent_workers=True)
batches = iter(loader)
next(batches)
for process in [*multiprocessing.active_children(), multiprocessing.current_process()]:  # as Slurm or --local do
    os.kill(process.pid, signal.SIGTERM)
made = 0
for batch in batches:
    made += 1
    if clusterddp.stop_requested():
        break
made += sum(1 for _ in zip(range(20), batches))
print("stopped after the workers went on" if made > 20 else made, flush=True)
busy = iter(DataLoader(Slow(torch.arange(10)), num_workers=1))
clusterddp.requeue()
"""


def test_a_term_to_the_whole_job_spares_the_workers_and_none_delays_the_end(tmp_path: Path) -> None:
    """Loaders and iterators are still there when the process ends, one of them with a worker that is busy."""
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    ranks = ddp.start(script, ranks=2, folder=tmp_path / "out").expect(75)
    assert all("stopped after the workers went on" in ranks.output(rank) for rank in range(2))


SHARING = f"""
import multiprocessing
import torch.multiprocessing
from tests.stops import request_stop
torch.multiprocessing.set_sharing_strategy("file_system")
{TRAINING.replace("batch_size=1", "batch_size=1, num_workers=2, persistent_workers=True")}
for batch in run.steps(40 if ctx.attempt else 1_000_000):
    train(batch)
    if run.step == 1:
        print("workers", *(child.pid for child in multiprocessing.active_children()), flush=True)
    if run.step == 5 and ctx.attempt == 0:
        request_stop(ctx)
"""


def test_no_tensor_that_workers_shared_by_name_is_left_behind(tmp_path: Path) -> None:
    """Batches that were made in advance are files in /dev/shm, whose space nobody gets back, when a rank stops."""
    script, run = tmp_path / "sharing.py", RunDirectory(tmp_path / "run")
    script.write_text(SHARING)
    assert submit(run, str(script), "--device", "cpu", "--gpus", "1").returncode == 130, story(run)
    pids = (run.attempt_logs(0) / "rank-0.out").read_text().split("workers ")[1].split()
    assert len(pids) == 2
    assert not [file.name for pid in pids for file in Path("/dev/shm").glob(f"torch_{pid}_*")]


HELD = """
import multiprocessing, sys
import torch.multiprocessing
import clusterddp
torch.multiprocessing.set_sharing_strategy("file_system")
ctx = clusterddp.init(device="cpu")
batches = iter(torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=2, num_workers=1))
held = [next(batches) for _ in range(3)]
print("workers", *(child.pid for child in multiprocessing.active_children()), flush=True)
from clusterddp.data import workers
workers.close(batches)
del held[0], batches
print("sum", float(sum(batch.sum() for batch in held)), flush=True)
"""


def test_a_batch_that_outlives_its_worker_is_freed_as_ever(tmp_path: Path) -> None:
    """torch unlinks its file then, and aborts the process if somebody else has; what is never freed is not left."""
    script = tmp_path / "held.py"
    script.write_text(HELD)
    said = ddp.run_alone(script, folder=tmp_path / "out").output(0)
    assert "sum 16.0" in said
    worker = said.split("workers ")[1].split()[0]
    assert list(Path("/dev/shm").glob(f"torch_{worker}_*")) == []
