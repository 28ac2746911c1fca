"""Compares a disturbed run with the undisturbed one: where each start continued, from which file, and what differs."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp.rehearsal.facts import Loaded, Logged, Renamed, SaveBegan, Saved, States, StepMade
from clusterddp.rehearsal.trial import Start, Trial, Undisturbed


class Result(enum.Enum):
    """How a run ended, compared with the undisturbed one."""

    SAME = "same"
    DIFFERS = "differs"
    UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds. ``number``: the steps that its save was made after. ``whole``: the save has ended.
    ``replaced``: it was written over a whole file of the same name."""

    file: str
    number: int
    whole: bool
    replaced: bool = False


def _shape(file: str) -> str:
    """A file's name with each number as ``#``."""
    return re.sub(r"\d+", "#", Path(file).name)


class Ledger:
    """Which file holds the save of which step, after all that happened so far.

    ``undisturbed``: names that it renamed, and that are gone at its end, are no checkpoints before they are renamed.
    """

    def __init__(self, undisturbed: Start) -> None:
        renamed = [one.source for rank in undisturbed.facts for one in undisturbed.renames(rank)]
        self._temporary = {_shape(file) for file in renamed if file not in undisturbed.files}
        self._holds: dict[str, Checkpoint] = {}
        #: The newest whole checkpoint that a script has deleted.
        self._deleted: Checkpoint | None = None

    def add(self, start: Start) -> None:
        """Takes over the saves and renames of rank 0, or of the lowest rank that saves."""
        for rank in sorted(start.facts):
            saves = start.of(SaveBegan, rank)
            if saves or rank == max(start.facts):
                self._add(start, rank)
                return

    def _add(self, start: Start, rank: int) -> None:
        for fact in start.facts[rank]:
            if isinstance(fact, SaveBegan):
                before = self._holds.get(fact.file)
                number = fact.number if fact.number is not None else fact.local
                self._holds[fact.file] = Checkpoint(fact.file, number, False, before is not None and before.whole)
            elif isinstance(fact, Saved) and not fact.error and (held := self._holds.get(fact.file)):
                self._holds[fact.file] = Checkpoint(held.file, held.number, True)
            elif isinstance(fact, Renamed):
                self._rename(fact)
        for file in [file for file in self._holds if file not in start.files]:
            held = self._holds.pop(file)
            if self._counts(held) and (self._deleted is None or held.number > self._deleted.number):
                self._deleted = held

    def _rename(self, fact: Renamed) -> None:
        """A file, or a folder with the files in it, gets another name."""
        for file, held in list(self._holds.items()):
            if file == fact.source or file.startswith(f"{fact.source}/"):
                target = fact.target + file.removeprefix(fact.source)
                self._holds[target] = Checkpoint(target, held.number, held.whole)

    def held(self, file: str) -> Checkpoint | None:
        """What a file holds, if this run has written it."""
        return self._holds.get(file)

    def newest(self) -> Checkpoint | None:
        """The whole one after the most steps. A file beside one of the same save that is not whole does not count."""
        torn = {(Path(one.file).parent, one.number) for one in self._holds.values() if not one.whole}
        whole = [one for one in self._holds.values() if self._counts(one)]
        whole = [one for one in whole if (Path(one.file).parent, one.number) not in torn]
        return max(whole, key=lambda one: one.number, default=None)

    def deleted(self) -> Checkpoint | None:
        """A whole checkpoint that a script has deleted, although none that is as new is left."""
        newest = self.newest()
        return self._deleted if self._deleted and (not newest or newest.number < self._deleted.number) else None

    def _counts(self, held: Checkpoint) -> bool:
        """Whether a start could continue from it. Copies of the best one do not count."""
        is_temporary = any(_shape(part) in self._temporary for part in Path(held.file).parts)
        return held.whole and not is_temporary and "best" not in Path(held.file).name


