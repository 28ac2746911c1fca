"""Fits a small network to a noisy sine. Checkpoints every 10 steps, and when the job is preempted."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 50
SAVE_EVERY = 10
CHECKPOINT = "out/checkpoint.pt"

preempted = False


def on_sigterm(signum, frame):
    global preempted
    preempted = True


def any_rank_preempted():
    flag = torch.tensor(float(preempted))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return flag.item() > 0


def get_batch(step, rank):
    g = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.rand(64, 1, generator=g) * 6 - 3
    return x, torch.sin(x) + 0.1 * torch.randn(64, 1, generator=g)


def save_checkpoint(model, optimizer, step):
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
    }
    torch.save(state, CHECKPOINT + ".tmp")
    os.replace(CHECKPOINT + ".tmp", CHECKPOINT)


def main():
    signal.signal(signal.SIGTERM, on_sigterm)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(1, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    first_step = 0
    os.makedirs("out", exist_ok=True)
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
        if rank == 0:
            print(f"resumed from step {first_step}")

    for step in range(first_step, STEPS):
        x, y = get_batch(step, rank)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        stop = any_rank_preempted()
        if rank == 0 and (stop or (step + 1) % SAVE_EVERY == 0):
            print(f"step {step + 1}: loss {loss.item():.4f}")
            save_checkpoint(model, optimizer, step + 1)
        if stop:
            return 143
    return 0


if __name__ == "__main__":
    code = main()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(code)
