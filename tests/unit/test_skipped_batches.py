"""Which batch each step takes once batches were skipped: on any number of ranks, and by another library's loader."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterddp import orders
from clusterddp.data.external_loader import ExternalLoader, NoLoader
from clusterddp.data.loader import Loader
from clusterddp.data.training_loader import TrainingLoader
from clusterddp.training.loop import Run
from tests.letters import Letters

LENGTH, GLOBAL_BATCH = 10, 4


def loader(rank: int = 0, ranks: int = 1) -> TrainingLoader:
    batch = GLOBAL_BATCH // ranks
    samples: Any = list(range(LENGTH))
    source = Loader(samples, batch, order=orders.shuffled(), seed=3, rank=rank, world_size=ranks, collate_fn=list)
    return TrainingLoader(source)


def taken(loaders: list[TrainingLoader], step: int, count: int) -> list[list[int]]:
    """The global batches of the next steps, sorted."""
    streams = [one.batches(step, lambda: None) for one in loaders]
    batches = [sorted(itertools.chain.from_iterable(next(stream) for stream in streams)) for _ in range(count)]
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    return batches


STREAM = taken([loader()], 0, 60)


@settings(max_examples=40, deadline=None)
@given(
    skips=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=3),
    stop=st.integers(0, 15),
    ranks=st.sampled_from([1, 2, 4]),
)
def test_a_skip_moves_the_position_and_a_resume_keeps_it(skips: list[tuple[int, int]], stop: int, ranks: int) -> None:
    """The run skips between steps, is stopped, and continues on another number of ranks."""
    skips = sorted(skips)
    first = loader()
    stream = first.batches(0, lambda: None)
    batches = []
    for step in range(stop):
        for at, count in skips:
            if at == step:
                first.skip(step, count)
        batches.append(sorted(next(stream)))
    stream.close()  # type: ignore[attr-defined]
    made = [skip for skip in skips if skip[0] < stop]
    progress = first.progress(stop)
    assert progress["samples"] == (stop + sum(count for _, count in made)) * GLOBAL_BATCH
    resumed = [loader(rank, ranks) for rank in range(ranks)]
    for one in resumed:
        one.restore(progress)
    batches += taken(resumed, stop, 5)
    moved = [step + sum(count for at, count in made if at <= step) for step in range(stop + 5)]
    assert batches == [STREAM[number] for number in moved]
    assert [first.epoch(step) for step in range(stop)] == [moved[step] * GLOBAL_BATCH // LENGTH for step in range(stop)]


def test_an_evaluation_is_due_after_each_epoch_that_ended_also_within_a_skip() -> None:
    """An epoch has two and a half steps."""
    whole = loader()
    assert [step for step in range(12) if whole.epochs_before(step, 1)] == [3, 5, 8, 10]
    assert [step for step in range(12) if whole.epochs_before(step, 2)] == [5, 10]
    whole.skip(4, 6)  # step 4 takes batch 10, the first of epoch 4
    assert [step for step in range(8) if whole.epochs_before(step, 1)] == [3, 4, 7]
    assert [step for step in range(8) if whole.epochs_before(step, 2)] == [4]


class Group:
    rank, world_size, control_device = 0, 1, torch.device("cpu")


def external(progress: dict[str, Any] | None = None) -> TrainingLoader:
    made = TrainingLoader(ExternalLoader(Letters(), Group()))  # type: ignore[arg-type]
    if progress is not None:
        made.restore(progress)
    return made


def state_of(one: TrainingLoader, step: int) -> dict[str, Any]:
    one.gather()
    return one.progress(step)


class Stop(Exception):
    pass


def test_another_librarys_loader_hands_out_what_is_skipped_and_can_be_stopped_meanwhile() -> None:
    """The next attempt drops the rest."""
    first = external()
    stream = first.batches(0, lambda: None)
    assert [next(stream) for _ in range(3)] == ["a", "b", "c"]
    first.skip(3, 4)
    calls = itertools.count()

    def stop_at_the_third() -> None:
        if next(calls) == 2:
            raise Stop

    stopped = external(state_of(first, 3))
    with pytest.raises(Stop):
        next(stopped.batches(3, stop_at_the_third))
    resumed = external(state_of(stopped, 3))
    after = resumed.batches(3, lambda: None)
    assert next(after) == next(stream) == "c"
    assert [next(after), next(after), next(after), next(after)] == ["d", "e", "a", "b"]
    again = external(state_of(resumed, 8))
    assert next(again.batches(8, lambda: None)) == "c"


def test_the_first_batch_of_another_librarys_pass_is_the_place_for_an_evaluation() -> None:
    """Also if the run was stopped just before it."""
    first = external()
    stream = first.batches(0, lambda: None)
    due = []
    for step in range(5):
        next(stream)
        due.append(first.epochs_before(step, 1))
    assert due == [False] * 5
    resumed = external(state_of(first, 5))
    for one, after in ((first, stream), (resumed, resumed.batches(5, lambda: None))):
        assert next(after) == "a"
        assert one.epochs_before(5, 1)
        next(after)
        assert not one.epochs_before(6, 1)


@pytest.mark.parametrize("batches", [0, -1, True, 2.0, 10**10, "5"])
def test_only_a_number_of_batches_can_be_skipped(batches: Any) -> None:
    assert "expected a number of steps from 1 to 1,000,000,000, got" in (loader().why_not_skip(batches) or "")
    assert loader().why_not_skip(5) is None
    assert TrainingLoader(NoLoader()).why_not_skip(5) == "the run has no loader whose batches could be skipped"


def test_a_skip_of_more_than_an_epoch_is_reported_with_the_epochs_length() -> None:
    """It is done all the same."""
    told: list[dict[str, Any]] = []
    run = Run.__new__(Run)
    run._loader = loader()
    run._report = lambda _, **values: told.append(values)  # type: ignore[method-assign]
    for batches in (3, 4):
        run._skip(2, batches)
    assert [values.get("epoch_steps") for values in told] == [None, 3]
    assert run._loader.batch(2) == 2 + 3 + 4
