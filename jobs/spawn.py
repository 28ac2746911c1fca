"""The ranks of one machine without a launcher, by torch.multiprocessing: ``python jobs/spawn.py [RANKS] [RUN_DIR]``.

A launcher does this better (``clusterddp submit --local`` starts the ranks anew after a stop). Where the script must
start them by itself, as in a notebook, each rank needs no more than torchrun's variables.
"""

import os
import socket
import sys

import torch
from torch.utils.data import TensorDataset

import clusterddp


def train(rank, world_size, port, run_dir):
    place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    with clusterddp.init(device="cpu", run_dir=run_dir) as ctx:
        model = ctx.wrap(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = ctx.loader(TensorDataset(torch.randn(64, 4)), batch_size=4)
        run = ctx.run(model=model, optimizer=optimizer, loader=loader)
        for (x,) in run.steps(20):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        ctx.print(f"done at step {run.step} on {ctx.world_size} ranks")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    run_dir = sys.argv[2] if len(sys.argv) > 2 else "runs/spawn"
    torch.multiprocessing.spawn(train, (world_size, free_port(), run_dir), nprocs=world_size)
