"""How fast batches come: ``python -m benchmarks.input`` (``make bench-input``), about 10 minutes.

Three loaders read the same data in two ranks at once: ``ctx.loader``'s, torch's DataLoader with a DistributedSampler,
and torchdata's StatefulDataLoader with its StatefulDistributedSampler. In each round all of them read so many batches
in turn, in another order each time; both ranks begin each turn together. What counts is the ratio of two loaders' rates
in the same round and rank.

- cheap: a row of 16 numbers and a label from tensors in memory, in batches of 1024; draws nothing.
- costly: an image of 160 x 160, cropped and flipped at random and converted to floats, in batches of 32.

A resume is timed from making the loader, with what a checkpoint has of it, to its first batch: of ``ctx.loader`` at
step 1,000,000, of torchdata's at step 1,000, from the state that it had there. Next to them, a DataLoader whose samples
are numbers, at its beginning: the start of workers alone.

Bars: the rate is at least that of the better of the others, within the 95% interval of the ratio; a resume takes at
most 0.2 s more than the loader of numbers.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks import report
from clusterddp.data.loader import Loader
from clusterddp.data.orders.plain import Shuffled
from clusterddp.data.workers import close

RANKS, WORKERS = 2, (0, 2, 4)
OURS, TORCH, TORCHDATA = "ctx.loader", "DataLoader", "StatefulDataLoader"
EMPTY = "DataLoader of numbers"
LATE, RESUME, RESUME_BAR_S = 1_000_000, 1000, 0.2


class Cheap(Dataset[Any]):
    batch_size, batches = 1024, 40

    def __init__(self) -> None:
        self._rows, self._labels = torch.randn(400_000, 16), torch.arange(400_000) % 10

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index], self._labels[index]


class Small(Cheap):
    """For resumes, in which starting is to be seen and not reading."""

    batch_size = 64


class Costly(Dataset[Any]):
    batch_size, batches = 32, 20

    def __init__(self) -> None:
        self._images = torch.randint(0, 256, (64, 3, 160, 160), dtype=torch.uint8)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        top, left, flip = torch.randint(0, 32, (3,)).tolist()
        image = self._images[index % 64, :, top : top + 128, left : left + 128].float().div_(255)
        return image.flip(-1) if flip < 16 else image, index % 10


DATASETS: dict[str, Callable[[], Any]] = {"cheap": Cheap, "costly": Costly}


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


def measure_rates(rank: int, barrier: Any, rounds: int) -> list[dict[str, Any]]:
    """Samples per second of each loader, in each round."""
    found = []
    for (name, make), workers in itertools.product(DATASETS.items(), WORKERS):
        dataset = make()
        streams = {
            OURS: ours(dataset, rank, workers),
            TORCH: endless(sampled(dataset, rank, workers)),
            TORCHDATA: endless(stateful(dataset, rank, workers)),
        }
        rates: dict[str, list[float]] = {loader: [] for loader in streams}
        for number in range(-1, rounds):  # one to warm up
            for loader in random.Random(number).sample(sorted(streams), len(streams)):  # the same in both ranks
                barrier.wait()
                rate = dataset.batch_size * dataset.batches / seconds_of(streams[loader], dataset.batches)
                rates[loader] += [rate] if number >= 0 else []
        found.append({"dataset": name, "workers": workers, "rank": rank, "rates": rates})
        del streams
        gc.collect()
    return found


def seconds_of(stream: Iterator[Any], batches: int) -> float:
    started = time.perf_counter()
    for _ in range(batches):
        next(stream)
    return time.perf_counter() - started


def measure_resumes(rank: int, barrier: Any, repeats: int) -> list[dict[str, Any]]:
    """Seconds from making a loader to its first batch."""
    found = []
    dataset = Small()
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
    results.put((measure_rates(rank, barrier, rounds), measure_resumes(rank, barrier, repeats)))


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
    return [one for rates, _ in found for one in rates], [one for _, resumes in found for one in resumes]


def compared(rates: list[dict[str, Any]], dataset: str, workers: int) -> tuple[list[object], bool]:
    """A row of the table, and whether the bar is met."""
    of_case = [one["rates"] for one in rates if (one["dataset"], one["workers"]) == (dataset, workers)]
    joined = {name: [rate for one in of_case for rate in one[name]] for name in (OURS, TORCH, TORCHDATA)}
    row: list[object] = [dataset, workers, *(round(report.median(joined[name])) for name in joined)]
    best = max((TORCH, TORCHDATA), key=lambda name: report.median(joined[name]))
    ratios = [mine / other for mine, other in zip(joined[OURS], joined[best], strict=True)]
    low, high = report.bootstrap_interval(ratios)
    met = high >= 1
    return [*row, f"{report.median(ratios):.2f} ({low:.2f} to {high:.2f})", report.verdict(met)], met


def resume_row(resumes: list[dict[str, Any]], workers: int) -> tuple[list[object], bool]:
    """A row of the table, and whether the bar is met."""
    of_case = [one["seconds"] for one in resumes if one["workers"] == workers]
    medians = [report.median([one for taken in of_case for one in taken[name]]) for name in (OURS, TORCHDATA, EMPTY)]
    met = medians[0] - medians[2] <= RESUME_BAR_S
    return [workers, *(f"{one:.3f}" for one in medians), report.verdict(met)], met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("docs/measurements"))
    arguments = parser.parse_args()
    rates, resumes = run(arguments.rounds, arguments.repeats)
    rows = [compared(rates, dataset, workers) for dataset, workers in itertools.product(DATASETS, WORKERS)]
    resume_rows = [resume_row(resumes, workers) for workers in WORKERS]
    write(arguments.folder, arguments.rounds, [row for row, _ in rows], [row for row, _ in resume_rows], rates, resumes)


def write(folder: Path, rounds: int, rows: Any, resume_rows: Any, rates: Any, resumes: Any) -> None:
    head = ["data", "workers", OURS, TORCH, TORCHDATA, "ratio to the better one (95%)", "at least equal"]
    resume_head = ["workers", f"{OURS}, step {LATE:,}", f"{TORCHDATA}, step {RESUME:,}", EMPTY, "within 0.2 s"]
    text = f"""# How fast batches come

{report.place("while other programs ran")} {time.strftime("%Y-%m-%d")}, torchdata {version("torchdata")}.
`make bench-input`.

Only ratios within a row are exact: the machine had less to give in some rows than in others, and two ranks with 4
workers each are more processes than it has cores. There is no GPU in these figures.

## Samples per second and rank

{report.table(head, rows)}

Medians of {rounds} rounds in each of {RANKS} ranks, which read at the same time. In each round the loaders read in
turn, {Cheap.batches} batches of {Cheap.batch_size} (cheap: a row of 16 numbers and a label) or {Costly.batches} of
{Costly.batch_size} (costly: an image, cropped and flipped at random). The ratio is that of one round and rank.

Only the costly samples draw random numbers, and are seeded one by one by `ctx.loader`.

## Seconds from a resume to the first batch

{report.table(resume_head, resume_rows)}

Medians in {RANKS} ranks, of the cheap samples in batches of {Small.batch_size}, from making the loader to its first
batch. torchdata's starts from the state that it had at its step. The loader of numbers shows what starting workers and
one batch take."""
    report.write(folder, "input", text, {"rates": rates, "resumes": resumes})


if __name__ == "__main__":
    main()
