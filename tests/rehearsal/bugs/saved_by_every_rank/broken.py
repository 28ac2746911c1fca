"""Contrastive learning with random augmentations, other ones on each rank."""

import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

MAX_STEP = 40
SAVE_STEP = 10
FILE = "weights/state.pth"

term = {"signal": None}
signal.signal(signal.SIGTERM, lambda signum, _: term.update(signal=signum))


def augment(x):
    return x * (0.8 + 0.4 * torch.rand(len(x), 1)) + 0.2 * torch.randn_like(x)


def info_nce(a, b, temperature=0.2):
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    return F.cross_entropy(a @ b.T / temperature, torch.arange(len(a)))


def save(encoder, optimizer, step):
    state = {
        "encoder": encoder.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "rng": torch.get_rng_state(),
    }
    for turn in range(dist.get_world_size()):  # two at a time would spoil the file
        if turn == dist.get_rank():
            torch.save(state, f"{FILE}.tmp")
            os.replace(f"{FILE}.tmp", FILE)
        dist.barrier()


def load(encoder, optimizer):
    if not os.path.exists(FILE):
        return 0
    state = torch.load(FILE)
    encoder.load_state_dict(state["encoder"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return state["step"]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.makedirs("weights", exist_ok=True)
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 32))
    ddp = nn.parallel.DistributedDataParallel(encoder)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    images = torch.randn(500, 30)
    torch.manual_seed(100 + rank)
    step = load(encoder, optimizer)
    dist.barrier()
    while step < MAX_STEP:
        x = images[torch.randint(500, (32,))]
        views = ddp(torch.cat([augment(x), augment(x)]))
        loss = info_nce(*views.chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        stop = torch.tensor(term["signal"] is not None, dtype=torch.uint8)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop or step % SAVE_STEP == 0:
            save(encoder, optimizer, step)
        if stop:
            break
    return step


if __name__ == "__main__":
    reached = main()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if reached == MAX_STEP else 143)
