"""What a rehearsal found: what a user would have lost, why, and where in the script."""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp.failures.stack_traces import FRAME, is_library
from clusterddp.rehearsal import comparison
from clusterddp.rehearsal.comparison import Result, Resume, Unlike
from clusterddp.rehearsal.facts import Evaluated, HandlerSet, Place, SaveBegan
from clusterddp.rehearsal.trial import Start, Stimulus, Trial
from clusterddp.reporter import counted


class Rank(enum.Enum):
    """What a finding costs a user, the worst first."""

    LOSES_WORK = "loses_work"
    WRONG_RESULT = "wrong_result"
    REPEATS_WORK = "repeats_work"
    UNTIDY = "untidy"

    @property
    def words(self) -> str:
        """For a table."""
        return self.value.replace("_", " ")


class Cause(enum.Enum):
    """Why. The value is its name in rehearsal.json. The order, the worst first, is that of their ranks."""

    ENDS_AS_COMPLETED = "ends_as_completed"
    RESUMES_HALF_WRITTEN = "resumes_half_written"
    CHECKPOINT_DESTROYED = "checkpoint_destroyed"
    NEW_FOLDER = "new_folder"
    NOT_RESUMED = "not_resumed"
    NO_CHECKPOINT = "no_checkpoint"
    RESUMED_OLDER = "resumed_older"
    LAST_IS_STALE = "last_is_stale"
    RESTART_FAILS = "restart_fails"
    HANGS = "hangs"
    SAVES_ON_EVERY_RANK = "saves_on_every_rank"
    MODEL_NOT_RESTORED = "model_not_restored"
    OPTIMIZER_NOT_RESTORED = "optimizer_not_restored"
    SCHEDULER_NOT_RESTORED = "scheduler_not_restored"
    WARMUP_RESTARTED = "warmup_restarted"
    SCALER_NOT_RESTORED = "scaler_not_restored"
    EMA_NOT_RESTORED = "ema_not_restored"
    GENERATOR_NOT_RESTORED = "generator_not_restored"
    SAMPLER_EPOCH_NOT_RESTORED = "sampler_epoch_not_restored"
    POSITION_NOT_RESTORED = "position_not_restored"
    BEST_NOT_RESTORED = "best_not_restored"
    ORDER_DEPENDS_ON_RANKS = "order_depends_on_ranks"
    STATE_NOT_RESTORED = "state_not_restored"
    HANDLER_ON_SOME_RANKS = "handler_on_some_ranks"
    HANDLER_REPLACED = "handler_replaced"
    HANDLER_LATE = "handler_late"
    BARRIER_IN_HANDLER = "barrier_in_handler"
    SAVE_SLOWER_THAN_NOTICE = "save_slower_than_notice"
    FLAG_NOT_CHECKED = "flag_not_checked"
    WORKERS_KILLED = "workers_killed"
    NO_HANDLER = "no_handler"
    NOT_SAVED_AT_NOTICE = "not_saved_at_notice"
    NEW_TRACKER_RUN = "new_tracker_run"
    FILES_LEFT = "files_left"
    PROCESSES_LEFT = "processes_left"

    @property
    def rank(self) -> Rank:
        """What it costs."""
        order = list(Cause)
        place = order.index(self)
        if place <= order.index(Cause.HANGS):
            return Rank.LOSES_WORK
        if place <= order.index(Cause.STATE_NOT_RESTORED):
            return Rank.WRONG_RESULT
        return Rank.REPEATS_WORK if place <= order.index(Cause.NOT_SAVED_AT_NOTICE) else Rank.UNTIDY


@dataclass(frozen=True)
class Finding:
    """One fault. ``detail``: a sentence with what was seen. ``file`` and ``line``: where in the script, if known."""

    cause: Cause
    detail: str
    file: str | None = None
    line: int | None = None

    @property
    def rank(self) -> Rank:
        """What it costs."""
        return self.cause.rank


@dataclass(frozen=True)
class Undisturbed:
    """The two undisturbed runs."""

    one: Trial
    other: Trial

    @property
    def start(self) -> Start:
        """The only start of the first one."""
        return self.one.last


