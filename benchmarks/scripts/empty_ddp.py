"""The least that a DDP job does, under plain srun: joins gloo, makes one step, says when. No clusterddp.

``empty_ddp.py FILE``: rank 0 writes the time at which the step was done.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"])
os.environ.update(MASTER_ADDR=os.environ["SLURM_LAUNCH_NODE_IPADDR"], MASTER_PORT="9577", GLOO_SOCKET_IFNAME="eth0")
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(torch.randn(4, 16)).square().mean().backward()
optimizer.step()
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "a") as file:
        file.write(f"{time.time()}\n")
sys.stdout.flush()
os._exit(0)
