"""Images in tar archives, as webdataset has them: read nearly in sequence, resumed at once, on any number of ranks.

Data: that of digits.py, packed into 8 archives when the run starts.
"""

import argparse
import io
import tarfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import clusterddp
from clusterddp import orders, streams


def pack(folder, shards):
    """Writes the images as ``shards`` archives: ``0007.npy`` (8, 8) and ``0007.cls``, its label as text."""
    table = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",", dtype=np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    for shard, rows in enumerate(np.array_split(np.arange(len(table)), shards)):
        with tarfile.open(folder / f"digits-{shard}.tar", "w") as archive:
            for row in rows:
                image = io.BytesIO()
                np.save(image, table[row, :-1].reshape(8, 8) / 16)
                add(archive, f"{row:04}.npy", image.getvalue())
                add(archive, f"{row:04}.cls", b"%d" % table[row, -1])


def add(archive, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def decode(sample):
    """From the bytes of a sample's files, by extension, to an image (8, 8) and its label."""
    return torch.from_numpy(np.load(io.BytesIO(sample["npy"]))), int(sample["cls"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--window", type=int, default=500, help="samples that are shuffled together")
    args = parser.parse_args()

    ctx = clusterddp.init()
    folder = (ctx.run_dir or Path()) / "shards"
    with ctx.main_first():  # rank 0 writes the archives, and the index beside them. Then the others read it
        if ctx.is_main and not (folder / "complete").exists():
            pack(folder, shards=8)
            (folder / "complete").touch()
        dataset = streams.TarShards(str(folder / "digits-*.tar"), decode)
    model = ctx.wrap(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    order = orders.by_shard(window=args.window)
    loader = ctx.loader(dataset, batch_size=32, order=order, num_workers=args.workers)
    run = ctx.run(model=model, optimizer=optimizer, loader=loader)
    for images, labels in run.steps(args.steps):
        loss = F.cross_entropy(model(images.to(ctx.device)), labels.to(ctx.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, labels=labels.float().mean())
    ctx.print(f"{len(dataset)} images in {len(dataset.shard_lengths)} archives")


if __name__ == "__main__":
    main()
