"""How far an attempt came, from the history: steps, new checkpoints, and whether exit code 0 completes the run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterddp.history.beginnings import Beginning, OwnResume, Phase
from clusterddp.history.checkpoints import CheckpointDamaged, Saved, SavedItself
from clusterddp.history.ends import Completed, Continues, Failed
from clusterddp.history.failures import RankFailed
from clusterddp.history.steps import ChildDied, ChildStep, StepsSeen
from clusterddp.history.view import AttemptView, RunView
from clusterddp.reporter import duration

#: Rank 0, or a process that it has started, has completed a step, or continues from one.
STEPPED = (Beginning, StepsSeen, ChildStep)
#: A script that records no steps has made progress once it has run for this many seconds.
PROGRESS_S = 60.0
#: An attempt of a script that records no steps may have saved after this many seconds, and does not count as fruitless.
LONG_S = 600.0


@dataclass(frozen=True)
class Progress:
    """A run's progress, from its history, when an attempt fails.

    ``steps``: how many this attempt has made. None if none was seen. ``seconds``: since its
    start. ``saved``: whether the script has written a new checkpoint. ``earlier``: whether an attempt before
    it made progress. ``last_failure``: the exception of the last attempt that failed, its line and step, as
    ``RankEnd.raised``. None if one has made progress since. ``quickly``: how many attempts in a row, up to the one
    before, ended by this exception in less than LONG_S. ``started``: whether an attempt before it started the script,
    so that all its ranks had connected.
    """

    steps: int | None = None
    seconds: float = 0.0
    earlier: bool = False
    last_failure: str | None = None
    saved: bool = False
    quickly: int = 0
    started: bool = False


def progress(history: RunView, attempt: int, reached: int | None, now: float, made: int | None = None) -> Progress:
    """The progress of an attempt, which has ``reached`` this step, before its failure is in the history.

    ``made``: how many steps of unknown number rank 0 has made at least, if that is known.
    """
    own, first = history.attempt(attempt), history.attempt(attempt).first_step
    earlier = history.before(attempt)
    failed = [failure for before in earlier for failure in before.all(RankFailed)]
    progressed = [before.number for before in earlier if _progressed(before)]
    steps = None if first is None else max(0, (first if reached is None else reached) - first)
    if own.has_unnumbered_steps:
        steps = max(1, made or 0, steps or 0)
    since = failed and progressed and progressed[-1] > failed[-1].attempt
    last = failed[-1].raised if failed and not since else None
    return Progress(
        steps,
        next((now - event.time for event in own), 0.0),
        bool(progressed),
        last,
        bool(new_checkpoints(own)),
        0 if last is None else _quickly(history, attempt, last),
        any(before.has(Phase) for before in earlier),
    )


def _quickly(history: RunView, attempt: int, raised: str) -> int:
    """How many attempts in a row before this one ended by this exception in less than LONG_S."""
    count = 0
    while own := history.attempt(attempt - count - 1):
        if all(failure.raised != raised for failure in own.all(RankFailed)) or own.lasted_s >= LONG_S:
            break
        count += 1
    return count


def lost_steps(history: RunView, attempt: int) -> int:
    """The steps of unknown number, at least, that an attempt repeats if it begins again: those of the attempts before,
    from the last one that began again on."""
    earlier = history.before(attempt)
    began_again = max((before.number for before in earlier if before.unread), default=0)
    ends = [end for before in earlier if before.number >= began_again for end in before.all(Continues)]
    return sum(end.made or 0 for end in ends)


def new_checkpoints(attempt: AttemptView) -> list[SavedItself]:
    """The script's own checkpoints in an attempt that are further than the one it continued from.

    A script that began again writes the same ones once more. Numbers in names show how far each one is, unless they
    become smaller in the course of an attempt, as those of files that are written in turn. Without numbers, each one
    counts if the script has read the one that it was to continue from.
    """
    resume, unread = attempt.first(OwnResume), attempt.unread
    loaded = None if resume is None else resume.file
    found: list[SavedItself] = []
    before: str | None = None
    for event in attempt.all(SavedItself):
        file = event.file
        numbered = loaded is not None and re.sub(r"\d+", "#", file) == re.sub(r"\d+", "#", loaded) != loaded
        in_turn = before is not None and before != file and not _is_further(file, before)
        further = _is_further(file, str(loaded)) if numbered else not unread or isinstance(event, Saved)
        if in_turn or further:
            found.append(event)
        before = file
    return found


def _is_further(file: str, than: str) -> bool:
    """Whether one of the numbers in a name is larger than in another."""
    return any(int(a) > int(b) for a, b in zip(*(re.findall(r"\d+", name) for name in (file, than)), strict=False))


def _progressed(attempt: AttemptView) -> bool:
    """Whether an attempt has completed a step or saved a checkpoint. If it records neither, whether it ran for a
    minute."""
    if new_checkpoints(attempt) or attempt.has_unnumbered_steps:
        return True
    if (first := attempt.first_step) is None:
        return attempt.ran_s >= PROGRESS_S
    # A damaged checkpoint may be of a later step.
    return any(not isinstance(event, CheckpointDamaged) and (event.at_step or 0) > first for event in attempt)


#: A script that exits with code 0 in less than this share of the time of the attempt before may not have trained.
SHORT = 0.1


def doubt(history: RunView, attempt: int, sees_steps: bool = False) -> str | None:
    """Why the exit of a script with code 0, in this attempt, may not mean that it is done. None if it does.

    Some scripts do so when they find what they, or an earlier run, wrote before, and some do not resume. A script whose
    steps are seen (``sees_steps``) must have made one, and have read its checkpoint. Of any other only the time counts:
    an attempt's, from the start of the script to its end.
    """
    own = history.attempt(attempt)
    if died := own.first(ChildDied):
        return f"unconfirmed: {died.what()}, and the script exited with code 0"
    if unread := own.unread:
        return f"unconfirmed: the script did not read {unread.file}, so it began again"
    ran_s = _script_s(own)
    if ran_s is None:
        return None
    begin = f"unconfirmed: the script exited with code 0 after {duration(ran_s)}"
    before = [one for one in history.before(attempt) if _script_s(one) is not None and _interrupted(one)]
    if own.has(*STEPPED):
        return None
    if any(one.has(*STEPPED) for one in before):
        return f"{begin} without completing a step, although an earlier attempt completed some"
    if sees_steps:
        return (
            f"{begin}, and no step was seen. Where clusterddp cannot see the steps, name what rank 0 prints, such as "
            "`steps: {log: 'step (\\d+)'}`, or set `steps: off`"
        )
    if not before or ran_s >= SHORT * (last_s := _script_s(before[-1]) or 0.0):
        return None
    return f"{begin}, less than a tenth of the {duration(last_s)} of attempt {before[-1].number}"


def _script_s(attempt: AttemptView) -> float | None:
    """For how long an attempt's script ran on rank 0. None if it was not started."""
    phases = attempt.all(Phase)
    starts = [event.time for event in phases if event.phase == "importing"]
    if not starts:
        return None
    ends = [event.time for event in phases if event.phase == "ending"]
    end = ends[-1] if ends else attempt.last_time
    return end - starts[0]


def _interrupted(attempt: AttemptView) -> bool:
    """Whether an attempt's script still had work to do: it neither completed nor failed before it had begun."""
    return not attempt.has(Completed) and (not attempt.has(Failed) or _progressed(attempt))
