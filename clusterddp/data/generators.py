"""The global generators that a sample may draw from, one by one: seeded, or watched for draws.

Seeding all of them takes 8 us, of which ``random`` takes 5. To watch one takes less: it gets a fixed state, and later
either gives the number that follows, or something has drawn from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from clusterddp.data import randomness

#: Any constant: from it the fixed states are made.
_FIXED = randomness.hash32("unused")


class Generator(Protocol):
    """One of the three. ``watch`` gives it the fixed state."""

    @property
    def seed(self) -> Callable[[int], Any]: ...
    def watch(self) -> None: ...
    def drew(self) -> bool:
        """Whether anything was drawn since ``watch``; to be asked once."""


class _Torch:
    """The state is taken after a draw, which computes the next 624 numbers: copying them is faster than that."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(_FIXED)
        torch.rand((), generator=generator)
        self._state = generator.get_state()
        self._number = torch.empty((), dtype=torch.float64, device="cpu")
        self._next = self._number.uniform_(generator=generator).item()
        self.seed = torch.default_generator.manual_seed

    def watch(self) -> None:
        torch.default_generator.set_state(self._state)

    def drew(self) -> bool:
        return self._number.uniform_().item() != self._next


class _Python:
    """Of the module ``random``."""

    def __init__(self) -> None:
        generator = random.Random(_FIXED)
        generator.random()
        self._state, self._next = generator.getstate(), generator.random()
        self.seed = random.seed

    def watch(self) -> None:
        random.setstate(self._state)

    def drew(self) -> bool:
        return random.random() != self._next


class _Numpy:
    """Setting a state takes longer than seeding."""

    def __init__(self) -> None:
        self._next = np.random.RandomState(_FIXED).random_sample()
        self.seed = np.random.seed

    def watch(self) -> None:
        np.random.seed(_FIXED)

    def drew(self) -> bool:
        return bool(np.random.random() != self._next)


ALL: tuple[Generator, ...] = (_Torch(), _Python(), _Numpy())
