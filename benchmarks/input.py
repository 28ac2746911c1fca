"""How fast batches come: ``python -m benchmarks.input`` (``make bench-input``), about 3 minutes.

Three loaders read the same data in two ranks at once: ``ctx.loader``'s, torch's DataLoader with a DistributedSampler,
and torchdata's StatefulDataLoader with its StatefulDistributedSampler. In each round all of them read so many batches
in turn, in another order each time; both ranks begin each turn together, and hold a batch until they have the next, as
a loop does. What counts is the ratio of two loaders' times in the same round and rank.

Without workers a turn is an epoch, so that it has what the others do when one begins. Its time is the thread's CPU
time, as that thread does all of the work: other programs disturb it less than the time that passes.

With workers that time counts. Each turn begins with as many batches as its workers have read ahead, which do not count,
and ends with a pause in which they read as far ahead again, so that they take no time from the next loader's. An epoch
is longer than the measurement: that the others' workers begin an epoch with nothing read ahead is left out.

- cheap: a row of 16 numbers and a label from tensors in memory; draws nothing.
- costly: an image of 160 x 160, cropped and flipped at random and converted to floats.

A resume is timed from making the loader, with what a checkpoint has of it, to its first batch: of ``ctx.loader`` at
step 1,000,000, of torchdata's at step 1,000, from the state that it had there. Next to them, a DataLoader whose samples
are numbers, at its beginning: the start of workers alone. Workers are forked, as in a rank of a job.

Bars: a batch takes at most 5% longer than with torch's DataLoader, within the 95% interval of the ratio; a resume takes
at most 0.2 s more than the loader of numbers.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks import report, rows
from clusterddp.data.loader import Loader
from clusterddp.data.sample_orders import Shuffled
from clusterddp.data.workers import close

RANKS, WORKERS = 2, (0, 2, 4)
OURS, TORCH, TORCHDATA = "ctx.loader", "DataLoader", "StatefulDataLoader"
EMPTY = "DataLoader of numbers"
LATE, RESUME, RESUME_BAR_S = 1_000_000, 1000, 0.2
#: How long a batch may take, as a multiple of torch's.
BAR = 1.05
#: Batches that each worker reads ahead, by torch's default, and how long after a turn they have done so at the latest.
AHEAD, PAUSE_S = 2, 0.05
#: Samples of an epoch, and of one that no turn reaches the end of.
EPOCH, LONG = 400_000, 2_000_000


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
    loader = Loader(
        dataset,
        dataset.batch_size,
        order=Shuffled(),
        seed=0,
        rank=rank,
        world_size=RANKS,
        num_workers=workers,
    )
    if step:
        loader.restore(loader.progress(step))
    return loader.batches(step, True)


def sampled(dataset: Any, rank: int, workers: int) -> DataLoader[Any]:
    return DataLoader(
        dataset, dataset.batch_size, sampler=DistributedSampler(dataset, RANKS, rank), num_workers=workers
    )


def stateful(dataset: Any, rank: int, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(dataset, RANKS, rank)
    return StatefulDataLoader(dataset, dataset.batch_size, sampler=sampler, num_workers=workers)


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def measure_times(rank: int, barrier: Any, rounds: int) -> list[dict[str, Any]]:
    """Seconds per batch of each loader, in each round."""
    found = []
    for case in CASES:
        dataset = case.dataset()
        streams = {
            OURS: ours(dataset, rank, case.workers),
            TORCH: endless(sampled(dataset, rank, case.workers)),
            TORCHDATA: endless(stateful(dataset, rank, case.workers)),
        }
        times: dict[str, list[float]] = {loader: [] for loader in streams}
        for number in range(-1, rounds):  # one to warm up
            for loader in random.Random(number).sample(sorted(streams), len(streams)):  # the same in both ranks
                barrier.wait()
                taken = turn(streams[loader], case)
                times[loader] += [taken] if number >= 0 else []
        found.append({"case": case.name, "rank": rank, "times": times})
        if rank == 0:
            report.say(f"{case.name}: measured")
        del streams
        gc.collect()
    return found


def turn(stream: Iterator[Any], case: Case) -> float:
    """Seconds per batch."""
    clock = time.perf_counter if case.workers else time.thread_time
    for _ in itertools.islice(stream, AHEAD * case.workers):
        pass
    started = clock()
    for _ in itertools.islice(stream, case.batches):
        pass
    taken = clock() - started
    if case.workers:
        time.sleep(AHEAD * case.workers * taken / case.batches + PAUSE_S)
    return taken / case.batches


def measure_resumes(rank: int, barrier: Any, repeats: int) -> list[dict[str, Any]]:
    """Seconds from making a loader to its first batch."""
    found = []
    dataset = Cheap(64)
    for workers in WORKERS:
        loader = stateful(dataset, rank, workers)
        for _ in itertools.islice(endless(loader), RESUME):
            pass
        state = loader.state_dict()
        starts: dict[str, Callable[[], Iterator[Any]]] = {
            OURS: lambda workers=workers: ours(dataset, rank, workers, LATE),  # type: ignore[misc]
            TORCHDATA: lambda workers=workers, state=state: resumed(dataset, rank, workers, state),  # type: ignore[misc]
            EMPTY: lambda workers=workers: iter(  # type: ignore[misc]
                DataLoader(range(10**6), dataset.batch_size, num_workers=workers)  # type: ignore[arg-type]
            ),
        }
        taken: dict[str, list[float]] = {name: [] for name in starts}
        for _, (name, start) in itertools.product(range(repeats), starts.items()):
            barrier.wait()
            started = time.perf_counter()
            stream = start()
            next(stream)
            taken[name].append(time.perf_counter() - started)
            end = getattr(stream, "close", None)
            end() if end else close(stream)
            del stream
        found.append({"workers": workers, "rank": rank, "seconds": taken})
        del loader
        gc.collect()
    return found


def resumed(dataset: Any, rank: int, workers: int, state: Any) -> Iterator[Any]:
    loader = stateful(dataset, rank, workers)
    loader.load_state_dict(state)
    return iter(loader)


def measure(rank: int, barrier: Any, results: Any, rounds: int, repeats: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # as a rank of a job does: a full garbage collection would take as long as a turn
    multiprocessing.set_start_method("fork", force=True)  # of workers: spawned processes have inherited "spawn"
    results.put((measure_times(rank, barrier, rounds), measure_resumes(rank, barrier, repeats)))


def run(rounds: int, repeats: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What both ranks measured."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(RANKS), context.Queue()
    ranks = [context.Process(target=measure, args=(rank, barrier, results, rounds, repeats)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    found = [results.get() for _ in ranks]
    for process in ranks:
        process.join()
    return [one for times, _ in found for one in times], [one for _, resumes in found for one in resumes]


def time_row(times: list[dict[str, Any]], case: str) -> rows.Row:
    """A batch of ours beside torch's. The bar is met if the interval includes ``BAR``, or is below."""
    of_case = [one["times"] for one in times if one["case"] == case]
    joined = {name: [1e6 * value for one in of_case for value in one[name]] for name in (OURS, TORCH)}
    row = rows.paired(f"a batch: {case}", "us", joined[OURS], joined[TORCH], TORCH)
    return replace(row, allowed=BAR, met=row.low <= BAR)


