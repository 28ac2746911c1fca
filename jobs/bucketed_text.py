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
from clusterddp import orders

PADDING = 0  # no line has this character


def load_lines(most):
    """The first lines of the standard library that are not empty, as tensors of bytes (characters,), uint8."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    lines = (line for file in files for line in file.read_bytes().splitlines(keepends=True) if line.strip())
    return [torch.frombuffer(bytearray(line), dtype=torch.uint8) for line, _ in zip(lines, range(most), strict=False)]


def pad(lines):
    """A batch: (lines, characters of the longest), int64."""
    return pad_sequence(lines, batch_first=True, padding_value=PADDING).long()


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
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lines", type=int, default=20_000, help="at most")
    parser.add_argument("--buckets", type=int, default=50, help="1: batches of lines of any length")
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()

    ctx = clusterddp.init()
    lines = load_lines(args.lines)
    model = ctx.wrap(GRU(args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = orders.bucketed([len(line) for line in lines], buckets=args.buckets)
    loader = ctx.loader(lines, batch_size=args.batch_size, order=order, collate_fn=pad)  # a list is a dataset
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
