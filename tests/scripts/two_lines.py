"""A repository's script with two lines of clusterddp: its own process group, a sharded model, its own save of a folder.

``two_lines.py FOLDER STEPS [forgets]``: with the last one it does not resume in attempt 1. In step 5 of attempt N it
waits for a file ``go-N``.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import clusterddp

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6, which has it for GPUs alone
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def fully_shard(model, mesh):
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def main():
    folder, steps, attempt = sys.argv[1], int(sys.argv[2]), os.environ["CLUSTERDDP_ATTEMPT"]
    forgets = "forgets" in sys.argv and attempt == "1"
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = 0
    if os.path.exists(folder) and not forgets:
        state = {"model": model.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        first = state["step"]
    print(f"rank {rank} starts at step {first}", flush=True)
    for step in range(first, steps):
        model(torch.full((4, 8), float(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            print("at step 5", flush=True)
            while not os.path.exists(f"go-{attempt}"):
                time.sleep(0.01)
        if clusterddp.stop_requested():
            print(f"rank {rank} stops after step {step + 1}", flush=True)
            dcp.save({"model": model.state_dict(), "step": step + 1}, checkpoint_id=folder)
            clusterddp.requeue(saved=folder)
    total = sum(parameter.full_tensor().sum().item() for parameter in model.parameters())
    print(f"rank {rank} is done: {total:.9f}", flush=True)
    dist.destroy_process_group()


main()
