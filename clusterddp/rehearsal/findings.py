"""What a rehearsal found: what a user would have lost, why, and where in the script."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from clusterddp.failures.stack_traces import FRAME, is_library
from clusterddp.rehearsal import comparison
from clusterddp.rehearsal.causes import Cause, Finding, Rank
from clusterddp.rehearsal.comparison import Result, Resume
from clusterddp.rehearsal.facts import Evaluated, HandlerSet, Place, SaveBegan, Saved, StepMade, ThreadEnded
from clusterddp.rehearsal.resume_findings import begun_again, last_line, of_resume
from clusterddp.rehearsal.trial import Start, Stimulus, Trial, Undisturbed
from clusterddp.reporter import counted


def diagnose(undisturbed: Undisturbed, trial: Trial) -> list[Finding]:
    """The faults that one disturbed run shows, the worst first."""
    found = list(_found(undisturbed, trial))
    if not found and comparison.result_of(undisturbed, trial) is Result.DIFFERS:
        found = [Finding(Cause.STATE_NOT_RESTORED, _of_result(undisturbed, trial))]
    if not found and trial.last.completed is False and not trial.last.is_cut:
        made = counted(len({step.number for start in trial.starts for step in start.steps()}), "step")
        text = f"the run ends after {made}, and is not completed: {last_line(trial.last)}"
        found = [Finding(Cause.RESTART_FAILS, text)]
    if found and (inexact := list(dict.fromkeys(why for start in trial.starts for why in start.inexact))):
        said = f". The run itself reports that it does not resume exactly: {', '.join(inexact)}"
        found = [replace(one, detail=one.detail + said) if one.rank is Rank.WRONG_RESULT else one for one in found]
    unique = {finding.cause: finding for finding in reversed(found)}
    order = list(Cause)
    return sorted(unique.values(), key=lambda one: order.index(one.cause))


def _of_result(undisturbed: Undisturbed, trial: Trial) -> str:
    """Another result of a run whose restarts have shown no difference at once, as when it trains longer."""
    text = "the final weights differ from those of the undisturbed run"
    numbers = [made.number for start in trial.starts for made in start.steps() if made.number is not None]
    made, total = max(numbers, default=-1) + 1, len(undisturbed.start.steps())
    if made != total:
        text = f"the run ends after {counted(made, 'step')} instead of {total}"
    for resume in comparison.resumes(undisturbed.start, trial):
        unlike = []
        if resume.at is not None:
            unlike = comparison.unlike_at(undisturbed, trial.starts[resume.index], resume.at)
        if again := begun_again(undisturbed.start, unlike):
            return f"{text}. {again}"
    if made != total:
        text += ". What decides when it ends, such as the counter of an early stopping, is not restored"
    return text


def _found(undisturbed: Undisturbed, trial: Trial) -> Iterator[Finding]:
    yield from _on_every_rank(undisturbed.start)
    resumed = comparison.resumes(undisturbed.start, trial)
    for index, start in enumerate(trial.starts):
        stimulus = trial.stimuli[index] if index < len(trial.stimuli) else None
        resume = resumed[index - 1] if index else None
        if resume is not None and not (start.disturbed and not resume.stepped):
            faults = list(of_resume(undisturbed, trial, resume))
            yield from faults
            if faults:
                return
        following = resumed[index] if index < len(resumed) else None
        if stimulus is not None and start.disturbed and stimulus.notices and not stimulus.kill:
            yield from _of_notice(undisturbed, trial, index, stimulus, following)
        if start.timed_out:
            yield Finding(Cause.HANGS, f"a start did not end within {start.duration_s:.0f} s{_where(start)}")
            return
    yield from _untidy(undisturbed, trial)


def _on_every_rank(start: Start) -> Iterator[Finding]:
    files: dict[str, dict[int, SaveBegan]] = {}
    for saving in start.saves():
        files.setdefault(saving.began.file, {})[saving.rank] = saving.began
    for file, by_rank in files.items():
        if len(by_rank) > 1:
            began = next(iter(by_rank.values()))
            detail = f"{counted(len(by_rank), 'rank')} write the same file, {Path(file).name}"
            yield Finding(Cause.SAVES_ON_EVERY_RANK, detail, began.script or None, began.line or None)
            return


# --- how a start ended after its notice


def _of_notice(
    undisturbed: Undisturbed, trial: Trial, index: int, stimulus: Stimulus, following: Resume | None
) -> Iterator[Finding]:
    start = trial.starts[index]
    total = len(undisturbed.start.steps())
    numbers = [made.number for made in start.steps() if made.number is not None]
    finished = bool(numbers) and numbers[-1] + 1 >= total
    if following is None:
        if finished and (ignored := _ignored(start)):
            handlers = _handlers(start, 0, trial.notice)
            text = (
                f"the script continues for {counted(ignored, 'step')} after a notice in {_phase(start)}, to its end. "
            )
            text += "A longer training is killed before it saves"
            yield Finding(Cause.FLAG_NOT_CHECKED, *_swallowed(handlers, text))
        if start.is_done and not start.requeued and not start.is_cut and not finished:
            at = f" after {counted(numbers[-1] + 1, 'step')} of {total}" if numbers else " before the first step"
            yield Finding(
                Cause.ENDS_AS_COMPLETED,
                f"all ranks exit with code 0 after the notice{at}. Slurm then counts the job as completed, and never "
                "starts it again",
            )
        return
    repeats = following.repeated if following.repeated is not None else following.done
    saved = following.newest is not None and following.newest.number >= following.done
    if finished or saved or stimulus.too_short or repeats == 0 or following.done == 0 or not following.stepped:
        return
    yield _why_not_saved(undisturbed, trial, index, repeats)


#: A script that takes notice of a signal stops within fewer steps after it.
_IGNORED_STEPS = 5


def _ignored(start: Start) -> int:
    """How many steps rank 0 has made after its notice, if it has passed the end of an epoch or a save in these, where
    a script could have looked at a flag. Else 0."""
    if start.reached is None:
        return 0
    facts = list(start.facts[0])
    later = facts[facts.index(start.reached) + 1 :]
    made = [one for one in later if isinstance(one, StepMade)]
    steps = passed = 0
    for fact in later:
        if isinstance(fact, StepMade):
            steps += 1
            passed += bool(passed or fact.epoch_begins)
        elif isinstance(fact, Saved):
            passed = passed or 1
    return len(made) if len(made) >= _IGNORED_STEPS and passed > 2 else 0


def _swallowed(handlers: Sequence[HandlerSet], text: str) -> tuple[str, str | None, int | None]:
    """This text, and the place of the handler, if its exception is caught by the script."""
    last = handlers[-1] if handlers else None
    if last is None or not last.raises:
        return text, None, None
    text = f"the handler {last.what} raises an exception, which the script catches, as with `except Exception`: {text}"
    return text, last.function_file or None, last.function_line or None


def _why_not_saved(undisturbed: Undisturbed, trial: Trial, index: int, repeats: int) -> Finding:
    """Why the steps before a notice were not saved."""
    start = trial.starts[index]
    handlers = {rank: _handlers(start, rank, trial.notice) for rank in start.facts}
    with_handler = [rank for rank, found in handlers.items() if found and found[-1].is_function]
    ever = [found for found in handlers.values() if any(one.is_function for one in found)]
    lost = f"{counted(repeats, 'step')} before the notice {'is' if repeats == 1 else 'are'} repeated"
    if "DataLoader worker" in "".join(start.output.values()):
        return Finding(Cause.WORKERS_KILLED, f"the notice ends the loader's workers before the save, and {lost}")
    if with_handler and len(with_handler) < len(handlers):
        handler = handlers[with_handler[0]][-1]
        missing = next(rank for rank in handlers if rank not in with_handler)
        return Finding(
            Cause.HANDLER_ON_SOME_RANKS,
            f"only rank {with_handler[0]} has a handler for {trial.notice.name}. Rank {missing} is ended by the "
            f"signal, and {lost}",
            handler.file,
            handler.line,
        )
    if not ever:
        later = [one for rank in undisturbed.start.facts for one in _handlers(undisturbed.start, rank, trial.notice)]
        later = [one for one in later if one.is_function]
        if later:
            detail = f"the handler is installed {later[0].seconds:.1f} s after the start, and {lost}"
            return Finding(Cause.HANDLER_LATE, detail, later[0].file, later[0].line)
        return Finding(
            Cause.NO_HANDLER, f"the script has no handler for {trial.notice.name}, which ends it at once. {lost}"
        )
    replaced = next(
        (found for found in handlers.values() if len({(one.what, one.function_line) for one in found}) > 1), None
    )
    if replaced and not start.is_done and not _in_handler(start, replaced[0]):
        last = replaced[-1]
        return Finding(
            Cause.HANDLER_REPLACED,
            f"the handler {replaced[0].what} is replaced by {last.what}, which does not save. {lost}",
            last.file,
            last.line,
        )
    if start.killed:
        handler = next(found[-1] for found in handlers.values() if found)
        if barrier := _collective_in_handler(start, handler):
            return Finding(
                Cause.BARRIER_IN_HANDLER,
                f"the handler {handler.what} waits in {barrier}, which another rank does not call, until it is "
                f"killed. {lost}",
                handler.function_file or handler.file,
                handler.function_line or handler.line,
            )
        if saving := _unfinished_save(start):
            return Finding(
                Cause.SAVE_SLOWER_THAN_NOTICE,
                f"the notice of {trial.stimuli[index].notice_s:g} s ends before the save does. {lost}",
                *saving,
            )
        detail = f"after a notice in {_phase(start)}, the script continues until it is killed. {lost}"
        text, file, line = _swallowed(handlers.get(0, ()), detail)
        return Finding(Cause.FLAG_NOT_CHECKED, text, *((file, line) if file else _script_line(start)))
    for rank in start.facts:
        if torn := next((one.began for one in start.saves() if one.rank == rank and one.ended is None), None):
            text = f"the script exits before its save to {Path(torn.file).name} is complete. {lost}"
            return Finding(Cause.NOT_SAVED_AT_NOTICE, text, torn.script or None, torn.line or None)
        if thread := next(iter(start.of(ThreadEnded, rank)), None):
            text = (
                f"the script exits without waiting for its thread in {thread.name}. What the thread has not saved yet "
                f"is lost. {lost}"
            )
            return Finding(Cause.NOT_SAVED_AT_NOTICE, text, thread.script, thread.line)
    return Finding(
        Cause.NOT_SAVED_AT_NOTICE, f"the script handles {trial.notice.name}, but ends without a save. {lost}"
    )


def _phase(start: Start) -> str:
    place = start.reached.place if start.reached else None
    local = start.reached.local if start.reached else -1
    if place is Place.EVALUATION or any(one.local == local for one in start.of(Evaluated)):
        return "an evaluation"
    return _PHASES.get(place or Place.STEP, "a step")


_PHASES = {
    Place.START: "the start",
    Place.SAVE: "a save",
    Place.EPOCH_END: "the end of an epoch",
    Place.STRETCH: "a stretch without steps",
}


def _handlers(start: Start, rank: int, notice: signal.Signals) -> list[HandlerSet]:
    return [one for one in start.handlers(rank) if one.signal == notice]


def _in_handler(start: Start, handler: HandlerSet) -> bool:
    name = handler.what.rsplit(".", 1)[-1]
    return any(
        file == handler.function_file and function == name
        for stack in start.stacks.values()
        for file, _, function in FRAME.findall(stack)
    )


def _collective_in_handler(start: Start, handler: HandlerSet) -> str | None:
    name = handler.what.rsplit(".", 1)[-1]
    for stack in start.stacks.values():
        frames = FRAME.findall(stack)
        at = next(
            (n for n, (file, _, function) in enumerate(frames) if (file, function) == (handler.function_file, name)),
            None,
        )
        if at is None:
            continue
        # torch wraps each collective: the outermost of its frames is that of the wrapper.
        inside = [
            str(function)
            for file, _, function in frames[:at]
            if file.endswith(("distributed_c10d.py", "c10d_logger.py"))
        ]
        if collective := [function for function in inside if function != "wrapper"]:
            return collective[-1]
    return None


def _unfinished_save(start: Start) -> tuple[str | None, int | None] | None:
    """The line of a save that the kill interrupted."""
    for saving in start.saves():
        if saving.ended is None and saving.rank in start.killed:
            return saving.began.script or None, saving.began.line or None
    for stack in start.stacks.values():
        for file, line, function in FRAME.findall(stack):
            if re.search("save|checkpoint|snapshot|dump", function, re.IGNORECASE) and "rehearsal" not in file:
                return file, int(line)
    return None


def _script_line(start: Start) -> tuple[str | None, int | None]:
    """Where in the script a killed rank was."""
    for stack in start.stacks.values():
        for file, line, _ in FRAME.findall(stack):
            if not is_library(file):
                return file, int(line)
    return None, None


def _where(start: Start) -> str:
    file, line = _script_line(start)
    return f". It is at {Path(file).name}:{line}" if file else ""


# --- what is left behind


_TEMPORARY = re.compile(r"(^|[./_-])(tmp|temp|partial|incomplete|saving)([./_-]|\d|$)|\.tmp", re.IGNORECASE)


def _untidy(undisturbed: Undisturbed, trial: Trial) -> Iterator[Finding]:
    before, after = (_relative(one.last.files) for one in (undisturbed.one, trial))
    left = sorted(name for name in after - before if _TEMPORARY.search(name))
    if left:
        yield Finding(Cause.FILES_LEFT, f"an interrupted save leaves {left[0]} behind")
    runs = [len(_tracker_runs(names)) for names in (before, after)]
    if runs[1] > runs[0] > 0:
        yield Finding(Cause.NEW_TRACKER_RUN, f"the restarts make {runs[1]} tracker runs of one training")
    # Loader workers notice the end of a killed rank only after some seconds (torch looks every 5 s).
    not_killed = [start for start in trial.starts if -signal.SIGKILL not in start.codes.values()]
    if any(start.leftover for start in not_killed) and not undisturbed.start.leftover:
        yield Finding(Cause.PROCESSES_LEFT, "processes of the script are still running after its ranks have ended")


def _relative(files: Iterable[str]) -> set[str]:
    """Paths without the folder of the run."""
    return {re.sub(r"^.*?/runs?-\d+/", "", file) for file in files}


def _tracker_runs(names: set[str]) -> set[str]:
    folders = {str(Path(name).parent) for name in names if "events.out.tfevents" in name}
    return folders | {
        match[0] for name in names if (match := re.search(r".*(offline-)?run-[^/]+", name)) and "wandb" in name
    }
