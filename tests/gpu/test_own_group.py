"""A script's own process group of NCCL alone, as torch's examples make it: the run communicates over it."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp

SCRIPT = """
import os, sys, torch, clusterddp
import torch.distributed as dist
from tests.stops import request_stop
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
if sys.argv[2] == "first":
    init_process_group("nccl")
ctx = clusterddp.init(run_dir=sys.argv[1])
if sys.argv[2] != "first":
    init_process_group("nccl")
assert dist.get_backend_config() == "cuda:nccl" and ctx.device.type == "cuda"
assert ctx.all_reduce_sum(ctx.rank) == 1
model = DistributedDataParallel(torch.nn.Linear(4, 1).to(ctx.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ctx.loader(TensorDataset(torch.ones(64, 4)), batch_size=2)
run = ctx.run(model=model, optimizer=optimizer, loader=loader, per_rank={"generator": torch.Generator()})
print("begins at", run.step, flush=True)
for (batch,) in run.steps(6):
    if run.step == 2 and ctx.attempt == 0:
        request_stop(ctx)
    optimizer.zero_grad()
    model(batch.to(ctx.device)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_run_over_the_scripts_own_nccl_group_saves_and_resumes(when: str, tmp_path: Path) -> None:
    script, run = tmp_path / "script.py", RunDirectory(tmp_path / "run")
    script.write_text(SCRIPT)
    ddp.start(script, run, when, ranks=2, folder=tmp_path / "out", devices=2).expect(75)
    ranks = ddp.run(script, run, when, ranks=2, folder=tmp_path / "out", devices=2)
    for rank in range(2):
        assert "begins at 3" in ranks.output(rank) or "begins at 4" in ranks.output(rank), ranks.text()
