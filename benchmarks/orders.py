"""What it costs to draw samples from each order, beside slices of ``torch.randperm``: ``python -m benchmarks.orders``.

A seek is the first batch of 64 samples at a step near 10^9, in an epoch that has not been drawn from. The samples of a
step are drawn in batches of 4096, one after the other; each block of 20 such batches is followed by one from randperm's
list, and their ratio is taken.

The bar: the median seek is below 1 ms, and a sample below 5 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import report, rows
from benchmarks.sides import in_turns, seconds
from clusterddp import orders
from clusterddp.data.sample_order import Binding, BoundOrder, Order

STEP, SMALL, LARGE, BATCHES = 10**9, 64, 4096, 20
MILLION, MILLIARD = 10**6, 10**9
SEEK_MS, SAMPLE_US = 1.0, 5.0
LONG = "weighted by class, 10^9"
TEXT = f"""# Drawing samples

Seeks to a step near 10^9, and blocks of {BATCHES} batches of {LARGE:,} samples, in turns with slices of a list by
`torch.randperm`."""


def made() -> dict[str, tuple[Callable[[], Order], int]]:
    """Each order, and its number of samples."""
    weights = np.random.default_rng(0).random(MILLION)
    classes = np.broadcast_to(np.uint8(1), MILLIARD)
    return {
        "shuffled, 10^6": (orders.shuffled, MILLION),
        "shuffled, 10^9": (orders.shuffled, MILLIARD),
        "sequential, 10^9": (orders.sequential, MILLIARD),
        "weighted, 10^6": (lambda: orders.weighted(weights), MILLION),
        LONG: (lambda: orders.weighted([1.0, 2.0], classes), MILLIARD),
    }


def bound(order: Order, samples: int, batch: int) -> BoundOrder:
    return order.bind(Binding(samples, 1, batch))


def block(stream: BoundOrder, first: int) -> float:
    """Of some batches, per sample."""
    starts = range(first, first + BATCHES * LARGE, LARGE)
    return seconds(lambda: [stream.samples(start, start + LARGE) for start in starts]) / (BATCHES * LARGE)


def drawn(name: str, make: Callable[[], Order], samples: int, repeats: int) -> tuple[list[rows.Row], dict[str, Any]]:
    """The rows of one order, and its figures."""
    order = make()
    stream = bound(order, samples, SMALL)
    firsts = [(STEP + number * 1_000_003) * SMALL for number in range(repeats)]
    seeks = [1000 * seconds(lambda first=first: stream.samples(first, first + SMALL)) for first in firsts]  # type: ignore[misc]
    randperm, stream = bound(orders.shuffled(version=1), MILLION, LARGE), bound(order, samples, LARGE)
    randperm.samples(0, 1)
    sides = {"ours": lambda: 1e6 * block(stream, STEP * LARGE), "randperm": lambda: 1e6 * block(randperm, 0)}
    found = in_turns(sides, repeats, warm_up=0)
    ours, limit, words = found["ours"], found["randperm"], "a slice of torch.randperm for 10^6"
    return [
        rows.paired(f"draw a sample: {name}", "us", ours, limit, words, most=SAMPLE_US),
        rows.counted(f"seek: {name}", "ms", report.median(seeks), SEEK_MS, "1 ms", allowed=1.0),
    ], {"name": name, "seeks_ms": seeks, "samples_us": found}


def measure(quick: bool) -> report.Found:
    cases = {name: case for name, case in made().items() if not (quick and name == LONG)}
    found = [drawn(name, *case, 15 if quick else 100) for name, case in cases.items()]
    return report.Found({"results": [one for _, one in found]}, [row for made, _ in found for row in made])


if __name__ == "__main__":
    report.main("orders", __doc__, TEXT, measure, "15 repeats, without the order that takes long to build")
