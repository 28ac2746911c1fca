"""Counts wrong results of the first ``torch.sqrt`` of a process; for ``benchmarks.math_library`` and its test.

All calls are made in this process, which resets the number that MKL keeps of the CPU before each: to MKL each is the
first one. A call with and one without ``settle()`` take turns.

Prints JSON: for each side the calls, how many results differ from those of a later call, and the largest difference.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Floats per thread: with fewer, torch uses fewer threads.
PART = 8192


def first_call(values: Any) -> Callable[[bool], float]:
    """A call in this process, which has forgotten all calls before it; the largest error of its result."""
    import torch

    from benchmarks.math_library import cpu_number
    from clusterddp.distributed import devices

    number = cpu_number()
    if number is None:
        raise SystemExit("this torch has no MKL whose number of the CPU could be reset")
    torch.sqrt(values)
    expected = torch.sqrt(values)  # not by a first call
    result = torch.empty_like(values)

    def error(settled: bool) -> float:
        number.value = -1
        if settled:
            devices.settle_vector_functions()
        torch.sqrt(values, out=result)
        return 0.0 if torch.equal(result, expected) else float((result - expected).abs().numpy().max())

    return error


@contextmanager
def busy(burners: int) -> Iterator[None]:
    """So many processes that keep a CPU busy each, at a niceness at which they are mostly the ones to wait."""
    children = []
    for _ in range(burners):
        child = os.fork()
        if not child:
            os.nice(15)
        while not child:
            pass
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def count(error: Callable[[bool], float], enough: int, seconds: float) -> dict[str, dict[str, float]]:
    """Of all calls until there are enough wrong results without ``settle()``, or the time is over."""
    found = {side: {"calls": 0, "wrong": 0, "largest": 0.0} for side in ("plain", "settled")}
    deadline = time.monotonic() + seconds
    while found["plain"]["wrong"] < enough and time.monotonic() < deadline:
        for side, counts in found.items():
            largest = error(side == "settled")
            counts["calls"] += 1
            counts["wrong"] += largest > 0
            counts["largest"] = max(counts["largest"], largest)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--enough", type=int, required=True, help="ends after so many wrong results without settle()")
    parser.add_argument("--seconds", type=float, required=True, help="ends then at the latest")
    parser.add_argument("--burners", type=int, default=0, help="processes that keep CPUs busy")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch is imported
    import numpy
    import torch

    random = numpy.random.RandomState(0)  # not torch's, which may use MKL
    values = torch.from_numpy(random.rand(PART * options.threads).astype(numpy.float32))
    with busy(options.burners):
        print(json.dumps(count(first_call(values), options.enough, options.seconds)))


if __name__ == "__main__":
    main()