def diagnose(undisturbed: Undisturbed, trial: Trial) -> list[Finding]:
    """The faults that one disturbed run shows, the worst first."""
    found = list(_found(undisturbed, trial))
    if not found and comparison.result_of(undisturbed.one, trial) is Result.DIFFERS:
        found = [Finding(Cause.STATE_NOT_RESTORED, "the final weights differ from those of the undisturbed run")]
    unique = {finding.cause: finding for finding in reversed(found)}
    order = list(Cause)
    return sorted(unique.values(), key=lambda one: order.index(one.cause))


def _found(undisturbed: Undisturbed, trial: Trial) -> Iterator[Finding]:
    yield from _on_every_rank(undisturbed.start)
    resumed = comparison.resumes(undisturbed.start, trial)
    for index, start in enumerate(trial.starts):
        stimulus = trial.stimuli[index] if index < len(trial.stimuli) else None
        resume = resumed[index - 1] if index else None
        if resume is not None and not (start.disturbed and not resume.stepped):
            faults = list(_of_resume(undisturbed, trial, resume))
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


def _why_not_saved(undisturbed: Undisturbed, trial: Trial, index: int, repeats: int) -> Finding:
    """Why the steps before a notice were not saved."""
    start = trial.starts[index]
    handlers = {rank: _handlers(start, rank, trial.notice) for rank in start.facts}
    with_handler = [rank for rank, found in handlers.items() if found and _is_function(found[-1])]
    ever = [found for found in handlers.values() if any(map(_is_function, found))]
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
        later = [one for one in later if _is_function(one)]
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
        return Finding(Cause.FLAG_NOT_CHECKED, detail, *_script_line(start))
    return Finding(
        Cause.NOT_SAVED_AT_NOTICE, f"the script handles {trial.notice.name}, but ends without a save. {lost}"
    )


def _phase(start: Start) -> str:
    place = start.reached.place if start.reached else None
    local = start.reached.local if start.reached else -1
    if place is Place.EVALUATION or any(one.local == local for one in start.of(Evaluated)):
        return "an evaluation"
    return {Place.START: "the start", Place.SAVE: "a save", Place.EPOCH_END: "the end of an epoch"}.get(
        place or Place.STEP, "a step"
    )


def _handlers(start: Start, rank: int, notice: signal.Signals) -> list[HandlerSet]:
    return [one for one in start.handlers(rank) if one.signal == notice]


def _is_function(handler: HandlerSet) -> bool:
    return handler.what not in ("default", "ignore")


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


# --- how a start continued


def _of_resume(undisturbed: Undisturbed, trial: Trial, resume: Resume) -> Iterator[Finding]:
    start = trial.starts[resume.index]
    loaded = resume.loaded
    script = (loaded.script or None, loaded.line or None) if loaded else (None, None)
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
            yield Finding(Cause.RESTART_FAILS, f"a later start fails: {_last_line(start)}", *script)
        return
    if resume.at is None:
        name = Path(loaded.file).name if loaded else "no file of this run"
        text = f"a start loads {name}, and its weights are not those of any step before"
        yield Finding(Cause.MODEL_NOT_RESTORED, text, *script)
        return
    if resume.at == 0 and resume.done > 0 and resume.newest is None:
        if not any(begun.of(SaveBegan, rank) for begun in undisturbed.one.starts for rank in begun.facts):
            yield Finding(Cause.NO_CHECKPOINT, "the script saves no checkpoint, and starts from step 0")
        return
    if resume.newest is not None and resume.at < resume.newest.number:
        yield _older(trial, resume, *script)
        return
    yield from _of_states(undisturbed, trial, resume)


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


def _last_line(start: Start) -> str:
    for output in start.output.values():
        lines = [line.strip() for line in output.splitlines() if re.match(r"\w[\w.]*(Error|Exception|Exit)\b", line)]
        if lines:
            return lines[-1][:200]
    return f"exit codes {', '.join(map(str, start.codes.values()))}"


