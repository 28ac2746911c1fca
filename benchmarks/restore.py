"""What a restore costs: ``python -m benchmarks.restore``, at most 8 minutes; ``--quick``, 2.

A model of 20 layers and its Adam state (160 tensors) of 10 and 400 MB is restored in 1, 2, 4 and 8 gloo ranks of a
host, and one of 2 GB, or of 1 GB where memory is short, in 1 rank. Two ways alternate in the same processes, each
into a new model and an optimizer without state:

- clusterddp: ``restore``, then ``load_state`` of both: rank 0 reads, verifies, and shares the data with the others.
- torch: on every rank, the file's CRC-32 read in pieces of 256 KiB, ``torch.load(weights_only=True)``, and
  ``load_state_dict`` of both. A third way is the same with ``mmap=True``: it is shown, and no bar.

Seconds are from when all ranks are there until all have loaded. Warm: the file is in the page cache. Cold: it was
dropped from there (``POSIX_FADV_DONTNEED``), though a virtual disk's host may still have it in memory. Bytes read are
those of read calls (rchar in /proc/self/io) of all ranks, by the size of the file. CPU time is that of the ranks'
processes. Memory is that of all ranks at its peak, above what they have once all is loaded, by the size of the state;
what they share counts once. The median of three.

Bars: at most 1.2 times torch's time at one rank, and 1.0 times at 4 and more; the file is read once; memory of at most
1.2 states.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import common, sides
from benchmarks.savers import make_training, make_untrained, state_of
from clusterddp.checkpoint.host_memory import free_memory
from clusterddp.checkpoint.restore import CheckpointFolder, restore
from clusterddp.checkpoint.state_dict import load_state
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory

OURS, TORCH, MAPPED = "clusterddp", "torch", "torch, mmap=True"
WAYS = (OURS, TORCH, MAPPED)
#: Of the ratio of times, by the number of ranks; of bytes read, with what a rank reads of /proc; of memory, in states.
TIME_BARS = {1: 1.2, 4: 1.0, 8: 1.0}
READ_BAR, MEMORY_BAR = 1.01, 1.2
PIECE = 1 << 18
LIMIT = "crc32 + torch.load + load_state_dict per rank"
TEXT = """# A restore beside torch.load on every rank

