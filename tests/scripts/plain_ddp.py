"""A typical script for torchrun: it does not use clusterddp and resumes from its own file."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel


def main():
    path, total, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = 0
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        first = state["step"]
    print(f"rank {rank} (local {local_rank}) of {world_size} starts at step {first} with {sys.argv[4:]}", flush=True)
    for step in range(first, total):
        loss = model(torch.full((2, 4), float(rank))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(pause_s)
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, path + ".tmp")
            os.replace(path + ".tmp", path)
    dist.barrier()
    print(f"rank {rank} is done", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
