"""``submit --check-resume``: where it interrupts a run, what it compares, what it says; without processes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from clusterddp.cli.options import add_arguments, check_combinations
from clusterddp.errors import NotRepeatable, ResumeDiffers, UsageError
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.step_records import STOP_REASON, Recording, States, StepRecord, Trial, read_trial
from clusterddp.runs import resume_check
from clusterddp.runs.resume_check import (
    BATCH,
    LOGGED,
    RESTORED,
    STATE,
    STEPS,
    choose_stops,
    crossed,
    enough_steps,
    first_difference,
    stopped_by_others,
)
from clusterddp.training import script_objects
from clusterddp.training.script_objects import _summed, of_batch, of_part, of_value
from tests.histories import happened
from tests.wording import raises

# --- where a run is interrupted


def epochs(steps: int, length: int) -> list[int | None]:
    return [step // length for step in range(steps)]


@pytest.mark.parametrize(
    ("of_steps", "stops", "ends"),
    [
        (epochs(3, 100), [1, 2], 0),
        (epochs(12, 100), [4, 8], 0),
        ([None] * 12, [4, 8], 0),
        (epochs(12, 9), [3, 6, 11], 1),
        (epochs(10, 9), [3, 6], 1),
        (epochs(12, 5), [6, 8], 1),
        (epochs(24, 9), [12, 15], 1),
        (epochs(12, 2), [4, 8], 3),
    ],
)
def test_two_stops_are_in_one_epoch_whose_end_follows(of_steps: list[int | None], stops: list[int], ends: int) -> None:
    """If the steps suffice, in an epoch that is not the first."""
    assert choose_stops(of_steps) == stops
    assert crossed(of_steps, stops) == ends


def test_stops_are_steps_of_the_run_in_order() -> None:
    for steps, length in itertools.product(range(3, 40), range(1, 30)):
        stops = choose_stops(epochs(steps, length))
        assert stops == sorted(set(stops)) and len(stops) in (2, 3), (steps, length)
        assert stops[0] > 0 and stops[-1] < steps, (steps, length)


def test_the_steps_that_are_proposed_cross_an_epochs_end() -> None:
    for length in range(3, 60):
        of_steps = epochs(enough_steps(length), length)
        assert crossed(of_steps, choose_stops(of_steps)) == 1, length


# --- what differs


def record(step: int, **values: Any) -> StepRecord:
    states = States({"model": {"weight": f"#{step + 1}"}}, {"ema": {"n": str(step + 1)}})
    made = StepRecord(step, step // 4, 4, {"[0]": f"#b{step}"}, {"count": str(step)}, {"loss": f"0.{step}"}, states)
    return replace(made, **values)


def trial(steps: int, starts: Sequence[int] = (0,), ranks: int = 2) -> dict[int, list[StepRecord]]:
    befores = {step: States({"model": {"weight": f"#{step}"}}, {"ema": {"n": str(step)}}) for step in starts}
    return {rank: [record(step, before=befores.get(step)) for step in range(steps)] for rank in range(ranks)}


def check(resumed: Trial, again: Trial | None = None) -> resume_check.Check:
    return resume_check.Check(trial(8), resumed, (3, 5), trial(8) if again is None else again)


def test_equal_trials_have_no_difference() -> None:
    made = check(trial(8, (0, 3, 5)))
    assert not made.differs
    assert resume_check.success(made) == (
        "no difference in 8 steps, across an epoch's end and two resumes (after 3 and 5 steps). Compared "
        "batches, loss and the state of model, on 2 ranks"
    )


def test_an_epochs_end_that_was_not_crossed_is_said_with_the_steps_to_cross_it() -> None:
    uncrossed = {0: trial(3, ranks=1)[0]}
    said = resume_check.success(resume_check.Check(uncrossed, uncrossed, (1, 2)))
    assert said.startswith("no difference in 3 steps and two resumes (after 1 and 2 steps). Compared ")
    assert said.endswith("No epoch ended, because an epoch has 4 steps. To cross its end, use --check-resume 6")


CHANGES: list[tuple[int, dict[str, Any], str, str]] = [
    (
        5,
        {"batch": {"[0]": "#b0"}},
        BATCH,
        "the batch in step 5 on rank 1 differed in [0] (it was the batch of step 0)",
    ),
    (5, {"logged": {"loss": "nan"}}, LOGGED, "the logged loss in step 5 on rank 1 differed (nan instead of 0.5)"),
    (5, {"logged": {}}, LOGGED, "the logged loss in step 5 on rank 1 differed (missing instead of 0.5)"),
    (
        6,
        {"after": States({"model": {"weight": "#x"}})},
        STATE,
        "after the second resume (from step 5): the state of model.weight differed after step 6 on rank 1",
    ),
    (
        3,
        {"before": States({"model": {"weight": "#x"}})},
        RESTORED,
        "after the first resume (from step 3): the state of model.weight was not restored before step 3 on rank 1",
    ),
]


@pytest.mark.parametrize(("step", "changed", "kind", "words"), CHANGES, ids=[words[:30] for *_, words in CHANGES])
def test_the_first_difference_is_named_with_its_rank(step: int, changed: dict[str, Any], kind: str, words: str) -> None:
    resumed = trial(8, (0, 3, 5))
    resumed[1][step] = replace(resumed[1][step], **changed)
    resumed[1][7] = replace(resumed[1][7], batch={"[0]": "#later"})
    difference = first_difference(trial(8), resumed)
    assert difference and (difference.step, difference.rank, difference.kind) == (step, 1, kind)
    error = resume_check.failure(check(resumed))
    assert (type(error), error.exit_code) == (ResumeDiffers, 3)
    assert words in str(error)


def test_a_run_that_ends_earlier_or_later_differs() -> None:
    for steps, step in ((6, 6), (9, 8)):
        difference = first_difference(trial(8), trial(steps, (0, 3, 5)))
        assert difference and (difference.kind, difference.step) == (STEPS, step)


def test_a_run_that_differs_without_a_resume_is_not_the_fault_of_the_resume() -> None:
    """If that difference comes first; a later one does not hide that of the resume."""
    resumed, early, late = trial(8, (0, 3, 5)), trial(8), trial(8)
    resumed[0][4] = replace(resumed[0][4], logged={"loss": "1"})
    early[1][2] = replace(early[1][2], logged={"loss": "2"})
    late[1][6] = replace(late[1][6], logged={"loss": "2"})
    error = resume_check.failure(check(resumed, early))
    assert (type(error), error.exit_code) == (NotRepeatable, 4)
    assert "When it ran again, the logged loss in step 2 on rank 1 differed (2 instead of 0.2)" in str(error)
    assert "The batches of the resumed run were the same in all steps" in str(error)
    assert type(resume_check.failure(check(resumed, late))) is ResumeDiffers


def test_an_object_that_run_did_not_get_counts_if_it_still_differs_at_the_end() -> None:
    resumed = trial(8, (0, 3, 5))
    resumed[0][3] = replace(resumed[0][3], after=replace(resumed[0][3].after, others={"ema": {"n": "0"}}))
    assert not check(resumed).differs
    lost = {rank: [*steps[:-1], replace(steps[-1], after=replace(steps[-1].after, others={"ema": {"n": "3"}}))]
            for rank, steps in resumed.items()}  # fmt: skip
    assert str(resume_check.failure(check(lost))).startswith(
        "a resume loses the state of ema, which ctx.run() did not receive. Pass it to ctx.run(), as in "
        "ctx.run(ema=ema, ...)"
    )
    again = {rank: [replace(one, before=None) for one in steps] for rank, steps in lost.items()}
    assert type(resume_check.failure(check(lost, again))) is NotRepeatable


def test_what_also_differs_when_the_attempt_begins_is_named_with_both_values() -> None:
    resumed = trial(8, (0, 3, 5))
    resumed[0][5] = replace(resumed[0][5], variables={"count": "0"}, logged={"loss": "9"})
    assert "When this attempt began, these also differed: count (0 instead of 5)" in str(
        resume_check.failure(check(resumed))
    )


# --- digests


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        ([torch.tensor([1.0, 2.0]), "a"], [torch.tensor([1.0, 2.0]), "b"]),
        (numpy.array([1, 2]), numpy.array([1, 2], dtype=numpy.int32)),
        ({"a": [1, 2]}, {"a": [12]}),
        (["ab", "c"], ["a", "bc"]),
        ("x" * 99, "x" * 98 + "y"),
        (argparse.Namespace(a=[1]), argparse.Namespace(a=[2])),
    ],
)
def test_contents_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert of_value(one) != of_value(other)


def test_equal_contents_have_equal_digests() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    assert of_value(values) == of_value(values.t().contiguous().t())
    assert of_value({"b", "a"}) == of_value({"a", "b"})
    assert of_value(torch.tensor(0.1, dtype=torch.float64)) == of_value(0.1) == "0.1"
    assert of_value(argparse.Namespace(a=values)) == of_value(argparse.Namespace(a=values.clone()))


@pytest.mark.parametrize("size", [3, 8, 20])
def test_a_sum_in_place_of_a_hash_tells_tensors_apart_by_each_element(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for tensors of a GPU, in pieces of 8 elements."""
    monkeypatch.setattr(script_objects, "_SUMMED", 8)
    values = torch.arange(size) + 2**62
    sums = {_summed(values)} | {_summed(torch.where(torch.arange(size) == n, 0, values)) for n in range(size)}
    swapped = torch.cat((values[-1:], values[1:-1], values[:1]))
    assert len(sums | {_summed(swapped)}) == size + 2
    assert _summed(values.clone()) == _summed(values)


