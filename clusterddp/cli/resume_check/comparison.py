"""Pure: where two trials of the same steps first differ, and what that says of the script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from clusterddp.rundir.step_records import Digests, States, StepRecord, Trial

_Value = TypeVar("_Value")
#: The most differences that are named as a possible cause.
_MOST_CAUSES = 6
#: What can differ in a step, in the order in which a step has it. ``others``: see ``States``.
RESTORED, BATCH, LOGGED, STATE, STEPS, OTHERS = "restored", "batch", "logged", "state", "steps", "others"
_ORDER = (RESTORED, BATCH, STEPS, LOGGED, STATE, OTHERS)
ALL = frozenset(_ORDER) - {OTHERS}


@dataclass(frozen=True)
class Difference:
    """The first difference between two trials.

    ``names``: what differs there, the entries of the batch, the logged values or the parts of the state.
    ``was`` and ``now``: of the first of them, in the trial without a resume and in the other.
    ``batch_of``: the step that had the same batch without a resume.
    """

    step: int
    kind: str
    rank: int
    names: tuple[str, ...] = ()
    was: str = ""
    now: str = ""
    batch_of: int | None = None

    @property
    def place(self) -> tuple[int, int, int]:
        """Earlier differences have a smaller one."""
        return self.step, _ORDER.index(self.kind), self.rank


def first_difference(expected: Trial, found: Trial, kinds: frozenset[str] = ALL) -> Difference | None:
    """Where ``found`` first differs from ``expected``; None: nowhere. ``kinds``: of which differences."""
    differences = [
        difference
        for rank in sorted(expected.keys() | found.keys())
        for difference in _of_rank(expected.get(rank, []), found.get(rank, []), rank)
        if difference.kind in kinds
    ]
    return min(differences, key=lambda difference: difference.place, default=None)


def _of_rank(expected: Sequence[StepRecord], found: Sequence[StepRecord], rank: int) -> Iterator[Difference]:
    """The differences of one rank's steps, a few at least: all that is in the first step that differs."""
    by_step = {record.step: record for record in expected}
    for record in found:
        if (same := by_step.get(record.step)) is None:
            yield Difference(record.step, STEPS, rank)
            return
        differences = list(_of_step(same, record, by_step.get(record.step - 1), rank))
        if differences:
            batch = next((one.step for one in expected if one.batch == record.batch), None)
            yield from (replace(one, batch_of=batch) if one.kind == BATCH else one for one in differences)
            return
    if len(found) < len(expected):
        yield Difference(found[-1].step + 1 if found else 0, STEPS, rank)


def _of_step(expected: StepRecord, found: StepRecord, before: StepRecord | None, rank: int) -> Iterator[Difference]:
    """``before``: the step before it, without a resume."""
    if found.before is not None and (start := before.after if before else expected.before) is not None:
        yield from _compared(expected.step, RESTORED, rank, _parts(start), _parts(found.before))
    yield from _compared(expected.step, BATCH, rank, expected.batch, found.batch)
    yield from _compared(expected.step, LOGGED, rank, expected.logged, found.logged)
    yield from _compared(expected.step, STATE, rank, _parts(expected.after), _parts(found.after))


def _compared(step: int, kind: str, rank: int, was: Digests, now: Digests) -> Iterator[Difference]:
    if names := differing(was, now):
        first = names[0]
        yield Difference(step, kind, rank, tuple(names), was.get(first, "missing"), now.get(first, "missing"))


def differing(was: Digests, now: Digests) -> list[str]:
    """The names whose values differ, or that only one of them has; in the order of ``was``."""
    return [name for name in {**was, **now} if was.get(name) != now.get(name)]


def _parts(states: States) -> dict[str, str]:
    """The values in all parts by name, such as ``model.fc.weight``."""
    return {
        f"{part}.{name}" if name else part: value
        for part, values in states.parts.items()
        for name, value in values.items()
    }


def not_restored(expected: Trial, found: Trial) -> list[str]:
    """The objects that ``ctx.run()`` did not get and that still differ after the last step: a resume loses them.

    Those that the script makes afresh, such as an average over an epoch, are equal again after a while.
    """
    names: dict[str, None] = {}
    for rank in expected.keys() & found.keys():
        if expected[rank] and found[rank] and expected[rank][-1].step == found[rank][-1].step:
            was, now = expected[rank][-1].after.others, found[rank][-1].after.others
            names |= dict.fromkeys(name for name in was if name in now and was[name] != now[name])
    return list(names)


def causes(expected: Trial, again: Trial, found: Trial, difference: Difference) -> list[str]:
    """What else differs when the attempt that has the difference begins, and is the same without a resume.

    Objects that ``ctx.run()`` did not get, and the script's plain values with both contents.
    """
    begun = [record for record in found.get(difference.rank, []) if record.before and record.step <= difference.step]
    if not begun:
        return []
    start, (was, twice) = begun[-1], (_at(trial, difference.rank, begun[-1].step) for trial in (expected, again))
    before, before_twice = (_at(trial, difference.rank, start.step - 1) for trial in (expected, again))
    names: list[str] = []
    if before and before_twice and start.before:
        same = _common(before.after.others, before_twice.after.others)
        names = [name for name, value in same.items() if start.before.others.get(name, value) != value]
    if was and twice:
        same_values = _common(was.variables, twice.variables)
        names += [
            f"{name} ({start.variables[name]} instead of {value})" if "#" not in value else name
            for name, value in same_values.items()
            if start.variables.get(name, value) != value
        ]
    return names[:_MOST_CAUSES]


def unsteady(expected: Trial, again: Trial, difference: Difference) -> list[str]:
    """What differs between two runs without a resume in their first step, such as a generator without a seed."""
    one, other = (_at(trial, difference.rank, 0) for trial in (expected, again))
    if one is None or other is None:
        return []
    was, now = ({**record.variables, **(record.before.others if record.before else {})} for record in (one, other))
    return [name for name, value in was.items() if now.get(name, value) != value][:_MOST_CAUSES]


def _common(one: Mapping[str, _Value], other: Mapping[str, _Value]) -> dict[str, _Value]:
    """What both have with the same value."""
    return {name: value for name, value in one.items() if other.get(name) == value}


def _at(trial: Trial, rank: int, step: int) -> StepRecord | None:
    return next((record for record in trial.get(rank, []) if record.step == step), None)


def parts_of(trial: Trial) -> tuple[list[str], list[str]]:
    """The names of the parts and of the logged values that a trial has recorded."""
    parts: dict[str, None] = {}
    values: dict[str, None] = {}
    for record in (record for records in trial.values() for record in records):
        parts |= dict.fromkeys(record.after.parts)
        values |= dict.fromkeys(record.logged)
    return list(parts), list(values)


def epochs_of(trial: Trial) -> list[int | None]:
    """The epoch of each step."""
    return [record.epoch for record in trial.get(0, [])]
