"""A loop of its own over NCCL that saves in a CheckpointFolder: folder.py FOLDER STEPS BACKEND"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import clusterddp

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group(sys.argv[3])
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 8, device=device), device_ids=[device.index])
optimizer = torch.optim.Adam(model.parameters())
with clusterddp.CheckpointFolder(sys.argv[1], keep=2) as folder:
    first = folder.restore(model=model, optimizer=optimizer)
    for step in range(first, int(sys.argv[2])):
        optimizer.zero_grad()
        model(torch.full((1, 8), step + dist.get_rank() + 1.0, device=device)).square().sum().backward()
        optimizer.step()
        folder.save(step + 1, model=model, optimizer=optimizer)
print(f"from {first}: {model.module.weight.double().sum().item().hex()}", flush=True)
dist.barrier()
os._exit(0)  # gloo's threads can block the end of a process whose model is in DDP (torch 2.13)
