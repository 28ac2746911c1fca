"""What a start that continued an earlier one did wrong: which file it loaded, and what it did not restore."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from clusterddp.failures.stack_traces import is_library
from clusterddp.rehearsal import comparison
from clusterddp.rehearsal.causes import Cause, Finding
from clusterddp.rehearsal.comparison import Resume, Unlike
from clusterddp.rehearsal.facts import Evaluated, SaveBegan, States, Unmatched
from clusterddp.rehearsal.trial import Start, Trial, Undisturbed
from clusterddp.reporter import counted


def of_resume(undisturbed: Undisturbed, trial: Trial, resume: Resume) -> Iterator[Finding]:
    """The faults that this resume shows."""
    start = trial.starts[resume.index]
    loaded = resume.loaded
    script: tuple[str | None, int | None] = (loaded.script or None, loaded.line or None) if loaded else (None, None)
    if loaded is not None and loaded.error and resume.held is not None and not resume.held.whole:
        name = Path(loaded.file).name
        cause = Cause.CHECKPOINT_DESTROYED if resume.held.replaced else Cause.RESUMES_HALF_WRITTEN
        text = (
            f"{name} is overwritten in place, and the interrupted save has left half of it"
            if resume.held.replaced
            else f"a start loads {name}, of which the interrupted save has written a part"
        )
        yield Finding(cause, text, *script)
        return
    if not resume.stepped:
        if not start.is_done and not start.disturbed and not start.timed_out:
            place = _place_of_error(start) or script
            if folder := _half_written_folder(trial, resume):
                text = f"a start loads the folder {folder}, of which the interrupted save has written a part"
                yield Finding(Cause.RESUMES_HALF_WRITTEN, f"{text}: {last_line(start)}", *place)
                return
            yield Finding(Cause.RESTART_FAILS, f"a later start fails: {last_line(start)}", *place)
        return
    if resume.mixed is not None:
        newer, older = resume.mixed
        text = (
            f"a start loads {Path(newer.file).name} of step {newer.number} with {Path(older.file).name} of step "
            f"{older.number}, because the interrupted save has replaced only some files of the checkpoint"
        )
        yield Finding(Cause.RESUMES_HALF_WRITTEN, text, *script)
        return
    is_new = resume.at == 0 and loaded is not None and not loaded.error
    held, newest = resume.held, resume.newest
    if resume.at is None or (is_new and held and newest and held.number == newest.number > 0):
        name = Path(loaded.file).name if loaded else "no file of this run"
        weights = "not those of any step before" if resume.at is None else "those of a new model"
        unmatched, line = _unmatched(undisturbed, start)
        text = f"a start loads {name}, and its weights are {weights}{unmatched}"
        yield Finding(Cause.MODEL_NOT_RESTORED, text, *(line or script))
        return
    if resume.deleted is not None and resume.at < resume.deleted.number and (torn := _torn(trial, resume)):
        left = f"only {Path(resume.newest.file).name} is left" if resume.newest else "no checkpoint is left"
        text = f"{Path(resume.deleted.file).name} is deleted before the next save is complete, so that {left}"
        yield Finding(Cause.CHECKPOINT_DESTROYED, text, torn.script or None, torn.line or None)
        return
    if resume.at == 0 and resume.done > 0 and resume.newest is None:
        if not any(begun.of(SaveBegan, rank) for begun in undisturbed.one.starts for rank in begun.facts):
            yield Finding(Cause.NO_CHECKPOINT, "the script saves no checkpoint, and starts from step 0")
        return
    if resume.newest is not None and resume.at < resume.newest.number:
        yield _older(trial, resume, *script)
        return
    yield from _of_states(undisturbed, trial, resume)


def _half_written_folder(trial: Trial, resume: Resume) -> str | None:
    """The name of a checkpoint of several files whose save was interrupted, if this start fails at it."""
    start, before = trial.starts[resume.index], [one for made in trial.starts[: resume.index] for one in made.saves()]
    for saving in before:
        folder = Path(saving.began.file).parent
        steps = {one.began.number for one in before if Path(one.began.file).parent == folder}
        loads = any(Path(load.file).parent == folder for rank in start.facts for load in start.loads(rank))
        named = re.search(rf"(?<![\w-]){re.escape(folder.name)}(?![\w-])", last_line(start))
        if not saving.whole and len(steps) == 1 and (loads or named):
            return folder.name
    return None


def _unmatched(undisturbed: Undisturbed, start: Start) -> tuple[str, tuple[str, int] | None]:
    """What a lenient load has left out in this start, and in no undisturbed one, and its line."""
    before = {(one.script, one.line) for one in undisturbed.start.of(Unmatched)}
    found = [one for one in start.of(Unmatched) if (one.script, one.line) not in before]
    if not found:
        return "", None
    one = found[-1]
    text = f". load_state_dict(strict=False) does not find {one.missing} of its {one.total} values, such as {one.key}"
    return text, (one.script, one.line) if one.script else None


def _torn(trial: Trial, resume: Resume) -> SaveBegan | None:
    """The save that the start before was interrupted in."""
    return next((one.began for one in trial.starts[resume.index - 1].saves() if one.ended is None), None)


def _older(trial: Trial, resume: Resume, file: str | None, line: int | None) -> Finding:
    assert resume.newest is not None
    newest = f"{Path(resume.newest.file).name} (step {resume.newest.number})"
    if resume.loaded is None or resume.at == 0:
        before = {Path(one.began.file).parent for start in trial.starts[: resume.index] for one in start.saves()}
        now = {Path(one.began.file).parent for one in trial.starts[resume.index].saves()}
        if now and not now & before:
            return Finding(
                Cause.NEW_FOLDER, f"each start saves to a new folder and begins at step 0, although {newest} exists"
            )
        return Finding(Cause.NOT_RESUMED, f"a start begins at step 0, although {newest} exists", file, line)
    name = Path(resume.loaded.file).name
    text = f"a start continues from {name} (step {resume.at}), although {newest} exists"
    cause = Cause.RESUMED_OLDER if re.search(r"\d", Path(name).stem) else Cause.LAST_IS_STALE
    return Finding(cause, text, file, line)


#: torch puts the rank before each line of a traceback.
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception|Exit)\b.*)", re.MULTILINE)

#: A line of a traceback.
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


def last_line(start: Start) -> str:
    """The last error that a rank printed, or else the exit codes."""
    for output in start.output.values():
        if errors := _ERROR.findall(output):
            return str(errors[-1].strip())[:200]
    return f"exit codes {', '.join(map(str, start.codes.values()))}"


def _place_of_error(start: Start) -> tuple[str, int] | None:
    """The innermost line of the script in the last traceback that a rank printed."""
    for output in start.output.values():
        frames = [(file, int(line)) for file, line in _FRAME.findall(output)]
        if own := [one for one in frames if not one[0].startswith("<") and not is_library(one[0])]:
            return own[-1]
    return None


_AVERAGE = re.compile(r"ema|averag|shadow|teacher|polyak", re.IGNORECASE)
_BEST = re.compile(r"best|lowest|highest|record|(min|max)(_|\b)", re.IGNORECASE)
#: What a forward pass changes in a normalization.
_STATISTICS = re.compile(r"running_(mean|var)$")
#: What is not restored without a change to the loss of the first step.
_LATER = {
    Cause.OPTIMIZER_NOT_RESTORED,
    Cause.SCHEDULER_NOT_RESTORED,
    Cause.WARMUP_RESTARTED,
    Cause.EMA_NOT_RESTORED,
    Cause.BEST_NOT_RESTORED,
}
_BY_KIND = {
    "scaler": (Cause.SCALER_NOT_RESTORED, "the gradient scaler"),
    "average": (Cause.EMA_NOT_RESTORED, "the average of the weights"),
}


def _of_states(undisturbed: Undisturbed, trial: Trial, resume: Resume) -> Iterator[Finding]:
    """What a start that continued at a known step did not restore."""
    assert resume.at is not None
    start, number = trial.starts[resume.index], resume.at
    if number >= len(undisturbed.start.steps()) or number == 0:
        return
    was, now = comparison.states_at(undisturbed.start, number), comparison.states_at(start, number)
    unlike = comparison.unlike_at(undisturbed, start, number)
    difference = comparison.first_step_difference(undisturbed, start)
    still = _still_unlike(undisturbed, start)
    given = now.given if now else None
    if given is None:
        other_data = difference is not None and (difference.samples or difference.loss)
        # What other batches change says nothing about the checkpoint. The states are those after the forward pass.
        if other_data and difference is not None and difference.number == number:
            unlike = [one for one in unlike if not (one.kind == "model" and _STATISTICS.search(one.key))]
        # A checkpoint that is still in a variable holds what the last save or load has left there.
        lasting = [one for one in unlike if one.kind != "value" or "[" not in one.name or one.name in still]
        found = [*_of_objects(lasting, set() if other_data else still), *_of_best(undisturbed.start, start, lasting)]
        if missing := [one for one in found if one.cause is Cause.MODEL_NOT_RESTORED]:
            unmatched, place = _unmatched(undisturbed, start)
            if place:
                file, line = place
                found[found.index(missing[0])] = Finding(
                    Cause.MODEL_NOT_RESTORED, missing[0].detail + unmatched, file, line
                )
    else:
        found = list(_of_parts(unlike, still, given))
    if rates := _of_rates(undisturbed, start, number, now):
        found.append(rates)
    also = "" if given is None else _also(unlike)
    if difference is not None and difference.samples:
        lost = _lost_state(undisturbed.start, was, now, unlike, in_step=False) if was and now else None
        found.append(_of_samples(undisturbed.start, start, difference, lost))
    elif difference is not None and difference.loss and _is_blameless(found, at_once=difference.number == number):
        cause, why = Cause.STATE_NOT_RESTORED, also
        if not also:
            cause = Cause.GENERATOR_NOT_RESTORED
            why = (
                ". The state of a random generator, as of dropout or of the data, is not in the checkpoint, or was "
                "saved after a loader had read ahead"
            )
            if was and now and (lost := _lost_state(undisturbed.start, was, now, unlike, in_step=True)):
                cause, why = lost[0], f". {lost[1]}"
        same = "weights and samples" if any(made.samples for made in start.steps()) else "weights"
        text = f"the loss of step {difference.number} differs with the same {same}{why}"
        found.append(Finding(cause, text))
    elif not found and (logged := comparison.first_logged_difference(undisturbed.one, undisturbed.other, start)):
        after, name, value, other = logged
        text = f"the logged {name} after {counted(after, 'step')} is {other} instead of {value}{also}"
        found.append(Finding(Cause.STATE_NOT_RESTORED, text))
    yield from found


def _lost_state(
    undisturbed: Start, was: States, now: States, unlike: Sequence[Unlike], *, in_step: bool
) -> tuple[Cause, str] | None:
    """Which generator or value was not restored, and so can explain other data or another loss, with a sentence.

    ``in_step``: a generator explains it only if each step draws from it.
    """
    if own := [one.name for one in unlike if one.kind == "generator"]:
        return Cause.GENERATOR_NOT_RESTORED, f"The state of the generator {own[0]} is not restored"
    differ = [name for name, state in now.generators.items() if was.generators.get(name, state) != state]
    if drawn := [name for name in differ if not in_step or _is_drawn_in_steps(undisturbed, name)]:
        text = f"The state of {drawn[0]} random generator is not restored, from which the script draws"
        return Cause.GENERATOR_NOT_RESTORED, text
    if again := begun_again(undisturbed, unlike):
        return Cause.STATE_NOT_RESTORED, again
    return None


def _is_drawn_in_steps(undisturbed: Start, generator: str) -> bool:
    """Whether most steps change this generator. An epoch's loader draws once from torch's, for its workers."""
    states = [one.generators.get(generator) for one in undisturbed.states()]
    changed = sum(one != other for one, other in pairwise(states))
    return 2 * changed > len(states) - 1


def begun_again(undisturbed: Start, unlike: Sequence[Unlike]) -> str | None:
    """A sentence with the script's values that a restart has set to what they were at the very beginning."""
    first = next(iter(undisturbed.states()), None)
    values = [one for one in unlike if one.kind == "value" and first and first.variables.get(one.name) == one.now]
    named = [f"{one.name} is {one.now} again after the restart, and was {one.was} before it" for one in values]
    return ". ".join(named[:_MOST_NAMES]) or None


