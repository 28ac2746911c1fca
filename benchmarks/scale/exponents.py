"""How many messages, files and store operations each mechanism takes, for several numbers of ranks, and the exponents.

Counted, not timed: the supervisor's with simulated ranks over real connections, the store's with agreements in threads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch._C._distributed_c10d import HashStore

from benchmarks.scale.connections import all_joined, driver, failure, stacks, stop
from benchmarks.steps.agreement import CountingStore, wait_for_watcher
from clusterddp.training.stopping import Agreement

SIZES = (4, 8, 32, 128, 512)
#: Steps without a request, in which nothing may be sent.
STEPS = 50


def fitted(counts: Mapping[int, float]) -> float:
    """The power of the number of ranks with which a count grows: the slope of a line through the logarithms."""
    points = [(math.log(ranks), math.log(max(count, 1e-9))) for ranks, count in counts.items()]
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return float(slope)


def store_operations(ranks: int) -> tuple[Counter[str], Counter[str]]:
    """What an agreement of so many ranks asks of rank 0's store: before a stop, in STEPS steps, and for the stop."""
    store = HashStore()
    mains = [CountingStore(store) for _ in range(ranks)]
    watched = [CountingStore(store) for _ in range(ranks)]
    made = [
        Agreement(mains[rank], watched[rank], rank, ranks, lambda *_, **__: None, lambda _: None)
        for rank in range(ranks)
    ]
    for each in watched:
        wait_for_watcher(each)
    for _ in range(STEPS):
        assert not any(agreement.boundary() for agreement in made)
    before = _calls(mains, watched)
    made[-1].request("enough")
    going = list(made)
    while going:  # the ranks' main threads, one after the other: a boundary waits for the watchers alone
        going = [agreement for agreement in going if not agreement.boundary()]
    after = _calls(mains, watched)
    after.subtract(before)
    return before, Counter({name: number for name, number in after.items() if number})


def _calls(*stores: list[CountingStore]) -> Counter[str]:
    total: Counter[str] = Counter()
    for group in stores:
        for store in group:
            total.update(store.calls)
    return total


def messages(ranks: int) -> dict[str, int]:
    """What one supervisor and its ranks send for each mechanism, and the history's lines."""
    found: dict[str, int] = {}
    with driver(ranks) as made:
        made.wanted()
        before = made.counts()

        def took() -> Counter[str]:
            nonlocal before
            now = made.counts()
            taken, before = Counter({name: number - before[name] for name, number in now.items()}), now
            return taken

        made.join()
        made.until(all_joined(made), "the join")
        taken = took()
        found["hello and its answer"] = taken["sent hello"] + taken["heard answer"]
        found["connections at the supervisor"] = taken["open"]
        for stubs in made.stubs:
            stubs.ask("beat_once")
        made.until(lambda: made.usage()["beaten"] == ranks, "the heartbeats")
        taken = took()
        found["heartbeats of a period, which have the steps' times"] = taken["sent alive"]
        stacks(made)
        taken = took()
        found["stacks"] = taken["heard stacks"] + taken["sent stacks"]
        failure(made)
        lines = made.run.events_file.read_bytes().count(b"\n")
        found["history lines of an attempt with a failure"] = lines
        timing = (made.run.path / "timing.jsonl").read_bytes()
        found["lines of timing.jsonl, of an attempt shorter than 10 s"] = timing.count(b"\n")
        found["their bytes"] = len(timing)
        took()
        made.join()
        made.until(lambda: made.counts()["open"] == ranks and made.usage()["joined"] == ranks, "the restart")
        taken = took()
        found["restart in place"] = taken["sent hello"] + taken["heard answer"]
        stop(made)
        taken = took()
        found["stop: orders, confirmations, ends"] = sum(
            taken[name] for name in ("heard stop", "sent notified", "sent left")
        )
        found["history lines of a stop"] = made.run.events_file.read_bytes().count(b"\n") - lines
    return found


def measure(sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    """A row per mechanism: its counts by number of ranks, and the exponent."""
    table: dict[str, dict[int, float]] = {}
    for ranks in sizes:
        before, stop_ = store_operations(ranks)
        counts = {
            **messages(ranks),
            "store operations until training (agreement)": before.total(),
            "store operations of a stop": stop_.total(),
        }
        for name, count in counts.items():
            table.setdefault(name, {})[ranks] = count
    return [
        {
            "mechanism": name,
            "counts": {str(ranks): count for ranks, count in counts.items()},
            "exponent": round(fitted(counts), 3),
        }
        for name, counts in table.items()
    ]
