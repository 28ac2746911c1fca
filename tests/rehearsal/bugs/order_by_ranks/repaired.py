"""Polynomial regression in double precision with a fixed global batch, on as many ranks as the job gets."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler, TensorDataset

GLOBAL_BATCH = 24
EPOCHS = 4
SAVE_EVERY = 10


class ShuffledShard(Sampler):
    """This rank's samples of an epoch, shuffled, from the given step on."""

    def __init__(self, length, rank, world_size, seed=0):
        self.length, self.rank, self.world_size, self.seed = length, rank, world_size, seed
        self.epoch = self.first_step = 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.length, generator=g)[self.first_step * GLOBAL_BATCH :]
        return iter(order[self.rank :: self.world_size].tolist())


def dataset():
    x = torch.linspace(-1, 1, 288, dtype=torch.float64).unsqueeze(1)
    powers = torch.cat([x**n for n in range(1, 9)], dim=1)
    return TensorDataset(powers, torch.sin(5 * x) + x.abs())


def main():
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append("stop"))
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = dataset()
    sampler = ShuffledShard(len(data), rank, world_size, seed=17)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // world_size, sampler=sampler)
    steps_per_epoch = len(data) // GLOBAL_BATCH

    torch.manual_seed(17)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
    step = 0
    if os.path.exists("polynomial.pth"):
        state = torch.load("polynomial.pth")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    dist.barrier()

    def save():
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, "polynomial.pth.tmp")
            os.replace("polynomial.pth.tmp", "polynomial.pth")

    code = 0
    while step < EPOCHS * steps_per_epoch and not code:
        sampler.epoch, sampler.first_step = divmod(step, steps_per_epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            step += 1
            stop = torch.tensor(len(told))
            dist.all_reduce(stop)
            if stop or step % SAVE_EVERY == 0:
                save()
            if stop:
                code = 143
                break
    save()
    return code


if __name__ == "__main__":
    how = main()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(how)
