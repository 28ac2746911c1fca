"""What 10^8 samples in shards cost: ``python -m benchmarks.streams``, with 4 GB in the folder for temporary files.

Building the index of JSON lines beside the least that it takes: counting the newlines of the same files, and writing as
many bytes as the index has. Then opening it, and the first batch in the middle, beside reading and parsing 64 lines at
random places that are known. And the same of token blocks, which need no index.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report, rows
from clusterddp import orders, streams
from clusterddp.data.loader import Loader
from clusterddp.data.sample_order import Order

SHARDS, BATCH, LINE = 8, 64, b'{"n": 7}\n'
PIECE = 1 << 22
ORDERS: dict[str, Callable[[], Order]] = {
    "shuffled": orders.shuffled,
    "by_shard": orders.by_shard,
    "sequential": orders.sequential,
}


@dataclass
class Result:
    """So many samples of a kind. Seconds, but where the name has another unit."""

    kind: str
    samples: int
    build: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    open_ms: list[float] = field(default_factory=list)
    memory_mib: float = 0.0
    first_ms: dict[str, list[float]] = field(default_factory=dict)
    known_ms: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.kind}, 10^{len(str(self.samples)) - 1}"


def seconds(do: Callable[[], Any]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def anonymous_mib() -> float:
    """Memory of this process that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return float("nan")


@contextmanager
def grown() -> Iterator[list[float]]:
    """How much anonymous memory this process took at most, looked at every 5 ms; in the list at the end."""
    before, peak, ended, found = anonymous_mib(), [0.0], threading.Event(), list[float]()

    def look() -> None:
        while not ended.wait(0.005):
            peak[0] = max(peak[0], anonymous_mib())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
        found.append(max(0.0, peak[0] - before))


def write_shards(folder: Path, ending: str, unit: bytes, count: int) -> list[Path]:
    """Files with ``count`` of the unit in all."""
    paths = []
    for shard in range(SHARDS):
        left = count // SHARDS + (shard < count % SHARDS)
        paths.append(folder / f"{shard}.{ending}")
        with paths[-1].open("wb") as file:
            while left:
                now = min(left, 100_000)
                file.write(unit * now)
                left -= now
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


def first_batches(data: Any, result: Result, repeats: int) -> None:
    """From a new loader, as after a resume, at steps around the middle."""
    for name, order in ORDERS.items():
        for number in range(repeats):
            loader = Loader(data, BATCH, order=order(), seed=number, rank=0, world_size=1)
            batches = loader.batches(len(data) // BATCH // 2 + number)
            result.first_ms.setdefault(name, []).append(1000 * seconds(lambda: next(batches)))  # noqa: B023
            batches.close()  # type: ignore[attr-defined]


def json_lines(folder: Path, samples: int, builds: int, repeats: int) -> Result:
    result, pattern = Result("JSON lines", samples), str(folder / "*.jsonl")
    paths = write_shards(folder, "jsonl", LINE, samples)
    for _ in range(builds):
        for index in folder.glob(".clusterddp-*"):
            index.unlink()
        with grown() as memory:
            result.build.append(seconds(lambda: streams.JsonLines(pattern)))
        result.memory_mib = max(result.memory_mib, *memory)
        result.least.append(seconds(lambda: least(paths, folder)))
    for _ in range(repeats):
        result.open_ms.append(1000 * seconds(lambda: streams.JsonLines(pattern)))
    draw = random.Random(0)
    first_batches(streams.JsonLines(pattern), result, repeats)
    result.known_ms = [known_places(paths, draw) for _ in range(repeats)]
    for path in folder.iterdir():
        path.unlink()
    return result


def tokens(folder: Path, samples: int, repeats: int) -> Result:
    """Blocks of four bytes."""
    result, pattern = Result("token blocks", samples), str(folder / "*.bin")
    write_shards(folder, "bin", bytes(np.arange(4, dtype=np.uint8)), samples + SHARDS)
    with grown() as memory:
        for _ in range(repeats):
            result.open_ms.append(1000 * seconds(lambda: streams.Tokens(pattern, length=4, dtype="uint8")))
        first_batches(streams.Tokens(pattern, length=4, dtype="uint8"), result, repeats)
    result.memory_mib = memory[0]
    for path in folder.iterdir():
        path.unlink()
    return result


def table_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """For the common table."""
    counted = "counting the newlines, and writing as many bytes"
    known = "64 lines at random places that are known"
    found = [
        rows.paired(f"index of {result.name}", "s", result.build, result.least, counted)
        for result in results
        if result.build
    ]
    found += [
        rows.paired(f"first batch in the middle of {result.name}, {name}", "ms", taken, result.known_ms, known)
        for result in results
        if result.known_ms
        for name, taken in result.first_ms.items()
    ]
    return [row.as_json() for row in found]


def costs(results: Sequence[Result]) -> str:
    """Of each kind and number of samples."""
    head = ["samples", "index built, s", "memory, MiB", "opened, ms", *(f"first batch, {name}, ms" for name in ORDERS)]
    lines = []
    for result in results:
        built = report.median(result.build) if result.build else "no index"
        first = [report.median(result.first_ms[name]) for name in ORDERS]
        lines.append([result.name, built, round(result.memory_mib), report.median(result.open_ms), *first])
    return report.table(head, lines)


def main() -> None:
    parser = report.parser(__doc__, "10^6 samples at most")
    parser.add_argument("--folder", type=Path, help="for temporary files; the system's if left out")
    arguments = parser.parse_args()
    sizes = [10**5, 10**6] if arguments.quick else [10**6, 10**7, 10**8]
    repeats = 15
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        folder = Path(made)
        results = [json_lines(folder, size, 3 if size == 10**8 else 7, repeats) for size in sizes]
        results += [tokens(folder, size, repeats) for size in sizes]
    text = f"""# Large files: what an index and a resume cost

JSON lines of {len(LINE)} bytes, and blocks of 4 tokens of a byte, in {SHARDS} files in the operating system's cache: a
disk or network that is slower than that decides how long an index takes."""
    figures = {"results": [asdict(result) for result in results], "rows": table_rows(results)}
    report.write(arguments.out, "streams", text, figures, tables={"Costs": costs(results)})


if __name__ == "__main__":
    main()
