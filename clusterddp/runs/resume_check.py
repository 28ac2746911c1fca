"""``submit --check-resume N``: runs the first N steps of a job with and without resumes, and compares them.

The runs have run directories of their own, in a folder that is deleted at the end. Where a script is interrupted, where
two trials first differ, and what that means are pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

from clusterddp.errors import INTERRUPTED, STOPPED, CheckUnfinished, ClusterddpError, NotRepeatable, ResumeDiffers
from clusterddp.history.beginnings import NotRestored, Resumed
from clusterddp.history.ends import Stopped
from clusterddp.history.event import Event
from clusterddp.history.steps import StepsSeen
from clusterddp.history.stops import Stopping
from clusterddp.jobdef.job import Job, Limits
from clusterddp.protocol import CHECK_RESUME
from clusterddp.reporter import counted, say, show
from clusterddp.rundir.run_directory import RunDirectory, temporary_beside_runs
from clusterddp.rundir.step_records import STOP_REASON, Digests, Recording, States, StepRecord, Trial, read_trial
from clusterddp.runs.local import LocalRun, interrupts_counted, without_clusterddp
from clusterddp.runs.progress_display import Progress, Shown
from clusterddp.runs.submission import record_local

#: Two different stops, and a step before and after.
LEAST_STEPS = 3


def choose_stops(epochs: Sequence[int | None]) -> list[int]:
    """After how many steps to stop, given the epoch of each step of the uninterrupted run.

    Two stops are in one epoch, whose end follows: the second resume then continues what the first one began. This is
    the second epoch if the steps reach its end, because epoch counters start at 0, otherwise the first, with a third
    stop in the second. Without such an end of an epoch, the stops are at thirds of the steps.
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


_Value = TypeVar("_Value")
#: The maximum number of differences that are named as a possible cause.
_MOST_CAUSES = 6
#: What can differ in a step, in the order in which it occurs there. ``others``: see ``States``.
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
    """Where ``found`` first differs from ``expected``, or None. ``kinds``: the differences to consider."""
    differences = [
        difference
        for rank in sorted(expected.keys() | found.keys())
        for difference in _of_rank(expected.get(rank, []), found.get(rank, []), rank)
        if difference.kind in kinds
    ]
    return min(differences, key=lambda difference: difference.place, default=None)


def _of_rank(expected: Sequence[StepRecord], found: Sequence[StepRecord], rank: int) -> Iterator[Difference]:
    """The differences of one rank's steps, including all of the first step that differs."""
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
    """The names whose values differ, or that only one of them has, in the order of ``was``."""
    return [name for name in {**was, **now} if was.get(name) != now.get(name)]


def _parts(states: States) -> dict[str, str]:
    """The values in all parts by name, such as ``model.fc.weight``."""
    return {
        f"{part}.{name}" if name else part: value
        for part, values in states.parts.items()
        for name, value in values.items()
    }


