"""A resumed run may change the weights of a mixture in steps to come: all samples before stay as they were."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from clusterddp import orders
from clusterddp.data import mixture
from clusterddp.data.loader import Loader
from clusterddp.errors import CheckpointError

DATA = {name: TensorDataset(torch.zeros(length)) for name, length in (("web", 70), ("books", 9))}
WEIGHTS = st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(any)
CHANGES = st.dictionaries(st.integers(1, 12), WEIGHTS, max_size=3)


def loader(weights: Any = (3, 1), batch_size: int = 10, data: Any = None, **options: Any) -> Loader:
    order = orders.mixture(weights, **options)
    return Loader(data or DATA, batch_size, order=order, seed=1, rank=0, world_size=1)


def resumed(one: Loader, other: Loader, step: int) -> str | None:
    """Why the second cannot continue the first; None if it can."""
    try:
        other.restore(one.progress(step))
    except CheckpointError as error:
        return str(error)
    return None


def samples(of: Loader, start: int, stop: int) -> list[Any]:
    return of._stream.samples(start, stop)


def first_change(one: dict[int, Any], other: dict[int, Any]) -> int:
    """The first step with another change, or 14 if there is none in the test's steps."""
    shares = [
        {step: mixture._shares(weights, (0, 1)).tolist() for step, weights in changes.items()}
        for changes in (one, other)
    ]
    return min([step for step in {*one, *other} if shares[0].get(step) != shares[1].get(step)], default=14)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(WEIGHTS, st.lists(CHANGES, min_size=3, max_size=3), st.integers(0, 13), st.sampled_from([(60, 7), (20, 4)]))
def test_changes_are_accepted_that_leave_all_samples_before_them_as_they_were(
    weights: Any, given_changes: list[Any], step: int, sizes: tuple[int, int]
) -> None:
    """Twice in a run, also within small rounds and blocks; every sample still comes once per pass."""
    with mock.patch.multiple(mixture, _ROUND=sizes[0], _BLOCK=sizes[1]):
        run = loader(weights, changes=given_changes[0])
        for at, before, now in ((step, *given_changes[:2]), (step + 1, *given_changes[1:])):
            other, change = loader(weights, changes=now), first_change(before, now)
            why = resumed(run, other, at)
            if change < at:
                assert why is not None and f"of step {change} differ" in why
                return
            assert why is None
            assert samples(other, 0, 10 * change) == samples(run, 0, 10 * change)
            again = loader(weights, changes=now)
            assert resumed(other, again, at) is None and again.order_changed is None
            assert samples(again, 0, 140) == samples(other, 0, 140)
            run = other
        drawn = samples(run, 0, 400)
        assert len(set(drawn)) == len(drawn)
        for number in {number for number, _ in drawn[:-80]}:
            for first, length in ((0, 70), (70, 9)):
                of = sorted(
                    index - first for when, index in drawn if when == number and first <= index < first + length
                )
                later = any(when > number for when, index in drawn if first <= index < first + length)
                assert not later or of == list(range(length))


@pytest.mark.parametrize(
    ("before", "now", "was_and_now"),
    [
        ({}, {8: [1, 1]}, ("web 75%, books 25%", "web 75%, books 25%; from step 8 on web 50%, books 50%")),
        ({20: [1, 1]}, {}, ("web 75%, books 25%; from step 20 on web 50%, books 50%", "web 75%, books 25%")),
        ({5: [1, 0]}, {5: [0, 1]}, ("web 100%, books 0%", "web 0%, books 100%")),
    ],
)
def test_later_changes_are_accepted_and_named(before: Any, now: Any, was_and_now: tuple[str, str]) -> None:
    run, other = loader(changes=before), loader(changes=now)
    assert resumed(run, other, 5) is None
    assert other.order_changed == dict(zip(("was", "now"), was_and_now, strict=True))
    same = loader(changes=before)
    assert resumed(run, same, 5) is None and same.order_changed is None


def test_the_shares_after_a_change_are_the_new_ones() -> None:
    other = loader(changes={600: [0, 1]})
    assert resumed(loader(changes={1000: [1, 1]}), other, 500) is None
    assert {index < 70 for _, index in samples(other, 6000, 20_000)} == {False}
    assert sum(index < 70 for _, index in samples(other, 0, 6000)) == pytest.approx(4500, abs=40)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"changes": {4: [1, 1]}},
            "Weights may change only from step 5 on, where the run resumes, but the weights of step 4",
        ),
        ({"weights": [1, 1]}, "the weights of step 0 differ. Keep earlier weights and changes as they were, or start"),
        ({"shuffle": False}, "Use the same datasets, num_samples, drop_last and shuffle"),
        ({"num_samples": 3}, "Use the same datasets, num_samples, drop_last and shuffle"),
        (
            {"data": {"books": TensorDataset(torch.zeros(8)), "web": TensorDataset(torch.zeros(71))}},
            "the same datasets",
        ),
    ],
)
def test_a_change_of_the_past_or_of_the_datasets_is_refused(options: dict[str, Any], why: str) -> None:
    assert why in str(resumed(loader(), loader(**options), 5))


def test_a_checkpoint_of_an_older_version_accepts_no_change() -> None:
    progress = {name: value for name, value in loader().progress(5).items() if name != "schedule"}
    with pytest.raises(CheckpointError, match="Use the same order and weights, or start a new run"):
        loader(changes={9: [1, 1]}).restore(progress)
    loader().restore(progress)
