#!/usr/bin/env python
# Logistic regression on sparse features, resumed from the last file in the folder.
import glob
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

NUM_FEATURES, STEPS, SAVE_STEPS = 400, 54, 6
stop_now = False


def term(signum, frame):
    global stop_now
    stop_now = True


def find_checkpoint(folder):
    files = glob.glob(os.path.join(folder, "model_*.pt"))
    files.sort(key=lambda name: int(name.rsplit("_", 1)[1].removesuffix(".pt")))
    return files[-1] if files else None


def write_checkpoint(folder, step, model, optimizer):
    payload = (step, model.state_dict(), optimizer.state_dict())
    torch.save(payload, os.path.join(folder, "tmp"))
    os.rename(os.path.join(folder, "tmp"), os.path.join(folder, f"model_{step}.pt"))


def features(step, rank):
    gen = torch.Generator().manual_seed(step)
    x = (torch.rand(64, NUM_FEATURES, generator=gen) < 0.05).float()
    y = (x[:, ::2].sum(1) > x[:, 1::2].sum(1)).float()
    return x[rank::2], y[rank::2]


def main(folder="models"):
    signal.signal(signal.SIGTERM, term)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 32), torch.nn.Sigmoid(), torch.nn.Linear(32, 1))
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.5, momentum=0.9)

    start = 0
    checkpoint = find_checkpoint(folder)
    if checkpoint:
        start, weights, moments = torch.load(checkpoint)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        print("loaded", checkpoint, flush=True)
    dist.barrier()

    for step in range(start + 1, STEPS + 1):
        x, y = features(step, rank)
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(replica(x).squeeze(1), y)
        loss.backward()
        optimizer.step()

        vote = torch.tensor(float(stop_now))
        dist.all_reduce(vote)
        leaving = vote.item() > 0
        if rank == 0 and (leaving or step % SAVE_STEPS == 0):
            write_checkpoint(folder, step, model, optimizer)
        if leaving:
            break
    else:
        leaving = False

    return 1 if leaving else 0


if __name__ == "__main__":
    status = main()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(status)
