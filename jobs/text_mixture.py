"""Code and prose in one training: nine samples in ten are code at first, and half of them from a given step on.

A small network predicts the next character. Data: the modules of Python's standard library and the text of Python's
help(), which every machine has.
"""

import argparse
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import clusterddp
from clusterddp import orders


class Blocks(Dataset):
    """Pieces of a text, one after the other: (33,) int64, and the number of the text."""

    def __init__(self, text, kind):
        self.text, self.kind = torch.frombuffer(bytearray(text), dtype=torch.uint8), kind

    def __len__(self):
        return len(self.text) // 33

    def __getitem__(self, index):
        return self.text[index * 33 : (index + 1) * 33].long(), self.kind


class Net(nn.Module):
    """From characters (samples, length) to logits of the next ones (samples, length, 256), each from the last six."""

    def __init__(self, width):
        super().__init__()
        self.token, self.convolution = nn.Embedding(256, width), nn.Conv1d(width, 2 * width, 6)
        self.head = nn.Linear(2 * width, 256)

    def forward(self, characters):
        before = F.pad(self.token(characters).transpose(1, 2), (5, 0))
        return self.head(self.convolution(before).relu().transpose(1, 2))


def loss_of(model, characters):
    """The mean over samples and characters, in nats."""
    return F.cross_entropy(model(characters[:, :-1]).flatten(0, 1), characters[:, 1:].flatten())


@torch.no_grad()
def evaluate(ctx, model, dataset):
    """The loss on a whole dataset, over all ranks."""
    total, count = 0.0, 0
    for characters, _ in ctx.eval_loader(dataset, batch_size=64):
        total += loss_of(model, characters.to(ctx.device)).item() * len(characters)
        count += len(characters)
    return ctx.all_reduce_mean(total / count, weight=count)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument(
        "--change-at", type=int, default=200, help="the step from which on half of the samples are prose"
    )
    args = parser.parse_args()

    ctx = clusterddp.init()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code = b"".join(file.read_bytes() for file in files)[:500_000]
    prose = "\n".join(topics.values()).encode()
    end = {"code": len(code) * 95 // 100, "prose": len(prose) * 95 // 100}
    train = {"code": Blocks(code[: end["code"]], 0), "prose": Blocks(prose[: end["prose"]], 1)}
    held_out = {"code": Blocks(code[end["code"] :], 0), "prose": Blocks(prose[end["prose"] :], 1)}

    model = ctx.wrap(Net(width=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = orders.mixture({"code": 9, "prose": 1}, changes={args.change_at: {"code": 1, "prose": 1}})
    loader = ctx.loader(train, batch_size=args.batch_size, order=order)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader)
    for characters, kind in run.steps(args.steps):
        loss = loss_of(model, characters.to(ctx.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, prose=kind.float().mean())
    losses = ", ".join(f"{name} {evaluate(ctx, model.module, dataset):.2f}" for name, dataset in held_out.items())
    ctx.print(f"held-out loss in nats per character: {losses}")


if __name__ == "__main__":
    main()
