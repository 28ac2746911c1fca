"""Rare digits are drawn as often as common ones: weighted sampling, in place of ``WeightedRandomSampler``.

Data: that of digits.py, with only a twentieth of the images of 5 to 9.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import clusterddp
from clusterddp import orders


class Digits(Dataset):
    """Images (1, 8, 8), scaled to 0..1, each moved by up to a pixel, and their labels."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        shift = torch.randint(-1, 2, (2,)).tolist()  # each draw of the same image has a new shift
        return self.images[index].roll(shift, (1, 2)), self.labels[index]


def load_digits():
    """Training images, of which few are of 5 to 9, and test images: 769 and 360."""
    table = torch.from_numpy(np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",", dtype=np.float32))
    images, labels = table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].long()
    number = torch.arange(len(table))
    test = number % 5 == 0
    kept = ~test & ((labels < 5) | (number % 20 == 1))
    return images[kept], labels[kept], images[test], labels[test]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    ctx = clusterddp.init()
    images, labels, test_images, test_labels = load_digits()
    model = ctx.wrap(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    order = orders.weighted(orders.class_weights(labels), labels)  # a weight per class, and each image's class
    loader = ctx.loader(Digits(images, labels), batch_size=32, order=order, num_workers=args.workers)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader)
    for inputs, targets in run.steps(args.steps):
        loss = F.cross_entropy(model(inputs.to(ctx.device)), targets.to(ctx.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, rare=(targets >= 5).float().mean())  # "rare": about 0.5

    with torch.no_grad():
        right = model.module(test_images.to(ctx.device)).argmax(1).cpu() == test_labels
    rare = test_labels >= 5
    ctx.print(f"{len(labels)} training images, {(labels >= 5).float().mean():.0%} of them of 5 to 9")
    of_rare, of_others = right[rare].float().mean(), right[~rare].float().mean()
    ctx.print(f"test images that are recognized: {of_rare:.0%} of 5 to 9, {of_others:.0%} of the others")


if __name__ == "__main__":
    main()
