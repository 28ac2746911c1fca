"""Pure: the sentences about a check, and its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from clusterddp.cli.resume_check import comparison
from clusterddp.cli.resume_check.comparison import BATCH, LOGGED, RESTORED, STATE, Difference
from clusterddp.cli.resume_check.plan import crossed, ends_of_epochs, enough_steps
from clusterddp.errors import NotRepeatable, ResumeDiffers
from clusterddp.reporter import counted
from clusterddp.rundir.step_records import Trial

_COUNTS = {2: "two resumes", 3: "three resumes"}
#: The most names of one kind that a sentence has.
_MOST_NAMES = 5


@dataclass(frozen=True)
class Check:
    """The trials of a check.

    ``uninterrupted`` and ``again``: without a resume; the second one is needed only if the resumed one differs.
    ``stops``: after how many steps the resumed run was interrupted. ``inexact``: what that run itself says.
    """

    uninterrupted: Trial
    resumed: Trial
    stops: Sequence[int]
    again: Trial = field(default_factory=dict)
    inexact: Sequence[str] = ()

    @property
    def differs(self) -> bool:
        """Whether the resumed run is another one."""
        return self.difference is not None or bool(self.lost)

    @property
    def difference(self) -> Difference | None:
        """The first difference of the resumed run."""
        return comparison.first_difference(self.uninterrupted, self.resumed)

    @property
    def lost(self) -> list[str]:
        """The objects that ``ctx.run()`` did not get and that a resume loses."""
        return comparison.not_restored(self.uninterrupted, self.resumed)


def success(check: Check) -> str:
    """What is known of a run whose resumes make no difference."""
    epochs = comparison.epochs_of(check.uninterrupted)
    steps, resumes = counted(len(epochs), "step"), _COUNTS[len(check.stops)]
    parts, values = comparison.parts_of(check.uninterrupted)
    logged = _listed(values) if values else "no values, as the script logs none"
    compared = f"compared: batches, {logged}, the state of {_listed(parts)}"
    ranks = counted(len(check.uninterrupted), "rank")
    stops = f"(after {joined(check.stops)} steps)"
    ends = crossed(epochs, check.stops)
    if ends:
        across = "across an epoch's end" if ends == 1 else f"across the ends of {ends} epochs"
        return f"no difference in {steps}, {across} and {resumes} {stops}; {compared}, on {ranks}"
    return f"no difference in {steps} and {resumes} {stops}; {compared}, on {ranks}{_without_end(check, epochs)}"


def joined(stops: Sequence[int]) -> str:
    """Numbers as in a sentence, such as ``8, 16 and 27``."""
    return f"{', '.join(map(str, stops[:-1]))} and {stops[-1]}"


def _without_end(check: Check, epochs: Sequence[int | None]) -> str:
    """What was not tried, as no epoch has ended after a resume."""
    if all(epoch is None for epoch in epochs):
        return ""
    length = next(iter(check.uninterrupted.values()))[0].epoch_steps
    if length is None:
        ends = ends_of_epochs(epochs)
        return "; no epoch's end was crossed after a resume" + ("" if ends else ", as no epoch ended")
    return (
        f"; no epoch's end was crossed, as an epoch has {counted(length, 'step')}: "
        f"--check-resume {enough_steps(length)} crosses it"
    )


def failure(check: Check) -> ResumeDiffers:
    """The error for a run that differs, with its first difference."""
    difference, lost = check.difference, check.lost
    unsteady = comparison.first_difference(check.uninterrupted, check.again)
    if unsteady is not None and (difference is None or unsteady.place <= difference.place):
        return NotRepeatable(_not_repeatable(check, unsteady))
    lost = [name for name in lost if name not in comparison.not_restored(check.uninterrupted, check.again)]
    if difference is None:
        if not lost:  # they differ without a resume, too
            return NotRepeatable(_unsteady_objects(check.lost))
        return ResumeDiffers(f"{_lost(lost)}; batches, logged values and parts were the same in all steps")
    causes = comparison.causes(check.uninterrupted, check.again, check.resumed, difference)
    return ResumeDiffers(_differs(check, difference, lost, causes))


def _differs(check: Check, difference: Difference, lost: Sequence[str], causes: Sequence[str]) -> str:
    resume = max((stop for stop in check.stops if stop <= difference.step), default=0)
    nth = ["first", "second", "third"][check.stops.index(resume)] if resume in check.stops else "first"
    text = f"the resumed run differs: after the {nth} resume, from step {resume}, {_words(difference)}"
    if difference.kind in (LOGGED, STATE):
        text += "; its batch is the same, and so was all state of the parts when the step began"
    if lost:
        text += f"; {_lost(lost)}"
    elif causes:
        text += f"; also different when this attempt began: {_listed(causes)}"
    elif difference.kind in (LOGGED, STATE):
        text += "; it depends on something that ctx.run() did not get, such as a generator, a counter or a part"
    elif difference.kind == BATCH:
        text += "; the loader, its dataset or its sampler has a state that its state_dict() does not restore"
    if check.inexact:
        text += f"; the run itself says: not bit-exact: {'; '.join(check.inexact)}"
    return text


def _words(difference: Difference) -> str:
    """What differs, with rank and step."""
    where, names = f"in step {difference.step} on rank {difference.rank}", _listed(difference.names)
    values = f" ({difference.now} instead of {difference.was})" if _shown(difference) else ""
    if difference.kind == BATCH:
        what = "" if difference.names == ("",) else f" in {names}"
        same = difference.batch_of
        return f"the batch {where} is another one{what}" + (
            f": the batch of step {same}" if same is not None and same != difference.step else ""
        )
    if difference.kind == RESTORED:
        return f"the state is not restored: {names}{values} before step {difference.step} on rank {difference.rank}"
    if difference.kind == LOGGED:
        return f"the logged {names} {where} differs{values}"
    if difference.kind == STATE:
        return f"the state after step {difference.step} on rank {difference.rank} differs: {names}{values}"
    return f"rank {difference.rank} makes another number of steps: only one of the two runs has step {difference.step}"


def _shown(difference: Difference) -> bool:
    return bool(difference.was) and "#" not in difference.was + difference.now


def _lost(names: Sequence[str]) -> str:
    example = next((name for name in names if name.isidentifier()), None)
    how = f", as in ctx.run({example}={example}, ...)" if example else ""
    return (
        f"the state of {_listed(names)}, which ctx.run() did not get, is lost in a resume: pass "
        f"{'it' if len(names) == 1 else 'them'} to ctx.run(){how}"
    )


def _not_repeatable(check: Check, difference: Difference) -> str:
    text = f"the uninterrupted run itself is not repeatable: when it runs again, {_words(difference)}"
    if names := comparison.unsteady(check.uninterrupted, check.again, difference):
        text += f"; also different in its first step: {_listed(names)}"
    text += (
        "; look for a random generator without a seed, the time, the order of a set or of files, and on GPUs for "
        "kernels that are not deterministic"
    )
    batches = comparison.first_difference(check.uninterrupted, check.resumed, frozenset({BATCH}))
    if difference.kind != BATCH and batches is None:
        text += "; the batches of the resumed run were the same in all steps"
    return text


def _unsteady_objects(names: Sequence[str]) -> str:
    return (
        f"the uninterrupted run itself is not repeatable: {_listed(names)}, which ctx.run() did not get, has another "
        "state when it runs again; batches, logged values and parts were the same in all steps"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
