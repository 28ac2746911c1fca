"""Weighted sampling: rare classes are drawn as often as common ones, in place of ``WeightedRandomSampler``."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import clusterddp
from clusterddp import orders


def imbalanced_data():
    """Two classes; one sample in 20 is of class 1."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(2000) % 20 == 0).long()
    return TensorDataset(torch.randn(2000, 8, generator=generator) + labels[:, None], labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    ctx = clusterddp.init()
    dataset = imbalanced_data()
    all_inputs, all_labels = dataset.tensors
    model = ctx.wrap(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = orders.weighted(orders.class_weights(all_labels), all_labels)
    loader = ctx.loader(dataset, batch_size=32, order=order, num_workers=args.workers)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader)
    for inputs, labels in run.steps(args.steps):
        loss = F.cross_entropy(model(inputs.to(ctx.device)), labels.to(ctx.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, rare=labels.float().mean())
    found = model.module(all_inputs.to(ctx.device)).argmax(1)[all_labels.to(ctx.device) == 1].float().mean()
    ctx.print(f"{found:.0%} of the rare samples are recognized")


if __name__ == "__main__":
    main()
