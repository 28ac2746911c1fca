"""Tokens of large files: blocks of 64 characters, read nearly in sequence, resumed at once, on any number of ranks.

Data: the modules of Python's standard library, whose bytes are the tokens, as those of a tokenizer's files would be.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import clusterddp
from clusterddp import orders, streams


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    ctx = clusterddp.init()
    files = Path(sysconfig.get_paths()["stdlib"]) / "*.py"
    dataset = streams.Tokens(files, length=64, dtype="uint8")  # the files' sizes are its index
    loader = ctx.loader(dataset, batch_size=16, order=orders.by_shard(), num_workers=2)
    model = ctx.wrap(nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256)))  # from a character to the next one
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader)
    for characters, following in run.steps(args.steps):
        logits = model(characters.to(ctx.device))
        loss = F.cross_entropy(logits.flatten(0, 1), following.to(ctx.device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    ctx.print(f"{len(dataset)} blocks in {len(dataset.shards)} files")


if __name__ == "__main__":
    main()
