"""Learns a distance between points (a Siamese network). It saves and leaves when it is asked to."""

import os
import signal
import sys
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


@contextmanager
def process_group():
    dist.init_process_group(backend="gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


class GracefulExit(BaseException):
    """Raised on all ranks at the end of a step, after one of them got SIGTERM."""


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 120), nn.ReLU(), nn.Linear(120, 12))

    def forward(self, left, right):
        return (self.body(left) - self.body(right)).norm(dim=1)


class State:
    def __init__(self, path):
        self.path = path
        torch.manual_seed(12)
        self.model = nn.parallel.DistributedDataParallel(Siamese())
        self.optim = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.step = 0

    def save(self):
        if dist.get_rank() == 0:
            everything = [self.step, self.model.module.state_dict(), self.optim.state_dict()]
            torch.save(everything, self.path + ".0")
            os.replace(self.path + ".0", self.path)

    def load(self):
        if os.path.exists(self.path):
            self.step, model, optim = torch.load(self.path)
            self.model.module.load_state_dict(model)
            self.optim.load_state_dict(optim)
        dist.barrier()


def loop(state, rank, stopping, last_step=42, save_every=14):
    while state.step < last_step:
        g = torch.Generator().manual_seed(9 * state.step + rank)
        left, right = torch.randn(2, 50, 9, generator=g)
        loss = nn.functional.l1_loss(state.model(left, right), (left - right)[:, :3].abs().sum(dim=1))
        state.optim.zero_grad()
        loss.backward()
        state.optim.step()
        state.step += 1
        dist.all_reduce(together := torch.tensor(len(stopping)))
        if together > 0:
            raise GracefulExit
        if state.step % save_every == 0:
            state.save()


def train(rank, stopping):
    state = State("siamese.pt")
    state.load()
    try:
        loop(state, rank, stopping)
    except GracefulExit:
        state.save()
        print(f"rank {rank} stops after step {state.step}, bye", flush=True)
        return 143
    return 0


def main():
    stopping = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    with process_group() as rank:
        code = train(rank, stopping)
        dist.barrier()
    return code


if __name__ == "__main__":
    sys.exit(main())
