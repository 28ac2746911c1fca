"""Seeds as functions of the run's position, so that no generator's state has to be saved."""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

#: The number of steps whose seeds are made at once. In a step's cold caches, one takes as long as ten more.
_AT_ONCE = 64


def hash32(*parts: int | str) -> int:
    """A well-mixed 32-bit seed from numbers and names, because torch's CPU generator uses only a seed's low 32 bits."""
    return hash_of(repr(parts))


def hash_of(text: str) -> int:
    """``hash32`` of parts whose ``repr`` is ``text``."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def step_seeds(seed: int, rank: int, step: int) -> Iterator[int]:
    """A rank's seeds for each step of a run from ``step`` on, without end."""
    for first in itertools.count(step, _AT_ONCE):
        yield from [hash32("step", seed, number, rank) for number in range(first, first + _AT_ONCE)]


def gpu_generators() -> Sequence[torch.Generator]:
    """Those of all GPUs that this process sees. None before it has used CUDA, and in a forked worker."""
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]


def seed_all(seed: int) -> None:
    """Seeds torch (the CPU, and GPUs if CUDA is in use), ``random``, and numpy if imported, with a 32-bit seed.

    Takes a few microseconds. ``torch.manual_seed`` takes 69 us, because it seeds every kind of device.
    """
    torch.default_generator.manual_seed(seed)
    for generator in gpu_generators():
        generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


#: The states of torch's CPU generator, ``random``, numpy's generator if numpy is imported, and ``gpu_generators``.
States = tuple[torch.Tensor, Any, Any, list[torch.Tensor]]


def states() -> States:
    """The states of the global generators."""
    numpy = sys.modules.get("numpy")
    numbers = numpy.random.get_state(legacy=False) if numpy else None
    return torch.get_rng_state(), random.getstate(), numbers, [one.get_state() for one in gpu_generators()]


def equal(one: States, other: States) -> bool:
    """Whether two ``states`` are the same, so that nothing was drawn in between."""
    if not torch.equal(one[0], other[0]) or one[1] != other[1] or (one[2] is None) != (other[2] is None):
        return False
    if not all(map(torch.equal, one[3], other[3])):
        return False
    mine, others = (states[2] and states[2]["state"] for states in (one, other))
    return mine is None or bool(mine["pos"] == others["pos"] and (mine["key"] == others["key"]).all())


def set_states(of: States) -> None:
    """The inverse of ``states``."""
    cpu, plain, numbers, gpus = of
    torch.set_rng_state(cpu)
    random.setstate(plain)
    if numbers is not None:
        sys.modules["numpy"].random.set_state(numbers)
    for generator, state in zip(gpu_generators(), gpus, strict=False):  # CUDA may have come into use since
        generator.set_state(state)


@contextmanager
def preserved() -> Iterator[States]:
    """Yields the current ``states``, and restores them at the end."""
    before = states()
    try:
        yield before
    finally:
        set_states(before)
