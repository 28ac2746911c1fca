"""Lines of Python of any length, padded to the longest of their batch: batches of similar length have little padding.

A small GRU predicts the next character. Data: the modules of Python's standard library, which every machine has.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import clusterddp

PADDING = 0  # no line has this character


def load_lines(most):
    """The first lines of the standard library that are not empty, as tensors of bytes (characters,), uint8."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    lines = (line for file in files for line in file.read_bytes().splitlines(keepends=True) if line.strip())
    return [torch.frombuffer(bytearray(line), dtype=torch.uint8) for line, _ in zip(lines, range(most), strict=False)]


def pad(lines):
    """A batch: (lines, characters of the longest), int64."""
    return pad_sequence(lines, batch_first=True, padding_value=PADDING).long()


class SimilarLengths:
    """Batches of lines of similar length, in a new order in each epoch. The batches of a step, one per rank, are alike.

    ``step``: lines per step over all ranks. The lines of ``pool`` steps are sorted together. The last lines, which fill
    no step, are left out. ``ctx.loader`` seeds torch before it draws an epoch.
    """

    def __init__(self, lines, batch_size, step, pool):
        self.lengths = torch.tensor([len(line) for line in lines])
        self.batch_size, self.step, self.pool = batch_size, step, pool

    def __iter__(self):
        pools = torch.randperm(len(self.lengths)).split(self.step * self.pool)
        by_length = torch.cat([pool[self.lengths[pool].argsort(stable=True)] for pool in pools])
        steps = by_length[: len(by_length) // self.step * self.step].view(-1, self.step)
        for step in steps[torch.randperm(len(steps))]:
            yield from step.split(self.batch_size)


class GRU(nn.Module):
    """From characters (lines, length) to logits of the next ones (lines, length, 256)."""

    def __init__(self, width):
        super().__init__()
        self.token, self.gru = nn.Embedding(256, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, characters):
        return self.head(self.gru(self.token(characters))[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--global-batch", type=int, default=32, help="lines per step over all ranks")
    parser.add_argument("--lines", type=int, default=20_000, help="at most")
    parser.add_argument("--pool", type=int, default=50, help="steps whose lines are sorted together")
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()

    ctx = clusterddp.init()
    lines = load_lines(args.lines)
    model = ctx.wrap(GRU(args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch_size = args.global_batch // ctx.world_size
    batches = SimilarLengths(lines, batch_size, args.global_batch, args.pool)
    loader = ctx.loader(lines, batch_size, batch_sampler=batches, collate_fn=pad)  # a list is a dataset
    run = ctx.run(model=model, optimizer=optimizer, loader=loader)
    for characters in run.steps(args.steps):
        characters = characters.to(ctx.device)
        following = characters[:, 1:].flatten()
        loss = F.cross_entropy(model(characters[:, :-1]).flatten(0, 1), following, ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log(loss=loss, padding=(characters == PADDING).float().mean())
    ctx.print(f"{len(lines)} lines of {min(map(len, lines))} to {max(map(len, lines))} characters")


if __name__ == "__main__":
    main()
