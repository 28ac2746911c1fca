"""SyncBatchNorm: normalizes over the batches of all ranks together, for batches too small to normalize alone.

torch implements it for GPUs only. On CPUs this script keeps BatchNorm, where each rank normalizes over its own batch.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import clusterddp


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=4, help="per rank")
    args = parser.parse_args()

    ctx = clusterddp.init()
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 2))
    if ctx.device.type == "cuda":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)  # before ctx.wrap()
    else:
        ctx.print("SyncBatchNorm needs GPUs: every rank normalizes over its own batch")
    model = ctx.wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 2
    images = torch.randn(400, 1, 8, 8, generator=generator) * (1 + labels[:, None, None, None])
    run = ctx.run(
        model=model,
        optimizer=optimizer,
        loader=ctx.loader(TensorDataset(images, labels), batch_size=args.batch_size),
    )
    for images, labels in run.steps(args.steps):
        loss = F.cross_entropy(model(images.to(ctx.device)), labels.to(ctx.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    # The running statistics are equal on all ranks at a step's end, with either kind of layer.
    ctx.print(f"running mean of channel 0: {model.module[1].running_mean[0]:.4f}")


if __name__ == "__main__":
    main()
