"""Starts the ranks on one machine with torch.multiprocessing: ``python jobs/spawn.py RANKS SCRIPT.py [ARGS]``.

A launcher is better (``clusterddp submit --local`` restarts the ranks after a stop). Where Python itself must start
them, as in a notebook, each rank needs only torchrun's variables.
"""

import os
import runpy
import socket
import sys

import torch


def run_rank(rank, world_size, port, command):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")  # or your own function


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    world_size = int(sys.argv[1])
    torch.multiprocessing.spawn(run_rank, (world_size, free_port(), sys.argv[2:]), nprocs=world_size)