def resume_row(resumes: list[dict[str, Any]], workers: int) -> rows.Row:
    of_case = [one["seconds"] for one in resumes if one["workers"] == workers]
    joined = {name: [value for taken in of_case for value in taken[name]] for name in (OURS, EMPTY)}
    name = f"first batch after a resume, {workers} workers"
    return rows.paired(name, "s", joined[OURS], joined[EMPTY], EMPTY, more=RESUME_BAR_S)


def main() -> None:
    parser = report.parser(__doc__, "5 rounds, 3 repeats")
    parser.add_argument("--rounds", type=int, default=30, help="of each row")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    rounds, repeats = (5, 3) if options.quick else (options.rounds, options.repeats)
    times, resumes = run(rounds, repeats)
    found = [time_row(times, case.name) for case in CASES] + [resume_row(resumes, workers) for workers in WORKERS]
    text = f"""# How fast batches come

Medians in each of {RANKS} ranks, which read at the same time, of {rounds} rounds, in which the three loaders read in
turn; the limit is torch's DataLoader, and a bar is met if the interval includes {BAR}. The raw figures have torchdata's
{version("torchdata")} StatefulDataLoader, too."""
    figures = {"times": times, "resumes": resumes, "rows": [row.as_json() for row in found]}
    report.write(options.out, "input", text, figures)


if __name__ == "__main__":
    main()