_AVERAGE = re.compile(r"ema|averag|shadow|teacher|polyak", re.IGNORECASE)
_BEST = re.compile(r"best|lowest|highest|record|(min|max)(_|\b)", re.IGNORECASE)
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
    steady = comparison.states_at(undisturbed.other.last, number)
    unlike = list(comparison.unlike(was, now, steady=steady)) if was and now else []
    found = list(_of_objects(unlike, _still_unlike(undisturbed, start)))
    if rates := _of_rates(undisturbed.start, start, number):
        found.append(rates)
    difference = comparison.first_step_difference(undisturbed.start, start)
    if difference is not None and difference.samples:
        found.append(_of_samples(undisturbed.start, start, difference))
    elif difference is not None and difference.loss and not found:
        found.append(
            Finding(
                Cause.GENERATOR_NOT_RESTORED,
                f"the loss of step {difference.number} differs with the same weights and samples. The state of a "
                "random generator, as of dropout or of the data, is not in the checkpoint",
            )
        )
    yield from found


def _still_unlike(undisturbed: Undisturbed, start: Start) -> set[str]:
    """The objects that differ before the last step that both runs have made. Others are made again by the script."""
    number = start.steps()[-1].number
    was = None if number is None else comparison.states_at(undisturbed.start, number)
    now = None if number is None else comparison.states_at(start, number)
    steady = None if number is None else comparison.states_at(undisturbed.other.last, number)
    return {one.name for one in comparison.unlike(was, now, steady=steady)} if was and now else set()


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
        elif one.kind == "value" and _BEST.search(one.name):
            yield Finding(
                Cause.BEST_NOT_RESTORED, f"{one.name} is {one.now} after the restart, and was {one.was} before it"
            )


def _of_rates(undisturbed: Start, start: Start, number: int) -> Finding | None:
    rates = [made.rates for made in undisturbed.steps()]
    later = [made for made in start.steps() if made.number is not None and made.number < len(rates)]
    wrong = next((made for made in later if made.number is not None and made.rates != rates[made.number]), None)
    if wrong is None or wrong.number is None:
        return None
    text = f"step {wrong.number} has the learning rate {wrong.rates[0]} instead of {rates[wrong.number][0]}"
    rising = len(rates) > 1 and float(rates[1][0]) > float(rates[0][0])
    if rising and wrong.rates == rates[wrong.number - number]:
        return Finding(Cause.WARMUP_RESTARTED, f"the warm-up begins again after a restart: {text}")
    return Finding(Cause.SCHEDULER_NOT_RESTORED, f"the scheduler does not continue after a restart: {text}")


def _of_samples(undisturbed: Start, start: Start, difference: comparison.StepDifference) -> Finding:
    expected = undisturbed.steps(difference.rank)
    made = next(one for one in start.steps(difference.rank) if one.number == difference.number)
    epochs = comparison.epoch_starts(expected)
    epoch = max((first for first in epochs if first <= difference.number), default=0)
    same = next((one.number for one in expected if one.samples == made.samples and made.samples), None)
    at = f"step {difference.number} has the samples"
    if same is not None and same < epoch:
        text = f"{at} of step {same}, in an earlier epoch: the sampler's epoch is not set after a restart"
        return Finding(Cause.SAMPLER_EPOCH_NOT_RESTORED, text)
    if same is not None:
        return Finding(Cause.POSITION_NOT_RESTORED, f"{at} of step {same}: a restart begins the epoch again")
    text = f"{at} of no step of the undisturbed run: their order is drawn from a generator that is not restored"
    return Finding(Cause.GENERATOR_NOT_RESTORED, text)


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
    return {re.sub(r"^.*?/run-\d+/", "", file) for file in files}


def _tracker_runs(names: set[str]) -> set[str]:
    folders = {str(Path(name).parent) for name in names if "events.out.tfevents" in name}
    return folders | {
        match[0] for name in names if (match := re.search(r".*(offline-)?run-[^/]+", name)) and "wandb" in name
    }
