"""A loader with a state, that clusterddp did not make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Letters:
    """Five batches per pass, and a state."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[str]:
        while self.place < 5:
            self.place += 1
            yield "abcde"[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
