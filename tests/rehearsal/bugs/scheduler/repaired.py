"""Image-like classification on random blobs, one checkpoint that is overwritten.

torchrun --nproc-per-node 2 train.py --epochs 4
"""

import argparse
import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--output-dir", default="checkpoints")
    return parser.parse_args()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.norm = torch.nn.GroupNorm(2, 8)
        self.head = torch.nn.Linear(8 * 8 * 8, 4)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


def make_dataset():
    g = torch.Generator().manual_seed(7)
    labels = torch.randint(4, (384,), generator=g)
    images = torch.randn(384, 1, 8, 8, generator=g) + labels.view(-1, 1, 1, 1) * 0.3
    return TensorDataset(images, labels)


def main(args):
    terminated = []
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(True))

    torch.distributed.init_process_group(backend="gloo", init_method="env://")
    is_main = int(os.environ["RANK"]) == 0
    torch.manual_seed(1234)

    dataset = make_dataset()
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    net = Net()
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)

    start_epoch, start_iteration = 0, 0
    path = os.path.join(args.output_dir, "checkpoint.pth")
    if os.path.isfile(path):
        checkpoint = torch.load(path, map_location="cpu")
        net.load_state_dict(checkpoint["net"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start_epoch, start_iteration = checkpoint["epoch"], checkpoint["iteration"]

    def save(epoch, iteration):
        os.makedirs(args.output_dir, exist_ok=True)
        checkpoint = {
            "net": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
            "iteration": iteration,
        }
        torch.save(checkpoint, path + ".partial")
        os.rename(path + ".partial", path)

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for iteration, (images, labels) in enumerate(loader):
            if epoch == start_epoch and iteration < start_iteration:
                continue
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()

            votes = [None] * dist.get_world_size()
            dist.all_gather_object(votes, bool(terminated))
            if any(votes):
                if is_main:
                    print("terminated: saving and leaving", flush=True)
                    save(epoch, iteration + 1)
                return 1
        if is_main:
            print(f"epoch {epoch}  lr {scheduler.get_last_lr()[0]:.5f}", flush=True)
            save(epoch + 1, 0)
    return 0


if __name__ == "__main__":
    code = main(parse_args())
    dist.destroy_process_group()
    sys.exit(code)
