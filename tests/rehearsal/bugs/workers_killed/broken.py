"""Trains on samples that two loader workers per rank prepare."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS = 3
BATCH = 8
SAVE_INTERVAL = 12

sigterm_received = False


def handle_sigterm(signum, frame):
    global sigterm_received
    sigterm_received = True


class Waveforms(Dataset):
    """Frequencies and the waveforms to learn them from."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        frequency = 1 + index % 16
        phase = torch.rand((), generator=torch.Generator().manual_seed(index))
        wave = torch.sin(torch.linspace(0, 6.28, 64) * frequency + 6.28 * phase)
        return wave, torch.tensor(index % 16)


def batches_of(epoch, rank, world_size):
    """This rank's batches of indices in this epoch."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(epoch)).tolist()
    own = order[rank::world_size]
    return [own[i : i + BATCH] for i in range(0, len(own), BATCH)]


def make_loader(batches):
    return DataLoader(Waveforms(), batch_sampler=batches, num_workers=2)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    signal.signal(signal.SIGTERM, handle_sigterm)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(), nn.Linear(128, 16))
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    epoch, position = 0, 0
    if os.path.exists("model/checkpoint.pt"):
        checkpoint = torch.load("model/checkpoint.pt")
        network.load_state_dict(checkpoint["network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        epoch, position = checkpoint["epoch"], checkpoint["position"]
        print(f"rank {rank}: epoch {epoch}, batch {position}", flush=True)
    os.makedirs("model", exist_ok=True)

    def save_checkpoint():
        if rank == 0:
            checkpoint = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint |= {"epoch": epoch, "position": position}
            torch.save(checkpoint, "model/checkpoint.pt.tmp")
            os.replace("model/checkpoint.pt.tmp", "model/checkpoint.pt")

    while epoch < EPOCHS:
        for waves, labels in make_loader(batches_of(epoch, rank, world_size)[position:]):
            loss = nn.functional.cross_entropy(model(waves), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            position += 1
            flag = torch.tensor([sigterm_received], dtype=torch.int)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if flag.item():
                save_checkpoint()
                return 143
            if position % SAVE_INTERVAL == 0:
                save_checkpoint()
        epoch, position = epoch + 1, 0
    save_checkpoint()
    return 0


if __name__ == "__main__":
    result = main()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(result)
