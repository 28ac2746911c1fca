"""Tokens of large files: blocks of 64 characters, mapped into memory, resumed at once, on any number of ranks.

Data: the modules of Python's standard library, whose bytes are the tokens, as those of a tokenizer's files would be.
"""

import argparse
import bisect
import itertools
import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import clusterddp


class Blocks(Dataset):
    """Blocks of ``length`` tokens (length,), and each shifted by one token as its target. The sizes are the index."""

    def __init__(self, files, length, dtype):
        self.files, self.length, self.dtype = files, length, np.dtype(dtype)
        tokens = [file.stat().st_size // self.dtype.itemsize for file in files]
        self.ends = list(itertools.accumulate(max(0, count - 1) // length for count in tokens))

    def __len__(self):
        return self.ends[-1]

    def __getitem__(self, index):
        file = bisect.bisect_right(self.ends, index)
        start = (index - (self.ends[file - 1] if file else 0)) * self.length
        tokens = np.memmap(self.files[file], self.dtype, mode="r")[start : start + self.length + 1]
        tokens = torch.from_numpy(tokens.astype(np.int64))
        return tokens[:-1], tokens[1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    ctx = clusterddp.init()
    files = [file for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) if file.stat().st_size]
    dataset = Blocks(files, length=64, dtype="uint8")
    loader = ctx.loader(dataset, batch_size=16, num_workers=2)
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
    ctx.print(f"{len(dataset)} blocks in {len(files)} files")


if __name__ == "__main__":
    main()