@dataclass(frozen=True)
class Resume:
    """How a start that follows another one continued.

    ``done``: the steps done before. ``at``: those that precede its first step, None if it made none, or its weights
    are unknown. ``loaded``: what it loaded last, before its first step. ``held``: what that file held. ``newest``: the
    newest whole checkpoint when it began. ``deleted``: a newer one that the script has deleted before. ``mixed``: a
    file that it loaded, and an older one that is always saved together with it.
    """

    index: int
    done: int
    at: int | None
    stepped: bool
    loaded: Loaded | None
    held: Checkpoint | None
    newest: Checkpoint | None
    deleted: Checkpoint | None = None
    mixed: tuple[Checkpoint, Checkpoint] | None = None

    @property
    def repeated(self) -> int | None:
        """The steps that it makes again."""
        return None if self.at is None else max(0, self.done - self.at)


def resumes(undisturbed: Start, trial: Trial) -> list[Resume]:
    """How each start but the first one continued."""
    ledger, found, done = Ledger(undisturbed), [], 0
    for index, start in enumerate(trial.starts):
        steps = start.steps()
        if index:
            loaded = _loaded(start, ledger)
            at = steps[0].number if steps else None
            held = ledger.held(loaded.file) if loaded else None
            mixed = _mixed(undisturbed, [one for load in start.loads() if (one := ledger.held(load.file))])
            found.append(Resume(index, done, at, bool(steps), loaded, held, ledger.newest(), ledger.deleted(), mixed))
        ledger.add(start)
        numbers = [made.number for made in steps if made.number is not None]
        done = max(numbers) + 1 if numbers else done
    return found


def _mixed(undisturbed: Start, loaded: Sequence[Checkpoint]) -> tuple[Checkpoint, Checkpoint] | None:
    """Two of these files that are of different steps, although the undisturbed run saves both after the same steps."""
    saved: dict[str, set[int]] = {}
    final = {one.source: one.target for one in undisturbed.renames()}
    for began in undisturbed.of(SaveBegan):
        saved.setdefault(_shape(final.get(began.file, began.file)), set()).add(began.local)
    newest = max(loaded, key=lambda one: one.number, default=None)
    for one in loaded:
        if newest and one.number < newest.number and saved.get(_shape(one.file)) == saved.get(_shape(newest.file)):
            return newest, one
    return None


def _loaded(start: Start, ledger: Ledger) -> Loaded | None:
    """What a start continues from: the last file that this run has written and that it loaded, or failed to load."""
    loads = [load for rank in sorted(start.facts) for load in start.loads(rank) if ledger.held(load.file)]
    whole = [load for load in loads if not load.error]
    best = [load for load in whole if "best" not in Path(load.file).name]
    return next(iter([*reversed(best), *reversed(whole), *reversed(loads)]), None)


def result_of(undisturbed: Undisturbed, trial: Trial) -> Result:
    """How a run ended. Weights count only if they are equal in both undisturbed runs."""
    expected, steps = undisturbed.start.steps(), trial.last.steps()
    if not (trial.last.is_done or trial.last.is_cut):
        return Result.UNFINISHED
    if expected[-1].after != undisturbed.other.last.steps()[-1].after:
        numbers = [made.number for start in trial.starts for made in start.steps() if made.number is not None]
        return Result.SAME if max(numbers, default=-1) + 1 >= len(expected) else Result.UNFINISHED
    if not steps:  # a restart of a finished training
        return Result.SAME if _after(trial) == expected[-1].after else Result.UNFINISHED
    if steps[-1].after == expected[-1].after:
        return Result.SAME
    if steps[-1].number is not None and steps[-1].number + 1 < len(expected):
        return Result.UNFINISHED
    return Result.DIFFERS


def _after(trial: Trial) -> str:
    steps = [made for start in trial.starts for made in start.steps()]
    return steps[-1].after if steps else ""


@dataclass(frozen=True)
class StepDifference:
    """The first step that differs from the undisturbed run's step of the same number, and in what. ``samples``: or in
    the batch, where the samples have no indices."""

    number: int
    rank: int
    rates: bool
    samples: bool
    loss: bool


def first_step_difference(undisturbed: Undisturbed, start: Start) -> StepDifference | None:
    """The first step with other learning rates, samples or losses on any rank, or None. What differs between the two
    undisturbed runs does not count."""
    one, other = undisturbed.start, undisturbed.other.last
    found = [each for rank in start.facts if (each := _of_rank(one.steps(rank), other.steps(rank), start, rank))]
    return min(found, key=lambda one: (one.number, not (one.samples or one.rates)), default=None)


