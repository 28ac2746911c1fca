"""``run.log(..., reduce="mean")``: one value of all ranks, without a collective and without waiting in a step.

**On ranks other than 0** the training thread only keeps a step's values. A thread passes them on a few times per
second, all steps since the last time in one *chunk*: a key ``log/RANK/NUMBER`` in the attempt's store, with the step up
to which the rank has logged. The store serves keys without the ranks' Python, so that ranks do not wait for each other.

**On rank 0** a thread collects the chunks. A metrics line with reduced values is held back, with all lines behind it,
until each rank's chunks reach beyond its step. Then the values are combined in the order of ranks. Because the sum is
exactly rounded (``math.fsum``), the result does not depend on where chunks are cut or the run stops.

**Complete at each checkpoint.** The writer commits checkpoint S only after the lines below S are on the disk
(``saving.py``). Where all ranks know of a save (a stop, the end of the loop, ``every: N steps``, a metric of
``keep.best``), the ranks pass on their values at once. Other saves become durable up to a moment later.

**What is missing** is reported, once per name:

- A rank that did not log a name in a step does not count in that step: the mean is over the ranks that did. A rank that
  has never called ``run.log(reduce=...)`` notices within seconds that rank 0 waits for it, and sends its step.
- If only ranks other than 0 reduce, their values are dropped.
- If a rank fails or hangs, rank 0 waits for it for a bounded time, and then continues without it.

With one rank, the value is the rank's own. A resume, after which the number of ranks may differ, keeps no state.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from clusterddp.distributed.devices import device_thread
from clusterddp.reporter import counted, say
from clusterddp.training.logged_values import Logged

#: Seconds between two chunks of a rank, and between two looks of rank 0; between two looks while a caller waits.
PERIOD_S, HURRY_S = 0.25, 0.01
#: With very many ranks the period is longer, up to this many seconds, so that rank 0 gets this many chunks a second.
_LONGEST_PERIOD_S, _MOST_PER_S = 5.0, 1024
#: The most steps in a chunk, and the most bytes (a store accepts 8 MiB), except for a single step.
_STEPS, _BYTES = 500, 2 << 20
#: Set by rank 0 once it logs a reduced value.
_WANTED = "log/wanted"
#: A rank's values of a step: how each name is reduced, and the value.
Row = tuple[int, Mapping[str, tuple[str, float]]]


class Sender:
    """A rank other than 0: passes on what it logs with ``reduce``."""

    #: Seconds between two chunks, unless there are very many ranks.
    period_s = PERIOD_S
    #: Seconds between the looks of a rank that has reduced nothing whether rank 0 has.
    idle_s = 5.0
    #: Periods without the end of a step after which the thread asks the GPU: the training thread may evaluate.
    quiet_periods = 8
    #: The most chunks that rank 0 has not collected, and the most steps that the rank keeps beyond that.
    most_chunks, most_steps = 64, 10_000

    def __init__(self, store: Store, rank: int, world_size: int = 1, device: torch.device | None = None) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._steps: deque[tuple[int, Logged]] = deque()
        #: Of these, the values that have not been seen to arrive from a GPU, oldest first.
        self._on_gpus: deque[Logged] = deque()
        #: The rank has logged all steps below; those below ``_sent`` were passed on.
        self._logged = self._sent = 0
        self._chunks = 0
        self._active = self._ending = self._said = False
        self._wake, self._publishing = threading.Event(), threading.Lock()
        self._thread = device_thread(device, self._run, name="log")
        self._thread.start()

    def add(self, step: int, logged: Logged, now: bool) -> None:
        """Takes the values of a step at its end, which may be none. ``now``: rank 0 waits for them."""
        if logged.reduced:
            if logged.copied:
                self._on_gpus.append(logged)
            self._steps.append((step, logged))
            now |= not self._active
            self._active = True
        self._logged = step + 1
        if self._on_gpus and self._publishing.acquire(blocking=False):
            try:
                self._take_arrived()
            finally:
                self._publishing.release()
        if now and self._active:
            self._wake.set()

    def flush(self) -> None:
        """Passes on everything. For the training thread, before it waits for rank 0's save."""
        with suppress(RuntimeError):  # the store is lost, which the caller also notices
            self._look()
            self._publish(wait=True)

    def close(self) -> None:
        """Passes on the rest, in bounded time."""
        self._ending = True
        self._wake.set()
        self._thread.join(timeout=5)

    def _take_arrived(self) -> None:
        """See ``logged_values.py``. Under the lock, as each value is taken once."""
        while self._on_gpus and self._on_gpus[0].arrived():
            self._on_gpus.popleft()

    def _run(self) -> None:
        quiet, logged = 0, -1
        with suppress(RuntimeError):  # of the store or CUDA, which the training thread also meets
            while not self._ending:
                hurry = self._wake.wait(period_s(self._world_size, self.period_s) if self._active else self.idle_s)
                self._wake.clear()
                self._look()
                quiet, logged = quiet + 1 if logged == self._logged else 0, self._logged
                if quiet >= self.quiet_periods:
                    with self._publishing:
                        self._take_arrived()
                self._publish(wait=hurry)

    def _look(self) -> None:
        self._active = self._active or self._store.check([_WANTED])

    def _publish(self, wait: bool) -> None:
        """Passes on what has arrived from a GPU. All, if ``wait``."""
        with self._publishing:
            if not self._active or not self._has_room():
                return
            through, rows = self._logged, list[Row]()
            while self._steps:
                step, logged = self._steps[0]
                if step >= through or (logged.copied and not wait):
                    break
                rows.append((step, _row(logged)))
                self._steps.popleft()
            if self._steps:
                through = min(through, self._steps[0][0])
            if rows or through > self._sent:
                for chunk in encoded(rows, through):
                    self._store.set(_key(self._rank, self._chunks), chunk)
                    self._chunks += 1
                self._sent = through

    def _has_room(self) -> bool:
        """Whether rank 0 collects the values. If it does not, they are dropped at some point."""
        oldest = self._chunks - self.most_chunks
        if oldest < 0 or not self._store.check([_key(self._rank, oldest)]):
            return True
        if len(self._steps) > self.most_steps:
            self._steps.clear()
            if not self._said:
                say("rank 0 never called run.log(reduce=...), so values of other ranks are dropped. Call it on rank 0")
            self._said = True
        return False