def _is_blameless(found: Sequence[Finding], *, at_once: bool) -> bool:
    """Whether another loss has none of these causes. ``at_once``: it is that of the first step."""
    return all(one.cause in (_LATER if at_once else {Cause.BEST_NOT_RESTORED}) for one in found)


#: The most values that are named as a possible cause.
_MOST_NAMES = 6


def _also(unlike: Sequence[Unlike]) -> str:
    """A sentence with what else differs when a start begins, and may be the cause."""
    named = [
        one.name if "#" in one.was + one.now else f"{one.name} ({one.now} instead of {one.was})"
        for one in unlike
        if one.kind == "value"
    ]
    return f". When this start began, these also differed: {', '.join(named[:_MOST_NAMES])}" if named else ""


_OF_PARTS = {
    "optimizer": Cause.OPTIMIZER_NOT_RESTORED,
    "scheduler": Cause.SCHEDULER_NOT_RESTORED,
    "scaler": Cause.SCALER_NOT_RESTORED,
    "average": Cause.EMA_NOT_RESTORED,
    "generator": Cause.GENERATOR_NOT_RESTORED,
    "model": Cause.MODEL_NOT_RESTORED,
}


def _of_parts(unlike: Sequence[Unlike], still: set[str], given: Sequence[str]) -> Iterator[Finding]:
    """Of a script with ``ctx.run()``, which restores what it is given. An object that the script makes again, such as
    the sum of an epoch's losses, is equal again at the end."""
    for one in unlike:
        if one.kind == "value":
            continue
        cause = _OF_PARTS.get(one.kind, Cause.STATE_NOT_RESTORED)
        if one.name in given:
            values = "" if "#" in one.was + one.now else f" ({one.now} instead of {one.was})"
            text = f"the state of {one.key}{values} is not restored, although ctx.run() receives {one.name}"
            yield Finding(cause, text)
        elif one.name in still:
            how = f", as in ctx.run({one.name}={one.name}, ...)" if one.name.isidentifier() else ""
            text = (
                f"a resume loses the state of {one.name}, which ctx.run() does not receive. Pass it to ctx.run(){how}"
            )
            yield Finding(cause, text)


