"""Seeds as functions of where the run is, so that no generator's state ever has to be saved."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def hash32(*parts: int | str) -> int:
    """A well mixed 32-bit seed from numbers and names: torch's CPU generator uses the low 32 bits of a seed alone."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seeds torch (the CPU, and ``device`` if it is a GPU), random, and numpy if it is in use, with 32 bits.

    ``torch.manual_seed`` would take 69 us, as it asks every kind of device; this takes a few.
    """
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


#: Of torch's CPU generator, random, and numpy if it is in use.
States = tuple[torch.Tensor, Any, Any]


def states() -> States:
    """The states of the global generators."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False) if numpy else None


def equal(one: States, other: States) -> bool:
    """Whether two of the ``states`` are the same: nothing was drawn in between."""
    if not torch.equal(one[0], other[0]) or one[1] != other[1] or (one[2] is None) != (other[2] is None):
        return False
    mine, others = (states[2] and states[2]["state"] for states in (one, other))
    return mine is None or bool(mine["pos"] == others["pos"] and (mine["key"] == others["key"]).all())


@contextmanager
def preserved() -> Iterator[States]:
    """Puts back the ``states`` at the end, which it yields."""
    cpu, plain, numbers = before = states()
    try:
        yield before
    finally:
        torch.set_rng_state(cpu)
        random.setstate(plain)
        if numbers is not None:
            sys.modules["numpy"].random.set_state(numbers)
