"""A stream: an IterableDataset without length or index, which knows its own position."""

import argparse
import sysconfig
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

import clusterddp


class Text(IterableDataset):
    """Pieces of ``length`` bytes of files, one file after the other, without end.

    The state is the position after the last piece that was yielded.
    """

    def __init__(self, files, length):
        self.files, self.length = files, length
        self.file = self.offset = 0

    def __iter__(self):
        while True:
            with open(self.files[self.file], "rb") as file:
                file.seek(self.offset)
                while len(piece := file.read(self.length)) == self.length:
                    self.offset += self.length
                    yield torch.frombuffer(bytearray(piece), dtype=torch.uint8).long()
            self.file, self.offset = (self.file + 1) % len(self.files), 0

    def state_dict(self):
        return {"file": self.file, "offset": self.offset}

    def load_state_dict(self, state):
        self.file, self.offset = state["file"], state["offset"]


class Batches:
    """The run's loader: batches of a stream, read in this process, so that nothing is read ahead of the state.

    With workers use torchdata's StatefulDataLoader, which keeps the position of each worker.
    """

    def __init__(self, stream, batch_size):
        self.stream, self.batch_size = stream, batch_size

    def __iter__(self):
        pieces = iter(self.stream)
        while True:
            yield torch.stack(list(islice(pieces, self.batch_size)))

    def state_dict(self):
        return self.stream.state_dict()

    def load_state_dict(self, state):
        self.stream.load_state_dict(state)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    ctx = clusterddp.init()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[ctx.rank :: ctx.world_size]
    loader = Batches(Text(files, length=64), batch_size=16)  # each rank has its own files; its state is saved
    model = ctx.wrap(nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256)))  # from a character to the next one
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader)
    for text in run.steps(args.steps):
        text = text.to(ctx.device)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    print(f"rank {ctx.rank} is at byte {loader.stream.offset} of {files[loader.stream.file].name}")


if __name__ == "__main__":
    main()
