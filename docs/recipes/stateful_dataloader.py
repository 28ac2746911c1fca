"""torchdata's StatefulDataLoader: a stream of lines that saves its position, read by a worker of each rank.

A small network predicts the next character. Data: the modules of Python's standard library, which every machine has.
Needs ``pip install torchdata``.
"""

import argparse
import random
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import clusterddp


class Lines(IterableDataset):
    """The lines of some files, which come in a new order in each pass: the first 64 characters, filled with blanks."""

    def __init__(self, files, seed):
        self.files, self.seed = files, seed
        self.epoch = self.file = self.line = 0  # the pass, the place in its order of files, and the line there

    def set_epoch(self, epoch):
        """The run calls it before each pass."""
        self.epoch = epoch

    def __iter__(self):
        files = random.Random(f"{self.seed} {self.epoch}").sample(self.files, len(self.files))
        while self.file < len(files):
            lines = files[self.file].read_bytes().splitlines()
            while self.line < len(lines):
                self.line += 1
                yield torch.tensor(list(lines[self.line - 1][:64].ljust(64)))
            self.file, self.line = self.file + 1, 0
        self.file = 0

    def state_dict(self):
        return {"epoch": self.epoch, "file": self.file, "line": self.line}

    def load_state_dict(self, state):
        self.epoch, self.file, self.line = state["epoch"], state["file"], state["line"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--files", type=int, default=100, help="at most")
    args = parser.parse_args()

    ctx = clusterddp.init()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: args.files]
    lines = Lines(files[ctx.rank :: ctx.world_size], ctx.seed)
    loader = StatefulDataLoader(lines, batch_size=32, num_workers=1)  # with more workers, let each read other files
    model = ctx.wrap(nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256)))  # from a character to the next one
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader)
    for characters in run.steps(args.steps):
        characters = characters.to(ctx.device)
        loss = F.cross_entropy(model(characters[:, :-1]).flatten(0, 1), characters[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, epoch=run.epoch)
    ctx.print(f"{len(files)} files, {run.epoch} passes over them on rank 0")


if __name__ == "__main__":
    main()
