"""Learns products. A checkpoint is a folder with a file for the model and one for the optimizer and the step."""

import os
import shutil
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def write(folder, model, optimizer, step):
    os.makedirs(folder, exist_ok=True)
    parts = {"model.pt": model.module.state_dict(), "trainer.pt": {"adam": optimizer.state_dict(), "step": step}}
    for name, part in parts.items():
        torch.save(part, os.path.join(folder, f"{name}.part"))
        os.replace(os.path.join(folder, f"{name}.part"), os.path.join(folder, name))


def save(model, optimizer, step):
    shutil.rmtree("checkpoint-new", ignore_errors=True)
    write("checkpoint-new", model, optimizer, step)
    os.rename("checkpoint-new", f"checkpoint-{step:03d}")


def newest():
    found = sorted(name for name in os.listdir() if name.startswith("checkpoint-") and name != "checkpoint-new")
    return found[-1] if found else None


def main():
    dist.init_process_group("gloo")
    rank, leaving = dist.get_rank(), torch.zeros(1)
    signal.signal(signal.SIGTERM, lambda *_: leaving.fill_(1))
    torch.manual_seed(6)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 20), nn.SiLU(), nn.Linear(20, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = 0
    if folder := newest():
        model.module.load_state_dict(torch.load(os.path.join(folder, "model.pt")))
        trainer = torch.load(os.path.join(folder, "trainer.pt"))
        optimizer.load_state_dict(trainer["adam"])
        step = trainer["step"]
    dist.barrier()
    while step < 48:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 2 + rank))
        loss = nn.functional.mse_loss(model(x), x.prod(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(0.002)
        stop = leaving.clone()
        dist.all_reduce(stop)
        if rank == 0 and (stop.item() or step % 8 == 0) and not os.path.exists(f"checkpoint-{step:03d}"):
            save(model, optimizer, step)
        dist.barrier()
        if stop.item():
            sys.exit(1)
    dist.destroy_process_group()


main()
