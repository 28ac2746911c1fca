"""How fast batches come: ``python -m benchmarks.input`` (``make bench-input``), about 3 minutes.

Two loaders read the same data in two ranks at once: ``ctx.loader``'s, and torch's DataLoader with a DistributedSampler.
Both read so many batches in turn; the ranks begin each turn together, and hold a batch until they have the next, as a
loop does. What counts is the ratio of the loaders' times in the same round and rank.

Without workers a turn is an epoch, so that it has what the others do when one begins. Its time is the thread's CPU
time, as that thread does all of the work: other programs disturb it less than the time that passes.

With workers that time counts. Each turn begins with as many batches as its workers have read ahead, which do not count,
and ends with a pause in which they read as far ahead again, so that they take no time from the next loader's. An epoch
is longer than the measurement: that the others' workers begin an epoch with nothing read ahead is left out.

- cheap: a row of 16 numbers and a label from tensors in memory; draws nothing.
- costly: an image of 160 x 160, cropped and flipped at random and converted to floats.

A resume is timed from making ``ctx.loader`` at step 1,000,000 to its first batch. Next to it, a DataLoader whose
samples are numbers, at its beginning: the start of workers alone. Workers are forked, as in a rank of a job.

Bars: a batch takes at most 5% longer than with torch's DataLoader, within the 95% interval of the ratio; a resume takes
at most 0.2 s more than the loader of numbers.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks import report, rows
from benchmarks.sides import in_turns
from clusterddp.data.loader import Loader
from clusterddp.data.sample_order import Shuffled
from clusterddp.data.workers import close

RANKS, WORKERS = 2, (0, 2, 4)
OURS, TORCH, EMPTY = "ctx.loader", "DataLoader", "DataLoader of numbers"
LATE, RESUME_BAR_S = 1_000_000, 0.2
#: How long a batch may take, as a multiple of torch's.
BAR = 1.05
#: Batches that each worker reads ahead, by torch's default, and how long after a turn they have done so at the latest.
AHEAD, PAUSE_S = 2, 0.05
#: Samples of an epoch, and of one that no turn reaches the end of.
EPOCH, LONG = 400_000, 2_000_000
TEXT = f"""# Batches beside torch's DataLoader

{RANKS} ranks read the same data at once by `ctx.loader` and torch's DataLoader, in turns. A bar is met if the interval
includes {BAR}, or is below."""


class Cheap(Dataset[Any]):
    def __init__(self, batch_size: int, length: int = EPOCH) -> None:
        self.batch_size, self._length = batch_size, length
        self._rows, self._labels = torch.randn(length, 16), torch.arange(length) % 10

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._rows[index], self._labels[index]


class Costly(Dataset[Any]):
    def __init__(self, batch_size: int, length: int = EPOCH) -> None:
        self.batch_size, self._length = batch_size, length
        self._images = torch.randint(0, 256, (64, 3, 160, 160), dtype=torch.uint8)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        top, left, flip = torch.randint(0, 32, (3,)).tolist()
        image = self._images[index % 64, :, top : top + 128, left : left + 128].float().div_(255)
        return image.flip(-1) if flip < 16 else image, index % 10


@dataclass(frozen=True)
class Case:
    """A row of the table. ``batches``: that a loader reads in its turn."""

    kind: str
    batch_size: int
    workers: int
    batches: int

    @property
    def name(self) -> str:
        return f"{self.kind}, batches of {self.batch_size}, {self.workers} workers"

    def dataset(self) -> Any:
        length = LONG if self.workers else self.batches * self.batch_size * RANKS
        return {"cheap": Cheap, "costly": Costly}[self.kind](self.batch_size, length)


CASES = (
    Case("cheap", 32, 0, 800),
    Case("cheap", 64, 0, 400),
    Case("cheap", 1024, 0, 25),
    Case("costly", 32, 0, 25),
    *(Case(kind, size, workers, 24) for kind, size in (("cheap", 1024), ("costly", 32)) for workers in WORKERS[1:]),
)


def ours(dataset: Any, rank: int, workers: int, step: int = 0) -> Iterator[Any]:
    shape: dict[str, Any] = {"rank": rank, "world_size": RANKS, "num_workers": workers}
    loader = Loader(dataset, dataset.batch_size, order=Shuffled(), seed=0, **shape)
    if step:
        loader.restore(loader.progress(step))
    return loader.batches(step, True)


def sampled(dataset: Any, rank: int, workers: int) -> Iterator[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, RANKS, rank)
    loader = DataLoader(dataset, dataset.batch_size, sampler=sampler, num_workers=workers)
    while True:
        yield from loader


def times_of(case: Case, rank: int, barrier: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds per batch of each loader, in each round, in one of the ranks, which begin each turn together."""
    dataset = case.dataset()
    streams = {OURS: ours(dataset, rank, case.workers), TORCH: sampled(dataset, rank, case.workers)}

    def turn(stream: Iterator[Any]) -> float:
        barrier.wait()
        clock = time.perf_counter if case.workers else time.thread_time
        for _ in itertools.islice(stream, AHEAD * case.workers):
            pass
        started = clock()
        for _ in itertools.islice(stream, case.batches):
            pass
        taken = (clock() - started) / case.batches
        if case.workers:
            time.sleep(AHEAD * case.workers * taken + PAUSE_S)
        return taken

    found = in_turns({name: partial(turn, stream) for name, stream in streams.items()}, rounds)
    if rank == 0:
        report.say(f"{case.name}: measured")
    return found


