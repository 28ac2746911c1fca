"""What the stop agreement costs per step: ``python -m benchmarks.steps.agreement``, 7 minutes.

``make bench-agreement``. Two gloo ranks on this machine train a small DDP model in steps of about 10 ms.
Blocks of 100 steps are timed in pairs:
one with the agreement (its watcher thread blocked on the store, ``boundary()`` after every step), one without any; the
order within a pair alternates, both run in the same processes. Between them lie pairs of two blocks without it, which
show the machine's noise in the same comparison (A/A). Reported: the median ratio of the pairs with its
bootstrap 95% interval, and how many messages the ranks sent to the store while they made boundaries.

The bar: the interval's upper end is below 1.02, and not one message.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from benchmarks import report, rows, sides
from clusterddp.training.stopping import Agreement

RANKS = 2
BAR = 1.02
#: Pairs, and steps in a block; also of ``--quick``.
FULL, QUICK = (100, 100), (8, 50)
STEP_S = 0.010


class CountingStore(Store):
    """A store that counts the calls on it: each one is a message to rank 0's, and its answer."""

    def __init__(self, store: Store, calls: Counter[str] | None = None) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter() if calls is None else calls
        self._store = store

    def get(self, key: str) -> bytes:
        self.calls["get"] += 1
        return self._store.get(key)

    def set(self, key: str, value: str) -> None:
        self.calls["set"] += 1
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.calls["add"] += 1
        return self._store.add(key, amount)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls["multi_get"] += 1
        return self._store.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        self.calls["check"] += 1
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.calls["compare_set"] += 1
        return self._store.compare_set(key, expected, desired)


# ---- in the ranks


class Trainer:
    """Steps of a given length, with as much of a real step as matters here: a gradient all_reduce couples the ranks."""

    def __init__(self, size: int = 160) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self._batch, self._matrix = torch.randn(16, 64), torch.randn(size, size)
        self._products = 1

    def step(self) -> torch.Tensor:
        """Returns the loss."""
        result = self._matrix
        for _ in range(self._products):
            result = torch.tanh(self._matrix @ result)
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(self._batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def block(self, steps: int, boundary: Callable[[], bool] | None) -> float:
        """Seconds that ``steps`` steps take, from when all ranks are there. Collective."""
        dist.barrier()
        started = time.perf_counter()
        if boundary is None:
            for _ in range(steps):
                self.step()
        else:
            for _ in range(steps):
                self.step()
                boundary()
        return time.perf_counter() - started

    def calibrate(self, step_s: float) -> None:
        """Makes a step take ``step_s``, the same amount of work on all ranks. Collective."""
        self.block(20, None)
        for _ in range(4):
            now = min(self.block(20, None) for _ in range(3)) / 20  # other load comes and goes
            products = torch.tensor([max(1, round(self._products * step_s / now))])
            dist.broadcast(products, src=0)
            self._products = int(products)


class Agreements:
    """A new agreement for every block that needs one: in the blocks without it, there is no watcher either."""

    def __init__(self, store: Store, watched: Store, rank: int) -> None:
        self._store, self._watched, self._rank = store, watched, rank
        self._made = 0
        self.messages: Counter[str] = Counter()

    def time(self, trainer: Trainer, steps: int) -> float:
        """``trainer.block`` with an agreement that nobody asks to stop. Collective."""
        prefix = f"agreement-{self._made}"
        self._made += 1
        main = CountingStore(PrefixStore(prefix, self._store))
        watched = CountingStore(PrefixStore(prefix, self._watched))
        agreement = Agreement(main, watched, self._rank, RANKS, lambda *_, **__: None, lambda _: None)
        wait_for_watcher(watched)
        before = main.calls + watched.calls
        seconds = trainer.block(steps, agreement.boundary)
        self.messages += (main.calls + watched.calls) - before
        dist.barrier()
        agreement.close()
        return seconds


def wait_for_watcher(watched: CountingStore) -> None:
    """Until the watcher is blocked in the one call that it makes while nobody wants to stop."""
    deadline = time.monotonic() + 10
    while not watched.calls:
        assert time.monotonic() < deadline, "the watcher did not begin to watch"
        time.sleep(0.001)


def measure(pairs: int, steps: int, step_s: float, rank: int, ranks: int, port: int) -> dict[str, Any]:
    """The measurement of one rank; rank 0's figures are the ones to show."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=timedelta(seconds=60))
    watched = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(days=1))
    dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=ranks)
    trainer, agreements = Trainer(), Agreements(store, watched, rank)
    trainer.calibrate(step_s)
    with_it, without = partial(agreements.time, trainer, steps), partial(trainer.block, steps, None)
    results = [pair(with_it, without, number) for number in range(pairs)]
    messages = torch.tensor([agreements.messages.total()])
    dist.all_reduce(messages)
    dist.barrier()
    dist.destroy_process_group()
    return {"pairs": results, "steps": steps, "boundaries": RANKS * pairs * steps, "messages": int(messages)}


def pair(with_it: Callable[[], float], without: Callable[[], float], number: int) -> dict[str, float]:
    """Seconds of a block with what is measured ("on") and of one without, and of two without, next to each other.

    Which block comes first alternates, so that a drift of the machine's speed is on neither side.
    """
    blocks = [("on", with_it), ("off", without), ("first", without), ("second", without)]
    if not number % 2:
        blocks = [blocks[1], blocks[0], blocks[3], blocks[2]]
    return {name: block() for name, block in blocks}


# ---- around them


def run_ranks(module: str, request: Mapping[str, Any], **environment: str) -> Any:
    """Rank 0's figures of a benchmark."""
    return sides.run_ranks(module, request, RANKS, OMP_NUM_THREADS="1", **environment)


def rows_of(what: str, figures: Mapping[str, Any]) -> list[rows.Row]:
    """A step's time with something and without it, and the same of two blocks without, which is the machine's noise."""
    steps = {name: [1000 * pair[name] / figures["steps"] for pair in figures["pairs"]] for name in figures["pairs"][0]}
    row, limit = f"step with the {what}", "the same loop without it"
    return [
        rows.paired(row, "ms", steps["on"], steps["off"], limit, allowed=BAR),
        rows.paired(f"{row}: two blocks without it (A/A)", "ms", steps["first"], steps["second"], limit),
    ]


def command_line(
    words: str | None,
    name: str,
    title: str,
    measure: Callable[..., dict[str, Any]],
    run: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> None:
    """A benchmark of blocks in pairs: in a rank it measures, elsewhere it runs the ranks and writes the results."""
    if sides.answered(measure):
        return

    def found(quick: bool) -> report.Found:
        pairs, steps = QUICK if quick else FULL
        figures = run({"pairs": pairs, "steps": steps, "step_s": STEP_S})
        return report.Found(figures, rows_of(title, figures))

    text = f"# The {title}, per step\n\n{RANKS} gloo ranks train in blocks of steps, in turns with it and without it."
    report.main(name, words, text, found, "{} pairs of {} steps".format(*QUICK))


if __name__ == "__main__":
    command_line(__doc__, "agreement", "stop agreement", measure, partial(run_ranks, "benchmarks.steps.agreement"))