A model and its Adam state, restored in gloo ranks of one host, in turns with torch. Cold files are dropped from the
page cache before."""


@dataclass(frozen=True)
class Size:
    """A state of about so many bytes, and how often each of the first ``ways`` restores it, warm and cold.

    ``alone``: in one rank only.
    """

    name: str
    bytes: int
    rounds: int
    ways: int = 3
    alone: bool = False

    def needed(self, ranks: int) -> float:
        """Bytes of memory: while so many ranks restore it, by torch; or while it is saved."""
        return max(1.5 * ranks + 1, 2.4) * self.bytes


SIZES = [Size("10 MB", 10_000_000, 21), Size("400 MB", 400_000_000, 7)]
#: The first of these that memory allows.
LARGEST = [Size("2 GB", 2_000_000_000, 3, alone=True), Size("1 GB", 1_000_000_000, 5, alone=True)]
RANKS = (1, 2, 4, 8)
QUICK = ([Size("10 MB", 10_000_000, 11, ways=2), Size("400 MB", 400_000_000, 4, ways=2)], (1, 4))


# ---- one of the processes


def save(folder: Path, size: Size) -> None:
    """The files that are restored."""
    model, optimizer = make_training(size.bytes)
    with CheckpointFolder(folder / "ours") as checkpoints:
        checkpoints.restore()
        checkpoints.save(1, model=model, optimizer=optimizer)
    torch.save(state_of(model, optimizer), folder / "torch.pt")


def files_of(folder: Path) -> dict[str, Path]:
    ours = folder / "ours" / "checkpoints" / "step-000000000001.attempt-0.safetensors"
    return {OURS: ours, TORCH: folder / "torch.pt", MAPPED: folder / "torch.pt"}


class Restorer:
    """A rank that restores again and again."""

    def __init__(self, folder: Path, size: Size, rank: int) -> None:
        self._files, self._folder, self._size, self._rank = files_of(folder), folder, size, rank

    def once(self, way: str, cold: bool, hold: Callable[[], None] = lambda: None) -> tuple[float, float, float]:
        """Seconds until all have loaded; bytes read, by the file's, and CPU seconds of all ranks. Collective.

        ``hold`` is called when most memory is in use, and when all have loaded.
        """
        model, optimizer = make_untrained(self._size.bytes)
        gc.collect()
        if self._rank == 0:
            (sides.drop_from_cache if cold else checksum_of)(self._files[way])
        dist.barrier()
        read_before, cpu_before, started = sides.bytes_read(), time.process_time(), time.perf_counter()
        content = self._read(way)
        self._load(way, content, model, optimizer)
        cpu = time.process_time() - cpu_before
        dist.barrier()
        seconds, read = time.perf_counter() - started, sides.bytes_read() - read_before
        hold()
        del content
        hold()
        total = torch.tensor([read / self._files[way].stat().st_size, cpu], dtype=torch.float64)
        dist.all_reduce(total)
        return seconds, *total.tolist()

    def _read(self, way: str) -> Any:
        path = self._files[way]
        if way == OURS:
            checkpoints = Checkpoints(RunDirectory(self._folder / "ours"), 0, Keep()) if self._rank == 0 else None
            found = restore(checkpoints, torch.device("cpu"))
            assert found is not None
            return found[0]
        checksum_of(path)
        return torch.load(path, weights_only=True, mmap=way == MAPPED)

    @staticmethod
    def _load(way: str, content: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if way == OURS:
            load_state(model, content["model"])
            load_state(optimizer, content["optimizer"])
        else:
            model.load_state_dict(content["model"])
            optimizer.load_state_dict(content["optimizer"])


def checksum_of(path: Path) -> int:
    """The CRC-32 of a file."""
    buffer, found = memoryview(bytearray(PIECE)), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found = zlib.crc32(buffer[:count], found)
    return found


def in_process(name: str, folder: str, size: dict[str, Any], rank: int, ranks: int, port: int) -> dict[str, Any] | None:
    """What one of the processes does: ``save`` or ``restores``."""
    if name == "save":
        return save(Path(folder), Size(**size))
    return restores(Path(folder), Size(**size), rank, ranks, port)


def restores(folder: Path, size: Size, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """Seconds, bytes and CPU by cache and way, and the memory. Collective."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    sides.join(rank, ranks, port)
    restorer, ways = Restorer(folder, size, rank), WAYS[: size.ways]
    found = sides.in_turns(
        {(cache, way): partial(restorer.once, way, cache == "cold") for cache in ("warm", "cold") for way in ways},
        size.rounds,
    )
    figures: dict[str, Any] = {"warm": {}, "cold": {}}
    for (cache, way), times in found.items():
        figures[cache][way] = dict(zip(("seconds", "read", "cpu"), zip(*times, strict=True), strict=True))
    peaks = [peak_memory(restorer, OURS, rank) for _ in range(3)]
    figures["states"] = common.median(peaks) / files_of(folder)[OURS].stat().st_size
    dist.destroy_process_group()
    return figures


# ---- memory


def peak_memory(restorer: Restorer, way: str, rank: int) -> int:
    """The peak of all ranks' memory in a restore, above what they have afterwards, in bytes. Collective."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    sampler = Sampler(pids) if rank == 0 else None
    held: list[int] = []  # while all have loaded, then once the rest is gone

    def hold() -> None:
        dist.barrier()
        if sampler is not None:
            held.append(sampler.now())
        dist.barrier()

    restorer.once(way, False, hold)
    return max(sampler.close(), held[0]) - held[1] if sampler is not None else 0


class Sampler:
    """Adds up the memory of processes all the time, in a thread of rank 0."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._peak, self._over = pids, 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(0.01):
            self._peak = max(self._peak, self.now())

    def now(self) -> int:
        """The memory of all. What they share counts once, as not all are read at the moment when one maps it."""
        found = [memory_of(pid) for pid in self._pids]
        return sum(own for own, _ in found) + max(shared for _, shared in found)

    def close(self) -> int:
        """Ends the thread; the most that it has seen."""
        self._over.set()
        self._thread.join()
        return self._peak