def _still_unlike(undisturbed: Undisturbed, start: Start) -> set[str]:
    """The objects that differ before the last step that both runs have made. Others are made again by the script."""
    number = start.steps()[-1].number
    return set() if number is None else {one.name for one in comparison.unlike_at(undisturbed, start, number)}


def _of_objects(unlike: Sequence[Unlike], still: set[str]) -> Iterator[Finding]:
    for one in unlike:
        state = one.key.removeprefix(f"{one.name}.")
        if one.kind == "optimizer" and state.startswith("state"):
            text = f"{one.name} begins without its state ({one.key}), as it is not restored"
            yield Finding(Cause.OPTIMIZER_NOT_RESTORED, text)
            break
    for one in unlike:
        if one.kind in _BY_KIND:
            cause, words = _BY_KIND[one.kind]
            yield Finding(cause, f"{words} {one.name} is not restored: {one.key} is {one.now} instead of {one.was}")
        elif one.kind not in ("optimizer", "scheduler", "model", "generator") and _AVERAGE.search(one.name):
            yield Finding(Cause.EMA_NOT_RESTORED, f"{one.name} is not restored, and differs from the undisturbed run")
        elif one.kind == "model":
            text = f"{one.key} is not restored, while the trained weights are"
            yield Finding(Cause.MODEL_NOT_RESTORED, text)
        elif one.kind not in ("optimizer", "scheduler", "generator", "value") and one.name in still:
            yield Finding(Cause.STATE_NOT_RESTORED, f"{one.name} is not restored ({one.key})")