def test_batches_and_states_have_a_digest_for_each_entry() -> None:
    assert list(of_batch((torch.ones(2), [1]))) == ["[0]", "[1]"]
    assert list(of_batch({"text": ["a"], "label": 1})) == ["['text']", "['label']"]
    assert list(of_batch(torch.ones(2))) == [""]
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.5, momentum=0.9)
    found = of_part(optimizer)
    assert found["param_groups[0].lr"] == "0.5"
    assert list(of_part(torch.nn.Linear(2, 1)))[:2] == ["weight", "bias"]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    recording = Recording.parse(str(Recording(3, tmp_path / "a:b")))
    assert recording == Recording(3, tmp_path / "a:b")
    written = trial(3, (0, 2))
    for rank, records in written.items():
        Recording(3, tmp_path).file(rank).write_text("".join(one.to_line() for one in records))
    assert read_trial(tmp_path) == written


# --- the option


@pytest.mark.parametrize(
    "words",
    [
        ["--check-resume", "2", "--local"],
        ["--check-resume", "9", "--local", "--preempt-after", "3"],
        ["--check-resume", "9", "--local", "--sweep", "seed=0..2"],
        ["--check-resume", "9", "--local", "--dry-run"],
        ["--check-resume", "9", "--local", "--wait"],
        ["--check-resume", "9"],
        ["--check-resume", "9", "--here"],
    ],
)
def test_options_that_make_no_sense_are_refused(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with raises(UsageError):
        check_combinations(parser.parse_args(["train.py", *words]))


# --- a stop that the check did not want


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([(0, "stopping", STOP_REASON), (0, "stopped", "stopped by a signal")], ""),
        ([(0, "stopping", "SIGTERM"), (0, "stopped", "preempted")], "preempted"),
        ([(0, "stopping", STOP_REASON), (0, "stopped", ""), (1, "stopped", "preempted")], "preempted"),
        ([(0, "stopping", STOP_REASON), (1, "stopping", "SIGTERM")], "it was stopped before its first step"),
    ],
)
def test_a_stop_is_the_checks_only_if_its_ranks_say_so(
    tmp_path: Path, events: Sequence[tuple[int, str, str]], why: str
) -> None:
    """Of the newest attempt."""
    run = RunDirectory(tmp_path)
    run.create()
    for attempt, event, reason in events:
        (run.logs / f"attempt-{attempt}").mkdir(exist_ok=True)
        happened(run, {"time": 1.0, "attempt": attempt, "event": event, "reason": reason})
    assert stopped_by_others(run) == why
