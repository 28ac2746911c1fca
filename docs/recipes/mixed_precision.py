"""Gradient accumulation and mixed precision: a step's samples in pieces, float16 with a GradScaler.

``--set global_batch=N``, or ``global_batch: N`` in the job definition, fixes the samples per step over all ranks; a
rank takes at most ``--batch-size`` of its share at a time.
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
    parser.add_argument("--batch-size", type=int, default=16, help="samples that a rank takes at a time")
    args = parser.parse_args()

    ctx = clusterddp.init()
    model = ctx.wrap(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(ctx.device.type)  # bfloat16 needs none
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 32, generator=generator)
    dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    loader = ctx.loader(dataset, batch_size=args.batch_size)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader, scaler=scaler)
    for batch in run.steps(args.steps):
        losses = []
        for inputs, targets in run.micro(batch):  # the gradients are exchanged with the last piece only
            with torch.autocast(ctx.device.type, torch.float16):
                loss = F.mse_loss(model(inputs.to(ctx.device)), targets.to(ctx.device))
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.log(loss=torch.stack(losses).mean(), scale=scaler.get_scale())
    ctx.print(f"{loader.share} samples per rank and step, at most {args.batch_size} at a time")


if __name__ == "__main__":
    main()
