"""A model on two devices per rank, in DDP: local rank r has GPUs 2r and 2r + 1 of its node. Without GPUs, the CPU.

DDP gets no device_ids: the model moves its activations, and its parameters stay on their devices. Plain torch.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group exists: imported later, by DDP, it would keep the group
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def two_devices(cuda, local_rank, local_world_size, gpus):
    """The devices of a rank's two halves. SystemExit if the node has fewer than two GPUs per rank."""
    if not cuda:
        return torch.device("cpu"), torch.device("cpu")
    if gpus < 2 * local_world_size:
        raise SystemExit(
            f"needs {2 * local_world_size} GPUs, found {gpus}: each of the node's ranks ({local_world_size}) takes two"
        )
    return torch.device("cuda", 2 * local_rank), torch.device("cuda", 2 * local_rank + 1)


class TwoDeviceModel(nn.Module):
    """The toy model, (samples, 10) to (samples, 5), with a layer on each device. Its output is on the second."""

    def __init__(self, first, second):
        super().__init__()
        self.devices = first, second
        self.first = nn.Linear(10, 10).to(first)
        self.second = nn.Linear(10, 5).to(second)

    def forward(self, inputs):
        hidden = self.first(inputs.to(self.devices[0])).relu()
        return self.second(hidden.to(self.devices[1]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    cuda = os.environ.get("CLUSTERDDP_DEVICE", "cuda" if torch.cuda.is_available() else "cpu") == "cuda"
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    first, second = two_devices(cuda, local_rank, local_world_size, torch.cuda.device_count())
    if cuda:
        torch.cuda.set_device(first)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = DistributedDataParallel(TwoDeviceModel(first, second))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(args.steps):
        data = torch.Generator().manual_seed(1000 * step + rank)
        inputs, targets = torch.randn(20, 10, generator=data), torch.randn(20, 5, generator=data)
        loss = F.mse_loss(model(inputs), targets.to(second))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss.detach_(), dist.ReduceOp.SUM)
    if rank == 0:
        print(f"{first} and {second}: loss {loss.item() / dist.get_world_size():.6f} after {args.steps} steps")
    del model  # DDP keeps a reference, too. If gloo's threads outlive the next line, a rank may hang or abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
