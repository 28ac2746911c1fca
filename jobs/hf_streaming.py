"""A streaming dataset of Hugging Face's ``datasets`` as the run's loader: each rank reads its own lines of text files.

A small network predicts the next character. Data: the modules of Python's standard library, which every machine has.
Needs ``pip install datasets``.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from torch import nn

import clusterddp


def encode(line):
    """The first 64 characters as bytes, filled with blanks."""
    return {"characters": list(line["text"].encode()[:64].ljust(64))}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--files", type=int, default=100, help="at most")
    args = parser.parse_args()

    ctx = clusterddp.init()
    files = [str(file) for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: args.files]]
    lines = load_dataset("text", data_files=files, split="train", streaming=True)
    # Only the order of the files is random: a larger buffer of lines would be lost by a resume.
    lines = split_dataset_by_node(lines.shuffle(seed=ctx.seed, buffer_size=1), ctx.rank, ctx.world_size)
    batches = lines.map(encode, remove_columns="text").batch(args.batch_size)

    model = ctx.wrap(nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256)))  # from a character to the next one
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = ctx.run(model=model, optimizer=optimizer, loader=batches)
    for batch in run.steps(args.steps):
        characters = torch.tensor(batch["characters"], device=ctx.device)
        loss = F.cross_entropy(model(characters[:, :-1]).flatten(0, 1), characters[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, epoch=run.epoch)
    ctx.print(f"{len(files)} files, {run.epoch} passes over them on rank 0")


if __name__ == "__main__":
    main()