class Receiver:
    """Rank 0: collects what the other ranks log with ``reduce``, in a thread that begins with the first such value.

    ``on_news`` is called in that thread when lines may be complete.
    """

    #: Seconds between two looks, unless there are very many ranks.
    period_s = PERIOD_S

    def __init__(self, store: Store, world_size: int, on_news: Callable[[], None]) -> None:
        self._store, self._world_size, self._on_news = store, world_size, on_news
        self._thread: threading.Thread | None = None
        self._wake, self._changed = threading.Event(), threading.Condition()
        self._ending, self._waiting = False, 0
        self._next_search = 0.0  # when to ask again which ranks' chunks are missing
        #: The steps that are not complete, in order; all below ``_complete`` are, or were given up.
        self._awaited: deque[int] = deque()
        self._complete = 0
        self._lost = False
        #: Of each rank: the number of its next chunk, and the step up to which its values are here.
        self._next, self._through = dict.fromkeys(range(1, world_size), 0), dict.fromkeys(range(1, world_size), 0)
        #: By step, name and rank: how the value is reduced, and the value.
        self._values: dict[int, dict[str, dict[int, tuple[str, float]]]] = {}
        self._taken = -1
        self._said: set[str] = set()

    def expect(self, step: int) -> None:
        """The line of this step needs the other ranks' values. For the training thread."""
        self._awaited.append(step)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log", daemon=True)
            self._thread.start()

    def has(self, step: int) -> bool:
        """Whether the values of all ranks are here that will come."""
        return step < self._complete or self._lost

    def wait(self, step: int, seconds: float) -> None:
        """Returns once ``has(step)``. After this many seconds, leaves out the missing ranks. Any thread."""
        with self._changed:
            self._waiting += 1
            self._wake.set()
            arrived = self._changed.wait_for(lambda: self.has(step), seconds)
            self._waiting -= 1
            if arrived:
                return
            missing = [rank for rank, through in self._through.items() if through <= step]
            self._complete = step + 1
            if missing:  # rather than none, whose values came at the last moment
                first = min(self._through[rank] for rank in missing)
                say(
                    f"{_ranks(missing)} did not send the values of run.log(reduce=...) for steps {first} to {step} "
                    f"within {seconds:g} s, so they are reduced over the other ranks"
                )

    def combined(self, step: int, own: Mapping[str, Any], reduced: Mapping[str, str]) -> dict[str, Any]:
        """The values of a step: rank 0's ``own``, and over all ranks those in ``reduced``."""
        with self._changed:
            others = self._values.pop(step, {})
            self._taken = max(self._taken, step)
        values = dict(own)
        for name in [*reduced, *(name for name in others if name not in reduced)]:
            found = dict(sorted(others.get(name, {}).items()))
            if name in reduced:
                found = {0: (reduced[name], float(own[name])), **found}
            if len(found) < self._world_size:
                self._say_missing(name, step, found)
            if name in reduced or name not in own:
                how = next(iter(found.values()))[0]
                values[name] = reduce_values(how, [value for _, value in found.values()])
        return values

    def close(self) -> None:
        """Ends the thread, in bounded time."""
        self._ending = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._store.set(_WANTED, "")
            while not self._ending:
                if self._collect():
                    with self._changed:
                        self._changed.notify_all()
                    self._on_news()
                self._wake.wait(HURRY_S if self._waiting else period_s(self._world_size, self.period_s))
                self._wake.clear()
        except RuntimeError as error:
            say(f"run.log(reduce=...) logs only rank 0's values, because the store is unreachable ({error})")
        finally:
            with self._changed:
                self._lost = True
                self._changed.notify_all()

    def _collect(self) -> bool:
        """Takes the chunks that have arrived. Returns whether that completed a step."""
        before = self._complete
        while self._awaited:
            step = self._awaited[0]
            behind = [rank for rank, through in self._through.items() if through <= step]
            if not behind or step < self._complete:
                self._awaited.popleft()
                self._complete = max(self._complete, step + 1)
            elif arrived := self._arrived(behind):
                keys = [_key(rank, self._next[rank]) for rank in arrived]
                self._merge(arrived, self._store.multi_get(keys))
                for key in keys:
                    self._store.delete_key(key)
            else:
                break
        return self._complete > before

    def _arrived(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those whose next chunk is there: none before all are, except while a caller waits, which may time out."""
        if self._store.check([_key(rank, self._next[rank]) for rank in ranks]):
            return ranks
        if not self._waiting or len(ranks) == 1 or time.monotonic() < self._next_search:
            return []
        self._next_search = time.monotonic() + self.period_s
        return self._search(ranks)

    def _search(self, ranks: Sequence[int]) -> list[int]:
        """The same if some are missing, by bisection, so that few messages find a few missing ranks."""
        halves = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
        found = list[int]()
        for half in halves:
            if self._store.check([_key(rank, self._next[rank]) for rank in half]):
                found += half
            elif len(half) > 1:
                found += self._search(half)
        return found

    def _merge(self, ranks: Sequence[int], chunks: Sequence[bytes]) -> None:
        with self._changed:
            for rank, chunk in zip(ranks, chunks, strict=True):
                rows, through = decoded(chunk)
                for step, row in rows:
                    for name, value in row.items():
                        self._values.setdefault(step, {}).setdefault(name, {})[rank] = value
                self._next[rank] += 1
                self._through[rank] = max(self._through[rank], through)
            stale = [self._values.pop(step) for step in list(self._values) if step <= self._taken]
        for name in {name for values in stale for name in values} - self._said:
            self._said.add(name)
            say(
                f"rank 0 logged {name} without reduce= in some steps, and other ranks with it. Those steps keep rank "
                "0's value. Use the same call on every rank"
            )

    def _say_missing(self, name: str, step: int, found: Iterable[int]) -> None:
        if name in self._said:
            return
        self._said.add(name)
        missing = sorted({*range(self._world_size)} - {*found})
        say(
            f"{_ranks(missing)} of {counted(self._world_size, 'rank')} did not call run.log({name}=..., reduce=...) in "
            f"step {step}, so the value is reduced over the other ranks. Make this call on every rank"
        )


def period_s(world_size: int, shortest_s: float = PERIOD_S) -> float:
    """The seconds between two chunks of a rank."""
    return max(shortest_s, min(_LONGEST_PERIOD_S, world_size / _MOST_PER_S))


def reduce_values(how: str, values: Sequence[float]) -> float:
    """One value of the ranks' values, in their order. NaN if any is NaN. The sum is exactly rounded."""
    if how in ("min", "max"):
        return math.nan if any(map(math.isnan, values)) else (min if how == "min" else max)(values)
    try:
        total = math.fsum(values)
    except (OverflowError, ValueError):  # above 1.8e308 in between, or both infinities
        total = sum(values)
    return total / len(values) if how == "mean" else total


def encoded(rows: Sequence[Row], through: int) -> list[str]:
    """The rows as chunks. Each has its columns by how they are reduced and their name, and the step up to which the
    rank has logged."""
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for step, row in rows:
        for name, (how, value) in row.items():
            steps, values = columns.setdefault(f"{how} {name}", ([], []))
            steps.append(step)
            values.append(value)
    text = json.dumps({"through": through, "columns": columns})
    if len(rows) <= 1 or (len(rows) <= _STEPS and len(text) <= _BYTES):
        return [text]
    half = len(rows) // 2
    return encoded(rows[:half], rows[half][0]) + encoded(rows[half:], through)


def decoded(chunk: bytes) -> tuple[list[Row], int]:
    """The rows of a chunk, and the step up to which the rank has logged."""
    content = json.loads(chunk)
    rows: dict[int, dict[str, tuple[str, float]]] = {}
    for column, (steps, values) in content["columns"].items():
        how, _, name = column.partition(" ")
        for step, value in zip(steps, values, strict=True):
            rows.setdefault(step, {})[name] = (how, value)
    return sorted(rows.items()), content["through"]


def _row(logged: Logged) -> dict[str, tuple[str, float]]:
    return {name: (logged.reduced[name], float(value)) for name, value in logged.numbers().items()}


def _key(rank: int, number: int) -> str:
    return f"log/{rank}/{number}"


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + ("" if len(ranks) <= 8 else f" and {counted(len(ranks) - 8, 'other')}")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