def _of_rank(expected: Sequence[StepMade], again: Sequence[StepMade], start: Start, rank: int) -> StepDifference | None:
    for made in start.steps(rank):
        if made.number is None or made.number >= min(len(expected), len(again)):
            return None
        same, steady = expected[made.number], again[made.number]
        key, other = (same.samples, same.batch), (steady.samples, steady.batch)
        samples = key != (made.samples, made.batch) and key == other
        rates = same.rates != made.rates and same.rates == steady.rates
        loss = same.loss != made.loss and same.loss == steady.loss
        if rates or samples or loss:
            return StepDifference(made.number, rank, rates, samples, loss)
    return None


def first_unlike(one: Trial, other: Trial) -> int | None:
    """The first step in which two undisturbed runs differ, or None."""
    for rank in one.last.facts:
        was, now = one.last.steps(rank), other.last.steps(rank)
        for before, after in zip(was, now, strict=False):
            key = before.weights, before.after, before.loss, before.samples, before.batch
            if key != (after.weights, after.after, after.loss, after.samples, after.batch):
                return before.local
        if len(was) != len(now):
            return min(len(was), len(now))
    return None


def logged(start: Start, rank: int) -> dict[tuple[int, str], str]:
    """What a rank has logged, by the steps of the whole run before it and by its name."""
    return {(one.number, name): value for one in start.of(Logged, rank) for name, value in one.values.items()}


def first_logged_difference(undisturbed: Trial, again: Trial, start: Start) -> tuple[int, str, str, str] | None:
    """The number, the name and both values of the first logged value that differs, or None. Values that differ without
    a disturbance do not count."""
    found = []
    for rank in start.facts:
        was, steady = logged(undisturbed.last, rank), logged(again.last, rank)
        now = logged(start, rank)
        found += [
            (number, name, was[number, name], value)
            for (number, name), value in now.items()
            if was.get((number, name), value) != value and was[number, name] == steady.get((number, name))
        ]
    return min(found, default=None)


def states_at(start: Start, number: int) -> States | None:
    """The script's objects before the step with this number."""
    local = next((made.local for made in start.steps() if made.number == number), None)
    return next((one for one in start.states() if one.local == local), None)


@dataclass(frozen=True)
class Unlike:
    """An object or a value of the script that differs. ``kind``: of the object, or ``value``."""

    name: str
    kind: str
    key: str = ""
    was: str = ""
    now: str = ""


def unlike(was: States, now: States, *, steady: States | None) -> Iterator[Unlike]:
    """The script's objects and values that differ. ``steady``: of a second undisturbed run: what differs there does
    not count."""
    for name, kind in now.kinds.items():
        members = tuple(
            f"{other}." for other in now.kinds if other.startswith(f"{name}.")
        )  # as a generator in a module
        both = {**was.objects, **now.objects}
        keys = [key for key in both if key.startswith(f"{name}.") and not key.startswith(members)]
        for key in keys:
            if was.objects.get(key) != now.objects.get(key) and (not steady or _is_steady(was, steady, now, key)):
                yield Unlike(name, kind, key, was.objects.get(key, "missing"), now.objects.get(key, "missing"))
                if kind not in ("optimizer", "model"):
                    break
    for name, value in was.variables.items():
        other = now.variables.get(name, value)
        if other != value and (not steady or steady.variables.get(name) == value):
            yield Unlike(name, "value", name, value, other)


def unlike_at(undisturbed: Undisturbed, start: Start, number: int) -> list[Unlike]:
    """The script's objects and values that differ before the step with this number."""
    was, now = states_at(undisturbed.start, number), states_at(start, number)
    return list(unlike(was, now, steady=states_at(undisturbed.other.last, number))) if was and now else []


def _is_steady(was: States, again: States, now: States, key: str) -> bool:
    """Whether two undisturbed runs agree on this value, or both have one where ``now`` has none."""
    is_missing = key not in now.objects and key in was.objects and key in again.objects
    return is_missing or was.objects.get(key) == again.objects.get(key)


def epoch_starts(steps: Iterable[StepMade]) -> list[int]:
    """The numbers of the steps that begin an epoch."""
    return [made.number for made in steps if made.epoch_begins and made.number is not None]