def _of_best(undisturbed: Start, start: Start, unlike: Sequence[Unlike]) -> Iterator[Finding]:
    """Values named best that begin again. A start that evaluates before its first step may have found another one."""
    evaluated = any(one.local == 0 for one in start.of(Evaluated))
    first = next(iter(undisturbed.states()), None)
    for one in unlike:
        if one.kind != "value" or not _BEST.search(one.name):
            continue
        if not evaluated or (first is not None and first.variables.get(one.name) == one.now):
            text = f"{one.name} is {one.now} after the restart, and was {one.was} before it"
            yield Finding(Cause.BEST_NOT_RESTORED, text)


def _of_rates(undisturbed: Undisturbed, start: Start, number: int, now: States | None) -> Finding | None:
    rates = [made.rates for made in undisturbed.start.steps()]
    if rates != [made.rates for made in undisturbed.other.last.steps()]:
        return None
    later = [made for made in start.steps() if made.number is not None and made.number < len(rates)]
    wrong = next((made for made in later if made.number is not None and made.rates != rates[made.number]), None)
    if wrong is None or wrong.number is None:
        return None
    other, was = (f"{float(one[0]):g}" for one in (wrong.rates, rates[wrong.number]))
    text = f"step {wrong.number} has the learning rate {other} instead of {was}"
    rising = len(rates) > 1 and float(rates[1][0]) > float(rates[0][0])
    if rising and wrong.rates == rates[wrong.number - number]:
        return Finding(Cause.WARMUP_RESTARTED, f"the warm-up begins again after a restart: {text}")
    before = comparison.states_at(undisturbed.start, number)
    schedulers = [name for name, kind in now.kinds.items() if kind == "scheduler"] if now else []
    if before and now and schedulers and wrong.number == number:
        unlike = {one.name for one in comparison.unlike(before, now, steady=None)}
        if not unlike & set(schedulers):
            text = f"{text}, although {schedulers[0]} is restored. The script sets the rate after it has loaded it"
            return Finding(Cause.SCHEDULER_NOT_RESTORED, text)
    return Finding(Cause.SCHEDULER_NOT_RESTORED, f"the scheduler does not continue after a restart: {text}")