def not_restored(expected: Trial, found: Trial) -> list[str]:
    """The objects that ``ctx.run()`` did not get and that still differ after the last step. A resume loses them.

    Those that the script recreates, such as an average over an epoch, become equal again.
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
    """The entries that both have with the same value."""
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


_COUNTS = {2: "two resumes", 3: "three resumes"}
#: The maximum number of names of one kind in a sentence.
_MOST_NAMES = 5


@dataclass(frozen=True)
class Check:
    """The trials of a check.

    ``uninterrupted`` and ``again``: without a resume. The second one is needed only if the resumed one differs.
    ``stops``: after how many steps the resumed run was interrupted. ``inexact``: the reasons that the run itself gave.
    """

    uninterrupted: Trial
    resumed: Trial
    stops: Sequence[int]
    again: Trial = field(default_factory=dict)
    inexact: Sequence[str] = ()

    @property
    def differs(self) -> bool:
        """Whether the resumed run differs."""
        return self.difference is not None or bool(self.lost)

    @property
    def difference(self) -> Difference | None:
        """The first difference of the resumed run."""
        return first_difference(self.uninterrupted, self.resumed)

    @property
    def lost(self) -> list[str]:
        """The objects that ``ctx.run()`` did not get and that a resume loses."""
        return not_restored(self.uninterrupted, self.resumed)


def success(check: Check) -> str:
    """The message for a run whose resumes make no difference."""
    epochs = epochs_of(check.uninterrupted)
    steps, resumes = counted(len(epochs), "step"), _COUNTS[len(check.stops)]
    parts, values = parts_of(check.uninterrupted)
    logged = f", {_listed(values)}" if values else ""
    compared = f"Compared batches{logged} and the state of {_listed(parts)}"
    ranks = counted(len(check.uninterrupted), "rank")
    stops = f"(after {joined(check.stops)} steps)"
    ends = crossed(epochs, check.stops)
    if ends:
        across = "across an epoch's end" if ends == 1 else f"across the ends of {ends} epochs"
        return f"no difference in {steps}, {across} and {resumes} {stops}. {compared}, on {ranks}"
    return f"no difference in {steps} and {resumes} {stops}. {compared}, on {ranks}{_without_end(check, epochs)}"


def joined(stops: Sequence[int]) -> str:
    """Numbers as in a sentence, such as ``8, 16 and 27``."""
    return f"{', '.join(map(str, stops[:-1]))} and {stops[-1]}"


def _without_end(check: Check, epochs: Sequence[int | None]) -> str:
    """A sentence if no epoch ended after a resume."""
    if all(epoch is None for epoch in epochs):
        return ""
    length = next(iter(check.uninterrupted.values()))[0].epoch_steps
    if length is None:
        ends = ends_of_epochs(epochs)
        return ". No epoch ended after a resume" if ends else ". No epoch ended"
    return (
        f". No epoch ended, because an epoch has {counted(length, 'step')}. To cross its end, use "
        f"--check-resume {enough_steps(length)}"
    )


def failure(check: Check) -> ResumeDiffers:
    """The error for a run that differs, with its first difference."""
    difference, lost = check.difference, check.lost
    unsteady = first_difference(check.uninterrupted, check.again)
    if unsteady is not None and (difference is None or unsteady.place <= difference.place):
        return NotRepeatable(_not_repeatable(check, unsteady))
    lost = [name for name in lost if name not in not_restored(check.uninterrupted, check.again)]
    if difference is None:
        if not lost:  # they differ without a resume, too
            return NotRepeatable(_unsteady_objects(check.lost))
        return ResumeDiffers(f"{_lost(lost)}. Batches, logged values and parts were the same in all steps")
    also = causes(check.uninterrupted, check.again, check.resumed, difference)
    return ResumeDiffers(_differs(check, difference, lost, also))


def _differs(check: Check, difference: Difference, lost: Sequence[str], causes: Sequence[str]) -> str:
    resume = max((stop for stop in check.stops if stop <= difference.step), default=0)
    nth = ["first", "second", "third"][check.stops.index(resume)] if resume else ""
    when = f"after the {nth} resume (from step {resume})" if nth else "before its first resume"
    text = f"the resumed run differs {when}: {_words(difference, resumed=bool(nth))}"
    if difference.kind in (LOGGED, STATE):
        text += ". The batch was the same, and so was the state of all parts when the step began"
    if lost:
        text += f". Also, {_lost(lost)}"
    elif causes:
        text += f". When this attempt began, these also differed: {_listed(causes)}"
    elif difference.kind in (LOGGED, STATE):
        text += (
            ". The script depends on something that ctx.run() did not receive, such as a generator, a counter or a part"
        )
    elif difference.kind == BATCH:
        text += ". The loader, its dataset or its sampler has state that state_dict() does not save"
    if check.inexact:
        text += f". The run reported that it is not bit-exact: {', '.join(check.inexact)}"
    return text


def _words(difference: Difference, resumed: bool = True) -> str:
    """What differs, with rank and step. ``resumed``: in a run that was resumed before it."""
    where, names = f"in step {difference.step} on rank {difference.rank}", _listed(difference.names)
    values = f" ({difference.now} instead of {difference.was})" if _shown(difference) else ""
    if difference.kind == BATCH:
        what = "" if difference.names == ("",) else f" in {names}"
        same = difference.batch_of
        return f"the batch {where} differed{what}" + (
            f" (it was the batch of step {same})" if same is not None and same != difference.step else ""
        )
    if difference.kind == RESTORED:
        verb = "was not restored" if resumed else "differed"
        return f"the state of {names}{values} {verb} before step {difference.step} on rank {difference.rank}"
    if difference.kind == LOGGED:
        return f"the logged {names} {where} differed{values}"
    if difference.kind == STATE:
        return f"the state of {names}{values} differed after step {difference.step} on rank {difference.rank}"
    return f"rank {difference.rank} ran a different number of steps. Only one of the runs has step {difference.step}"


def _shown(difference: Difference) -> bool:
    return bool(difference.was) and "#" not in difference.was + difference.now


def _lost(names: Sequence[str]) -> str:
    example = next((name for name in names if name.isidentifier()), None)
    how = f", as in ctx.run({example}={example}, ...)" if example else ""
    return (
        f"a resume loses the state of {_listed(names)}, which ctx.run() did not receive. Pass "
        f"{'it' if len(names) == 1 else 'them'} to ctx.run(){how}"
    )


def _not_repeatable(check: Check, difference: Difference) -> str:
    text = f"the run is not repeatable even without a resume. When it ran again, {_words(difference, resumed=False)}"
    if names := unsteady(check.uninterrupted, check.again, difference):
        text += f". In its first step, these also differed: {_listed(names)}"
    text += (
        ". Look for a random generator without a seed, the time, the order of a set or of files, and on GPUs for "
        "kernels that are not deterministic"
    )
    batches = first_difference(check.uninterrupted, check.resumed, frozenset({BATCH}))
    if difference.kind != BATCH and batches is None:
        text += ". The batches of the resumed run were the same in all steps"
    return text


def _unsteady_objects(names: Sequence[str]) -> str:
    return (
        f"the run is not repeatable even without a resume. When it ran again, {_listed(names)}, which ctx.run() did "
        "not receive, had a different state. Batches, logged values and parts were the same in all steps"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


#: The events of its runs to show to the user.
_SHOWN = ("resumed", "diverged", "slow", "rank_failed", "hung", "launch_failed")


class Interrupted(Exception):
    """The user pressed Ctrl-C."""


class Trials(Protocol):
    """How a script is run."""

    def run(self, name: str, untils: Sequence[int], output: bool = False) -> Trial:
        """Runs it from the beginning, up to each of ``untils`` steps in a fresh process. Returns what was recorded."""

    def inexact(self, name: str) -> list[str]:
        """Why the resumes of a trial are not exact, according to its events."""


#: What the check needs, for messages.
_NEEDS = "The check needs a script with `run = ctx.run(...)` and a loop over run.steps() or run.epochs()"


class _Watched(Progress):
    """Ends the attempt of a script that does not mention clusterddp once it has trained a step."""

    def __init__(self, trial: _Interruptions, steps: int, output: bool) -> None:
        super().__init__(trial.run, steps, shown=Shown(progress=False, output=output, events=_SHOWN, failures=False))
        self._trial = trial

    def _event(self, event: Event) -> None:
        super()._event(event)
        if isinstance(event, StepsSeen) and without_clusterddp(self._trial.job):
            self._trial.end()


class _Interruptions(LocalRun):
    """A local run whose attempts stop after given steps."""

    ended: bool = False

    def end(self) -> None:
        """Ends a run that cannot be checked."""
        self.ended = True
        self._kill()

    def interrupted(self) -> None:
        """Handles Ctrl-C without saving, because the run is temporary."""
        self.interrupts += 1
        self._kill()

    def make(self, recording: Recording, progress: Progress) -> bool:
        """Makes an attempt. Returns whether the run is not over. Raises as ``LocalTrials.run`` does."""
        self.environment = {CHECK_RESUME: str(recording)}
        code = self._attempt(progress)
        if self.interrupts:
            raise Interrupted
        if self.ended:
            raise ClusterddpError(
                "the script completed a step without calling ctx.run() first, so its resume cannot be checked. "
                f"{_NEEDS}"
            )
        outcome = self.run.outcome()
        if outcome is None and code in (STOPPED, INTERRUPTED):
            if why := stopped_by_others(self.run):
                raise CheckUnfinished(_unfinished(why))
            return True
        if outcome is not None and outcome.cancelled:
            raise CheckUnfinished(_unfinished(outcome.reason))
        if outcome is None or not outcome.completed:
            reason = outcome.reason if outcome else f"its supervisor exited with code {code}"
            raise ClusterddpError(
                f"the script failed ({reason}), so its resume could not be checked. To keep its logs, start it without "
                "--check-resume"
            )
        return False


def _unfinished(why: str) -> str:
    """The message about a check without a result."""
    return f"the check did not finish and has no result: {why}. Start it again"


def stopped_by_others(run: RunDirectory) -> str:
    """Why the newest attempt has stopped, if the check did not want it to, else ''."""
    own = run.history().attempt(run.newest_attempt() or 0)
    if any(event.reason == STOP_REASON for event in own.all(Stopping)):
        return ""
    end = own.last(Stopped)
    return "it was stopped before its first step" if end is None else end.reason


@dataclass(frozen=True)
class LocalTrials:
    """Starts of a job on this machine, in run directories below ``folder``."""

    folder: Path
    job: Job

    def run(self, name: str, untils: Sequence[int], output: bool = False) -> Trial:
        """See ``Trials``.

        Raises ClusterddpError when the ranks do not end as wanted, CheckUnfinished when something else stops them,
        Interrupted on Ctrl-C.
        """
        records = self.folder / f"{name}-steps"
        records.mkdir(mode=0o700)
        trial = _Interruptions(record_local(self.job, str(self.folder / name), prints=False, loop=False), self.job)
        with _Watched(trial, untils[-1], output) as progress, interrupts_counted(trial.interrupted):
            for until in untils:
                if not trial.make(Recording(until, records.absolute()), progress):
                    break
        return read_trial(records)

    def inexact(self, name: str) -> list[str]:
        """See ``Trials``."""
        history = RunDirectory(self.folder / name).history()
        found = [event.inexact for event in history if isinstance(event, (Resumed, NotRestored))]
        return list(dict.fromkeys(why for inexact in found for why in inexact))


def check_resume(job: Job, steps: int) -> int:
    """Runs the check as processes on this machine and deletes its files. Returns the exit code.

    Raises ResumeDiffers, with the first difference, ClusterddpError when the script fails or makes too few steps.
    """
    if without_clusterddp(job):
        show(f"{job.script} does not mention clusterddp. {_NEEDS}")
    with temporary_beside_runs(".check-resume-") as folder:
        try:
            check = compare(LocalTrials(folder, without_side_effects(job)), steps)
        except Interrupted:
            say("the check was interrupted and has no result")
            return INTERRUPTED
    if check.differs:
        raise failure(check)
    show(success(check))
    return 0


def compare(trials: Trials, steps: int) -> Check:
    """Runs a script as often as needed. Raises ClusterddpError when it makes too few steps."""
    show(f"resume check: running {counted(steps, 'step')} without a resume")
    uninterrupted = trials.run("uninterrupted", [steps], output=True)
    epochs = epochs_of(uninterrupted)
    if not epochs:
        raise ClusterddpError(f"the check has recorded no steps. {_NEEDS}")
    if len(epochs) < LEAST_STEPS:
        raise ClusterddpError(
            f"the script completed {counted(len(epochs), 'step')}, but the check needs {LEAST_STEPS} for two resumes"
        )
    stops = choose_stops(epochs)
    show(f"resume check: running the same steps, interrupted after {joined(stops)}")
    resumed = trials.run("resumed", [*stops, steps])
    check = Check(uninterrupted, resumed, stops, inexact=trials.inexact("resumed"))
    if not check.differs:
        return check
    show("resume check: the results differ. Running again without a resume, to see whether the run is repeatable")
    return replace(check, again=trials.run("again", [steps]))


def without_side_effects(job: Job) -> Job:
    """The job without notifications, and without conditions that end it early."""
    job = replace(job, trackers={})
    return replace(job, hook=(), preflight=False, limits=Limits(), done=None)