def memory_of(pid: int) -> tuple[int, int]:
    """A process's memory, with its part of mapped files, and what it has of files without a name; bytes."""
    lines = [*Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:], *Path(f"/proc/{pid}/status").open()]
    kilobytes = {
        name: int(words.split()[0]) for name, _, words in (line.partition(":") for line in lines) if "kB" in words
    }
    return 1024 * (kilobytes["Pss_Anon"] + kilobytes["Pss_File"]), 1024 * kilobytes["RssShmem"]


# ---- around them


def measure(quick: bool, sizes: list[str] | None) -> common.Found:
    largest = next((size for size in LARGEST if size.needed(1) < free_memory()), LARGEST[-1])
    asked = sizes or [size.name for size in (*SIZES, largest)]
    chosen, counts = QUICK if quick else ([size for size in (*SIZES, *LARGEST) if size.name in asked], RANKS)
    found: list[common.Row] = []
    figures: dict[str, dict[int, Any]] = {}
    left_out = []
    for size in chosen:
        with tempfile.TemporaryDirectory() as folder:
            in_processes("save", 1, folder, size)
            for ranks in counts[:1] if size.alone else counts:
                common.say(f"{size.name}, {ranks} ranks")
                if size.needed(ranks) > free_memory():
                    left_out.append(f"{size.name} in {ranks} ranks")
                    continue
                one = figures.setdefault(size.name, {})[ranks] = in_processes("restores", ranks, folder, size)
                found += rows_of(size.name, ranks, one)
    where = f"too little memory for {', '.join(left_out)}" if left_out else ""
    return common.Found({"figures": figures}, found, where)


def in_processes(name: str, ranks: int, folder: str, size: Size) -> Any:
    """What ``in_process`` returns in processes of its own; rank 0's answer."""
    # A training process restores once, into memory that it has not used before. glibc would hand out what the restore
    # before has freed, depending on the sizes of tensors: its threshold grows.
    request = {"name": name, "folder": folder, "size": asdict(size)}
    return sides.run_ranks("benchmarks.restore", request, ranks, MALLOC_MMAP_THRESHOLD_="131072")


def rows_of(size: str, ranks: int, figures: dict[str, Any]) -> list[common.Row]:
    """The rows of one size and number of ranks."""
    where = f"restore, {size}, {ranks} rank{'s' * (ranks > 1)}"
    found = []
    for cache in ("warm", "cold"):
        of, row, bar = figures[cache], f"{where}, {cache}", TIME_BARS.get(ranks)
        found.append(common.paired(row, "s", of[OURS]["seconds"], of[TORCH]["seconds"], LIMIT, allowed=bar))
        found.append(common.paired(f"{row}: CPU time of all ranks", "s", of[OURS]["cpu"], of[TORCH]["cpu"], LIMIT))
        if MAPPED in of:
            words, mapped = "the same with mmap=True", of[MAPPED]["seconds"]
            found.append(common.paired(f"{row}, beside mmap", "s", of[OURS]["seconds"], mapped, words))
    read = max(max(figures[cache][OURS]["read"]) for cache in ("warm", "cold"))
    states = figures["states"]
    return [
        *found,
        common.counted(f"{where}: bytes read", "files", read, 1.0, "the file once", allowed=READ_BAR),
        common.counted(f"{where}: peak memory", "states", states, 1.0, "the state once", allowed=MEMORY_BAR),
    ]


if __name__ == "__main__":
    if not sides.answered(in_process):
        names = {"nargs": "+", "choices": [size.name for size in (*SIZES, *LARGEST)], "help": "default: all"}
        common.main("restore", __doc__, TEXT, measure, "10 and 400 MB in 1 and 4 ranks", sizes=names)