def _of_samples(
    undisturbed: Start, start: Start, difference: comparison.StepDifference, lost: tuple[Cause, str] | None
) -> Finding:
    expected = undisturbed.steps(difference.rank)
    made = next(one for one in start.steps(difference.rank) if one.number == difference.number)
    epochs = comparison.epoch_starts(expected)
    epoch = max((first for first in epochs if first <= difference.number), default=0)
    same = next(
        (
            one.number
            for one in expected
            if (one.samples, one.batch) == (made.samples, made.batch) and made.samples + tuple(made.batch)
        ),
        None,
    )
    at = f"step {difference.number} on rank {difference.rank} has the samples"
    if same is not None and same < epoch:
        text = f"{at} of step {same}, in an earlier epoch: the sampler's epoch is not set after a restart"
        return Finding(Cause.SAMPLER_EPOCH_NOT_RESTORED, text)
    if same is not None:
        behind = difference.number - same
        why = "a restart begins the epoch again"
        if same > epoch and behind > 0:
            steps = counted(behind, "step")
            why = f"the position in the data is restored {steps} behind the weights, and the samples are seen twice"
        elif behind < 0:
            why = f"a restart leaves out the samples of {counted(-behind, 'step')}"
        return Finding(Cause.POSITION_NOT_RESTORED, f"{at} of step {same}: {why}")
    if lost is not None and lost[0] is not Cause.GENERATOR_NOT_RESTORED:
        return Finding(lost[0], f"{at} of no step of the undisturbed run. {lost[1]}")
    text = f"{at} of no step of the undisturbed run: their order is drawn from a generator that is not restored"
    return Finding(Cause.GENERATOR_NOT_RESTORED, text)
