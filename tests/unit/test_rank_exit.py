"""How the script left its training loop: by a statement, or by an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import pytest

from clusterddp.worker.rank_exit import Loop

Around = Callable[[Iterable[int]], Iterable[int]]


def steps(loop: Loop) -> Iterator[int]:
    """As ``run.steps()``."""
    try:
        yield from range(9)
    except GeneratorExit:
        loop.leave()
        raise


def wrapped(batches: Iterable[int]) -> Iterator[int]:
    """As tqdm."""
    for batch in batches:  # noqa: UP028
        yield batch


def leave_by_break(around: Around, loop: Loop) -> None:
    for step in around(steps(loop)):
        if step == 3:
            break


def leave_by_return(around: Around, loop: Loop) -> int:
    for step in around(steps(loop)):
        if step == 3:
            return step
    return 0


def leave_by_raise(around: Around, loop: Loop) -> None:
    for step in around(steps(loop)):
        if step == 3:
            raise ValueError("bad sample")


def leave_by_error_of_a_call(around: Around, loop: Loop) -> None:
    for step in around(steps(loop)):
        if step == 3:
            int("bad sample")


def leave_by_caught_error(around: Around, loop: Loop) -> None:
    try:
        for step in around(steps(loop)):
            print([][step])
    except IndexError:
        print("handled")


@pytest.mark.parametrize("around", [iter, wrapped])
@pytest.mark.parametrize(
    ("leave", "failed"),
    [
        (leave_by_break, False),
        (leave_by_return, False),
        (leave_by_raise, True),
        (leave_by_error_of_a_call, True),
        (leave_by_caught_error, True),
    ],
)
def test_a_loop_knows_whether_an_exception_ended_it(
    leave: Callable[[Around, Loop], object], failed: bool, around: Around
) -> None:
    loop = Loop(lambda: 0, 9)
    with suppress(ValueError):
        leave(around, loop)
    assert loop.left_at is not None
    assert loop.failed == failed
