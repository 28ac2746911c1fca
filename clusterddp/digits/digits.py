"""Handwritten digits: a small CNN in DDP, with test accuracy and macro-F1 over all ranks.

Data: the test part of the UCI "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998, CC BY 4.0):
1,797 images of 8 x 8 pixels with values 0 to 16, and the digit in the last column.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import clusterddp


def load_digits(fold=4, folds=5):
    """Training and test sets of images (1, 8, 8), scaled to 0..1, with labels: 1,438 and 359 samples by default.

    The test set is part ``fold`` of the data in ``folds`` parts.
    """
    table = torch.from_numpy(np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",", dtype=np.float32))
    images, labels = table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].long()
    test = torch.arange(len(table)) % folds == fold
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


class Net(nn.Sequential):
    """Two convolutions and two linear layers, about 70,000 parameters."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.1), nn.Linear(512, 112), nn.ReLU(), nn.Linear(112, 10),
        )  # fmt: skip


@torch.no_grad()
def evaluate(ctx, model, loader):
    """Accuracy, counted on every rank and summed, and macro-F1 of the gathered predictions."""
    model.eval()
    pairs = [(model(images.to(ctx.device)).argmax(1), labels.to(ctx.device)) for images, labels in loader]
    model.train()
    predicted, actual = (torch.cat(column) for column in zip(*pairs, strict=True))
    right, count = ctx.all_reduce_sum(torch.tensor([(predicted == actual).sum(), len(actual)]))
    return (right / count).item(), macro_f1(ctx.gather(predicted), ctx.gather(actual))


def macro_f1(predicted, actual):
    """The mean over classes of 2 TP / (2 TP + FP + FN)."""
    confusion = torch.bincount(10 * actual.cpu() + predicted.cpu(), minlength=100).reshape(10, 10).double()
    return (2 * confusion.diag() / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--folds", type=int, default=5, help="number of parts of the data, one of which is the test set"
    )
    parser.add_argument("--fold", type=int, default=4, help="the part that is the test set, from 0")
    parser.add_argument("--eval-every", type=int, help="steps between evaluations (default: only one, at the end)")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="set by torch.distributed.launch, ignored")
    args = parser.parse_args()
    if not 0 <= args.fold < args.folds:
        parser.error(f"--fold {args.fold}: expected 0 to {args.folds - 1}, as there are --folds {args.folds}")

    ctx = clusterddp.init()
    train, test = load_digits(args.fold, args.folds)
    model = ctx.wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    loader = ctx.loader(train, batch_size=args.batch_size)
    test_loader = ctx.eval_loader(test, batch_size=64)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler)
    for images, labels in run.steps(args.steps):
        loss = F.cross_entropy(model(images.to(ctx.device)), labels.to(ctx.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.log(loss=loss)
        if args.eval_every and (run.step + 1) % args.eval_every == 0:
            accuracy, f1 = evaluate(ctx, model.module, test_loader)
            run.log(accuracy=accuracy, f1=f1)  # the step's checkpoint can be kept as the best: see digits_folds.yaml

    accuracy, f1 = evaluate(ctx, model.module, test_loader)
    ctx.print(f"test accuracy {accuracy:.4f}, macro-F1 {f1:.4f}, {len(test)} images, {ctx.world_size} ranks")


if __name__ == "__main__":
    main()
