"""Tar archives by WebDataset: each rank reads its own archives, and after a resume reads them again up to its step.

A small network predicts the next character. Data: the modules of Python's standard library, packed into archives when
the run starts. Needs ``pip install webdataset``.
"""

import argparse
import sysconfig
import tarfile
from pathlib import Path

import torch
import torch.nn.functional as F
import webdataset
from torch import nn
from torch.utils.data import DataLoader

import clusterddp


def pack(folder, archives):
    """Writes the modules into archives. A sample is a file: ``argparse.py`` has the key ``argparse`` and ``py``."""
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for number in range(archives):
        with tarfile.open(folder / f"modules-{number}.tar", "w") as archive:
            for file in files[number::archives]:
                archive.add(file, file.name)


def encode(sample):
    """The first 256 bytes of a module, filled with blanks."""
    return torch.tensor(list(sample["py"][:256].ljust(256)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    ctx = clusterddp.init()
    folder = (ctx.run_dir or Path()) / "archives"
    with ctx.main_first():
        if ctx.is_main and not (folder / "complete").exists():
            pack(folder, archives=8)
            (folder / "complete").touch()
    archives = [str(file) for file in sorted(folder.glob("*.tar"))]
    samples = webdataset.WebDataset(
        archives,
        nodesplitter=webdataset.split_by_node,  # a part of the archives for each rank
        shardshuffle=100,
        detshuffle=True,  # the same order whenever a pass is read again
        seed=ctx.seed,
    )
    samples = samples.compose(webdataset.detshuffle(bufsize=50, initial=50, seed=ctx.seed)).map(encode)
    # Persistent, because a worker counts the passes, and draws a new order for each.
    loader = DataLoader(samples, batch_size=8, num_workers=1, persistent_workers=True)
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
    ctx.print(f"{len(archives)} archives")


if __name__ == "__main__":
    main()
