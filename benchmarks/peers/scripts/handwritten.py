"""PyTorch's tutorials: "Getting Started with Distributed Data Parallel" (intermediate/ddp_tutorial) and "Saving and
loading a general checkpoint" (recipes/saving_and_loading_a_general_checkpoint)."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import BATCH, EPOCHS, LR, PER_EPOCH, SAVE_EPOCHS, SEED, TIMEOUT_S, Net, train_set
from steplog import finish, steplog
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S))
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
sampler = DistributedSampler(train_set, seed=SEED)
loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)
first_epoch = 0
if os.path.exists("checkpoint.pt"):
    checkpoint = torch.load("checkpoint.pt", map_location="cpu")
    model.module.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    first_epoch = checkpoint["epoch"] + 1
for epoch in range(first_epoch, EPOCHS):
    sampler.set_epoch(epoch)
    for index, (images, labels) in enumerate(loader):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steplog(epoch * PER_EPOCH + index)
    if rank == 0 and (epoch + 1) % SAVE_EPOCHS == 0:
        torch.save(
            {
                "epoch": epoch,
                "model_state_dict": model.module.state_dict(),
                "optimizer_state_dict": optimizer.state_dict(),
                "loss": loss.item(),
            },
            "checkpoint.pt",
        )
finish(model.module)
dist.destroy_process_group()
