"""What 10^8 samples in shards cost: ``python -m benchmarks.streams``, with 4 GB in the folder for temporary files.

Building the index of JSON lines beside the least that it takes: counting the newlines of the same files, and writing as
many bytes as the index has. Then the first batch in the middle, beside reading and parsing 64 lines at random places
that are known.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, rows
from benchmarks.sides import in_turns, seconds
from clusterddp import orders, streams
from clusterddp.data.loader import Loader
from clusterddp.data.sample_order import Order

SHARDS, BATCH, LINE = 8, 64, b'{"n": 7}\n'
PIECE, PIECE_LINES, REPEATS = 1 << 22, 100_000, 15
ORDERS: dict[str, Callable[[], Order]] = {
    "shuffled": orders.shuffled,
    "by_shard": orders.by_shard,
    "sequential": orders.sequential,
}
TEXT = f"""# Large files: index and resume

JSON lines of {len(LINE)} bytes in {SHARDS} files in the page cache. A first batch has {BATCH} samples from the middle
of an epoch, by a new loader."""


def write_shards(folder: Path, samples: int) -> list[Path]:
    """Files with so many lines in all."""
    paths = [folder / f"{shard}.jsonl" for shard in range(SHARDS)]
    for path in paths:
        with path.open("wb") as file:
            for start in range(0, samples // SHARDS, PIECE_LINES):
                file.write(LINE * min(PIECE_LINES, samples // SHARDS - start))
    return paths


def least(paths: Sequence[Path], folder: Path) -> int:
    """Counts the newlines, and writes 16 bytes for each to the disk."""
    lines = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE):
                lines += piece.count(b"\n")
    target, nothing = folder / "least", bytes(PIECE)
    with target.open("wb", buffering=0) as file:
        for start in range(0, 16 * lines, PIECE):
            file.write(nothing[: 16 * lines - start])
        os.fsync(file.fileno())
    target.unlink()
    return lines


def known_places(paths: Sequence[Path], draw: random.Random) -> float:
    """Milliseconds to read and parse 64 lines at random places of open files."""
    files = [os.open(path, os.O_RDONLY) for path in paths]
    places = [(draw.choice(files), draw.randrange(paths[0].stat().st_size // len(LINE) - 1)) for _ in range(BATCH)]
    taken = seconds(lambda: [json.loads(os.pread(file, len(LINE), number * len(LINE))) for file, number in places])
    for file in files:
        os.close(file)
    return 1000 * taken


def first_batch(data: Any, order: Order, number: int) -> float:
    """Milliseconds to the first batch of a new loader, as after a resume, at a step around the middle."""
    loader = Loader(data, BATCH, order=order, seed=number, rank=0, world_size=1)
    batches = loader.batches(len(data) // BATCH // 2 + number)
    taken = seconds(lambda: next(batches))
    batches.close()  # type: ignore[attr-defined]
    return 1000 * taken


def json_lines(folder: Path, samples: int, builds: int) -> tuple[list[rows.Row], dict[str, Any]]:
    """The rows of so many lines, and their figures."""
    name, pattern = f"JSON lines, 10^{len(str(samples)) - 1}", str(folder / "*.jsonl")
    paths = write_shards(folder, samples)

    def build() -> float:
        for index in folder.glob(".clusterddp-*"):
            index.unlink()
        return seconds(lambda: streams.JsonLines(pattern))

    built = in_turns({"ours": build, "least": lambda: seconds(lambda: least(paths, folder))}, builds, warm_up=0)
    data, draw, numbers = streams.JsonLines(pattern), random.Random(0), itertools.count()
    sides = {word: lambda order=order: first_batch(data, order(), next(numbers)) for word, order in ORDERS.items()}
    firsts = in_turns({**sides, "known": lambda: known_places(paths, draw)}, REPEATS, warm_up=0)
    counting = "counting the newlines, and writing as many bytes"
    found = [rows.paired(f"index of {name}", "s", built["ours"], built["least"], counting)]
    known = "64 lines at random places that are known"
    found += [
        rows.paired(f"first batch in the middle of {name}, {word}", "ms", firsts[word], firsts["known"], known)
        for word in ORDERS
    ]
    for path in folder.iterdir():
        path.unlink()
    return found, {"name": name, "built_s": built, "firsts_ms": firsts}


def measure(quick: bool, folder: Path | None) -> report.Found:
    sizes = [10**5, 10**6] if quick else [10**6, 10**7, 10**8]
    with tempfile.TemporaryDirectory(dir=folder) as made:
        found = [json_lines(Path(made), size, 3 if size == 10**8 else 7) for size in sizes]
    return report.Found({"results": [one for _, one in found]}, [row for made, _ in found for row in made])


if __name__ == "__main__":
    where = {"type": Path, "help": "for temporary files; the system's if left out"}
    report.main("streams", __doc__, TEXT, measure, "10^6 samples at most", folder=where)
