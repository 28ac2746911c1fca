"""Pure: after which steps the run is interrupted, so that few resumes show as much as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

#: Two stops that are not at the same step, and a step before and after.
LEAST_STEPS = 3


def choose_stops(epochs: Sequence[int | None]) -> list[int]:
    """After how many steps to stop, given the epoch of each step of the uninterrupted run.

    Two stops are in one epoch, so that the second resume continues what the first one has begun, and the end of that
    epoch follows: in the second epoch if the steps reach its end, as what counts epochs starts at 0, too. Else in the
    first, with a third stop in the second. Without an end of an epoch that has a step between two stops, at thirds of
    the steps.
    """
    starts = [0, *ends_of_epochs(epochs)]
    complete = [(start, end) for start, end in pairwise(starts) if end - start >= LEAST_STEPS]
    if len(complete) > 1 or (complete and complete[0][0] > 0):
        return _thirds(*complete[-1])
    if complete:
        last = (complete[0][1] + len(epochs) + 1) // 2
        return [*_thirds(*complete[0]), *([last] if complete[0][1] < last < len(epochs) else [])]
    return _thirds(0, len(epochs))


def _thirds(start: int, end: int) -> list[int]:
    first = start + max(1, (end - start) // 3)
    return [first, min(end - 1, max(first + 1, start + 2 * (end - start) // 3))]


def ends_of_epochs(epochs: Sequence[int | None]) -> list[int]:
    """The steps that are the first of an epoch, but the very first."""
    return [step for step in range(1, len(epochs)) if epochs[step] != epochs[step - 1]]


def crossed(epochs: Sequence[int | None], stops: Sequence[int]) -> int:
    """How many ends of epochs follow a resume."""
    return sum(step > stops[0] for step in ends_of_epochs(epochs))


def enough_steps(epoch_steps: int) -> int:
    """The steps with which an epoch's end follows two resumes in it, and a third resume is in the next."""
    return epoch_steps + max(2, epoch_steps // 4)