def resumes_of(workers: int, rank: int, barrier: Any, repeats: int) -> dict[str, list[float]]:
    """Seconds from making a loader to its first batch."""
    dataset = Cheap(64)

    def resume(start: Callable[[], Iterator[Any]]) -> float:
        barrier.wait()
        started = time.perf_counter()
        stream = start()
        next(stream)
        taken = time.perf_counter() - started
        end = getattr(stream, "close", None)
        end() if end else close(stream)
        return taken

    def numbers() -> Iterator[Any]:
        return iter(DataLoader(range(10**6), dataset.batch_size, num_workers=workers))  # type: ignore[arg-type]

    starts: dict[str, Callable[[], Iterator[Any]]] = {OURS: partial(ours, dataset, rank, workers, LATE), EMPTY: numbers}
    return in_turns({name: partial(resume, start) for name, start in starts.items()}, repeats, warm_up=0)


def in_rank(rank: int, barrier: Any, results: Any, rounds: int, repeats: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # as a rank of a job does: a full garbage collection would take as long as a turn
    multiprocessing.set_start_method("fork", force=True)  # of workers: spawned processes have inherited "spawn"
    times = {case.name: times_of(case, rank, barrier, rounds) for case in CASES}
    results.put((times, {workers: resumes_of(workers, rank, barrier, repeats) for workers in WORKERS}))


def measure(quick: bool) -> report.Found:
    rounds, repeats = (5, 3) if quick else (30, 10)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(RANKS), context.Queue()
    ranks = [context.Process(target=in_rank, args=(rank, barrier, results, rounds, repeats)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    found = [results.get() for _ in ranks]
    for process in ranks:
        process.join()
    times = {case.name: joined([one[0][case.name] for one in found]) for case in CASES}
    resumes = {workers: joined([one[1][workers] for one in found]) for workers in WORKERS}
    made = [time_row(name, one) for name, one in times.items()]
    made += [resume_row(workers, one) for workers, one in resumes.items()]
    return report.Found({"times": times, "resumes": resumes}, made)


def joined(ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The values of both ranks."""
    return {name: [value for rank in ranks for value in rank[name]] for name in ranks[0]}


def time_row(case: str, times: dict[str, list[float]]) -> rows.Row:
    """A batch of ours beside torch's. The bar is met if the interval includes ``BAR``, or is below."""
    ours, torchs = ([1e6 * value for value in times[name]] for name in (OURS, TORCH))
    row = rows.paired(f"a batch: {case}", "us", ours, torchs, TORCH)
    return replace(row, allowed=BAR, met=row.low <= BAR)


def resume_row(workers: int, seconds: dict[str, list[float]]) -> rows.Row:
    name = f"first batch after a resume, {workers} workers"
    return rows.paired(name, "s", seconds[OURS], seconds[EMPTY], EMPTY, more=RESUME_BAR_S)


if __name__ == "__main__":
    report.main("input", __doc__, TEXT, measure, "5 rounds, 3 repeats")
