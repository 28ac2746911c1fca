"""A store that counts the calls on it."""

from __future__ import annotations

import time
from collections import Counter

from torch._C._distributed_c10d import Store


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


def wait_for_watcher(watched: CountingStore) -> None:
    """Until the watcher is blocked in the one call that it makes while nobody wants to stop."""
    deadline = time.monotonic() + 10
    while not watched.calls:
        assert time.monotonic() < deadline, "the watcher did not begin to watch"
        time.sleep(0.001)
