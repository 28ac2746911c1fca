"""What it costs to draw samples from each order, beside slices of ``torch.randperm``: ``python -m benchmarks.orders``.

A seek is the first batch of 64 samples at a step near 10^9, in an epoch that has not been drawn from. The samples of a
step are drawn in batches of 4096, one after the other; each block of 20 such batches is followed by one from randperm's
list, and their ratio is taken.

The bar: the median seek is below 1 ms, and a sample below 5 us.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks import report, rows
from clusterddp import orders
from clusterddp.data.sample_order import Binding, BoundOrder, Order

STEP, SMALL, LARGE, BATCHES = 10**9, 64, 4096, 20
MILLION, MILLIARD = 10**6, 10**9
SEEK_MS, SAMPLE_US = 1.0, 5.0
LONG = "weighted by class, 10^9"


@dataclass
class Result:
    """One order. Seconds, but where the name has another unit."""

    name: str
    build: float
    seeks_ms: list[float] = field(default_factory=list)
    samples_us: list[float] = field(default_factory=list)
    randperm_us: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


def made() -> dict[str, tuple[Callable[[], Order], Any]]:
    """Each order, and its dataset or number of samples."""
    generator = np.random.default_rng(0)
    lengths, weights = generator.integers(1, 500, MILLION), generator.random(MILLION)
    classes = np.broadcast_to(np.uint8(1), MILLIARD)
    datasets = [range(MILLION), range(MILLIARD), range(1000)]
    changes = {STEP // 2: [1, 1, 1], **{step: [step, 1, 1] for step in range(1, 101)}}
    return {
        "shuffled, 10^6": (orders.shuffled, MILLION),
        "shuffled, 10^9": (orders.shuffled, MILLIARD),
        "sequential, 10^9": (orders.sequential, MILLIARD),
        "weighted, 10^6": (lambda: orders.weighted(weights), MILLION),
        LONG: (lambda: orders.weighted([1.0, 2.0], classes), MILLIARD),
        "bucketed, 10^6": (lambda: orders.bucketed(lengths), MILLION),
        "mixture of 10^6, 10^9 and 1000, 101 changes": (lambda: orders.mixture([7, 2, 1], changes=changes), datasets),
    }


def bound(order: Order, data: Any, batch: int) -> BoundOrder:
    if isinstance(data, int):
        return order.bind(Binding(None, data, 1, batch))
    dataset = order.dataset(data)
    return order.bind(Binding(dataset, len(dataset), 1, batch))


def seconds(draw: Callable[[], Any]) -> float:
    start = time.perf_counter()
    draw()
    return time.perf_counter() - start


def block(stream: BoundOrder, first: int) -> float:
    """Of some batches, per sample."""
    starts = range(first, first + BATCHES * LARGE, LARGE)
    return seconds(lambda: [stream.samples(start, start + LARGE) for start in starts]) / (BATCHES * LARGE)


def measure(name: str, make: Callable[[], Order], data: Any, repeats: int) -> Result:
    start = time.perf_counter()
    order = make()
    stream = bound(order, data, SMALL)
    result = Result(name, time.perf_counter() - start)
    for number in range(repeats):
        first = (STEP + number * 1_000_003) * SMALL
        result.seeks_ms.append(1000 * seconds(lambda first=first: stream.samples(first, first + SMALL)))  # type: ignore[misc]
    randperm, stream = bound(orders.shuffled(version=1), MILLION, LARGE), bound(order, data, LARGE)
    randperm.samples(0, 1)
    for _ in range(repeats):
        mine, torchs = block(stream, STEP * LARGE), block(randperm, 0)
        result.samples_us.append(1e6 * mine)
        result.randperm_us.append(1e6 * torchs)
        result.ratios.append(mine / torchs)
    return result


def table_row(result: Result) -> dict[str, Any]:
    """For the common table."""
    name, limit = f"draw a sample: {result.name}", "a slice of torch.randperm for 10^6"
    return rows.paired(
        name, "us", result.samples_us, result.randperm_us, limit, allowed=SAMPLE_US / report.median(result.randperm_us)
    ).as_json()


def main() -> None:
    parser = report.parser(__doc__, "15 repeats, without the order that takes long to build")
    parser.add_argument("--repeats", type=int, default=100)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats = 15
    cases = {name: case for name, case in made().items() if not (arguments.quick and name == LONG)}
    results = [measure(name, *case, arguments.repeats) for name, case in cases.items()]
    head = ["order", "build, s", "seek, ms"]
    lines = [[result.name, result.build, report.median(result.seeks_ms)] for result in results]
    text = f"""# What an order costs

Medians of {arguments.repeats} seeks, to the first batch of {SMALL} samples at a step near 10^9, and blocks of {BATCHES}
batches of {LARGE}. A seek is to take less than {SEEK_MS:.0f} ms."""
    figures = {"results": [asdict(result) for result in results], "rows": [table_row(result) for result in results]}
    report.write(arguments.out, "orders", text, figures, tables={"Seeks": report.table(head, lines)})


if __name__ == "__main__":
    main()
