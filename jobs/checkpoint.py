"""Checkpoints with plain DDP, without clusterddp: rank 0 saves, all ranks wait, every rank loads.

After a restart it resumes from its last checkpoint. The steps since then are repeated. checkpoint_folder.py is the same
with clusterddp.CheckpointFolder.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group exists: imported later, by DDP, it would keep the group
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def save(path, step, model, optimizer):
    """Rank 0 writes. After the barrier any rank finds the whole file, on a disk that all nodes share."""
    if dist.get_rank() == 0:
        state = {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)  # a rank killed while it writes leaves the previous file intact
    dist.barrier()


def load(path, model, optimizer, device):
    """Every rank reads to its own device. Without map_location, all would load to the device of rank 0."""
    state = torch.load(path, map_location=device, weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--folder", default=os.environ.get("CLUSTERDDP_RUN_DIR", "."), help="the run directory")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="set by torch.distributed.launch, ignored")
    args = parser.parse_args()

    cuda = os.environ.get("CLUSTERDDP_DEVICE", "cuda" if torch.cuda.is_available() else "cpu") == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # barriers use it
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(10, 5).to(device), device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    path = Path(args.folder) / "checkpoint.pt"
    first = load(path, model, optimizer, device) if path.exists() else 0
    print(f"rank {rank} starts at step {first}", flush=True)
    for step in range(first, args.steps):
        data = torch.Generator().manual_seed(1000 * step + rank)  # a step's data, the same after a restart
        inputs, targets = torch.randn(20, 10, generator=data), torch.randn(20, 5, generator=data)
        loss = F.mse_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(path, step + 1, model, optimizer)
    print(f"rank {rank} is done: weights sum to {sum(p.sum() for p in model.parameters()):.6f}", flush=True)
    del model  # DDP keeps a reference, too. If gloo's threads outlive the next line, a rank may hang or abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
