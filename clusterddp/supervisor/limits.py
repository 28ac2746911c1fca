"""When a run must not have another attempt: a pure function of its history and its job definition."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.history.codec import decode
from clusterddp.history.steps import ChildDied
from clusterddp.history.words import ATTEMPT_ENDS, WITHOUT_RANKS
from clusterddp.jobdef.job import Job
from clusterddp.reporter import duration
from clusterddp.rundir.schemas import is_count
from clusterddp.slurm.run_states import Cause

#: After this many consecutive attempts that end at their time limit, or by a transient failure, without a new
#: checkpoint, the run fails: the next attempt would not get further.
FRUITLESS = 3


#: The script has written a checkpoint in its own format: one that matches ``resume``, or ``requeue(saved=...)``.
SAVED_ITSELF = ("own_checkpoint", "saved")
#: Rank 0, or a process that it has started, has completed a step, or continues from one.
STEPPED = ("training", "resumed", "steps_seen", "child_step")
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
    before, ended by this exception in less than LONG_S.
    """

    steps: int | None = None
    seconds: float = 0.0
    earlier: bool = False
    last_failure: str | None = None
    saved: bool = False
    quickly: int = 0


def progress(
    events: Iterable[Mapping[str, Any]], attempt: int, reached: int | None, now: float, made: int | None = None
) -> Progress:
    """The progress of an attempt, which has ``reached`` this step, before its failure is in the history.

    ``made``: how many steps of unknown number rank 0 has made at least, if that is known.
    """
    events = list(events)
    own = [event for event in events if event["attempt"] == attempt]
    first = began(own)
    earlier = sorted({event["attempt"] for event in events if event["attempt"] < attempt})
    failed = [event for event in events if event["event"] == "rank_failed" and event["attempt"] < attempt]
    progressed = [
        number for number in earlier if _progressed([event for event in events if event["attempt"] == number])
    ]
    steps = None if first is None else max(0, (first if reached is None else reached) - first)
    if _seen(own):
        steps = max(1, made or 0, steps or 0)
    since = failed and progressed and progressed[-1] > failed[-1]["attempt"]
    last = failed[-1].get("raised") if failed and not since else None
    return Progress(
        steps,
        now - own[0]["time"] if own else 0.0,
        bool(progressed),
        last,
        bool(new_checkpoints(own)),
        0 if last is None else _quickly(events, attempt, last),
    )


def _quickly(events: list[Mapping[str, Any]], attempt: int, raised: str) -> int:
    """How many attempts in a row before this one ended by this exception in less than LONG_S."""
    count = 0
    while own := [event for event in events if event["attempt"] == attempt - count - 1]:
        same = any(event["event"] == "rank_failed" and event.get("raised") == raised for event in own)
        if not same or own[-1]["time"] - own[0]["time"] >= LONG_S:
            break
        count += 1
    return count


def lost_steps(events: Iterable[Mapping[str, Any]], attempt: int) -> int:
    """The steps of unknown number, at least, that an attempt repeats if it begins again: those of the attempts before,
    from the last one that began again on."""
    earlier = [event for event in events if event["attempt"] < attempt]
    began_again = max((event["attempt"] for event in earlier if event["event"] == "not_read"), default=0)
    made: list[Any] = [event.get("made") for event in earlier if event["attempt"] >= began_again]
    return sum(steps for steps in made if is_count(steps))


def own_checkpoint(events: Iterable[Mapping[str, Any]], attempt: int) -> str | None:
    """The newest checkpoint that the script itself is known to have written in this attempt, if any."""
    own = [event for event in events if event["event"] in SAVED_ITSELF and event["attempt"] == attempt]
    return own[-1].get("file") if own else None


def new_checkpoints(own: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The script's own checkpoints in an attempt, of its events, that are further than the one it continued from.

    A script that began again writes the same ones once more. Numbers in names show how far each one is, unless they
    become smaller in the course of an attempt, as those of files that are written in turn. Without numbers, each one
    counts if the script has read the one that it was to continue from.
    """
    own = list(own)
    loaded = next((event.get("file") for event in own if event["event"] == "own_resume"), None)
    unread = any(event["event"] == "not_read" for event in own)
    found: list[Mapping[str, Any]] = []
    before: str | None = None
    for event in own:
        if event["event"] not in SAVED_ITSELF:
            continue
        file = str(event.get("file"))
        numbered = loaded is not None and re.sub(r"\d+", "#", file) == re.sub(r"\d+", "#", loaded) != loaded
        in_turn = before is not None and before != file and not _is_further(file, before)
        if in_turn or (_is_further(file, str(loaded)) if numbered else not (unread and event["event"] != "saved")):
            found.append(event)
        before = file
    return found


def _is_further(file: str, than: str) -> bool:
    """Whether one of the numbers in a name is larger than in another."""
    return any(int(a) > int(b) for a, b in zip(*(re.findall(r"\d+", name) for name in (file, than)), strict=False))


def began(events: Iterable[Mapping[str, Any]]) -> int | None:
    """The step at which an attempt's loop began, of the attempt's events. None if it has begun none."""
    steps = [event.get("step") for event in events if event["event"] in ("training", "resumed")]
    return steps[0] if steps and is_count(steps[0]) else None


def _seen(events: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an attempt has completed a step of unknown number."""
    return any(event["event"] in ("steps_seen", "child_step") for event in events)


def _progressed(events: list[Mapping[str, Any]]) -> bool:
    """Whether an attempt has completed a step or saved a checkpoint. If it records neither, whether it ran for a
    minute."""
    if new_checkpoints(events) or _seen(events):
        return True
    if (first := began(events)) is None:
        ran = [event["time"] for event in events if event["event"] not in WITHOUT_RANKS]
        return bool(ran) and ran[-1] - ran[0] >= PROGRESS_S
    made = [event for event in events if event["event"] != "checkpoint_damaged"]  # which may be of a later step
    return any(is_count(event.get("step")) and event["step"] > first for event in made)


#: A script that exits with code 0 in less than this share of the time of the attempt before may not have trained.
SHORT = 0.1


def doubt(events: Iterable[Mapping[str, Any]], attempt: int, sees_steps: bool = False) -> str | None:
    """Why the exit of a script with code 0, in this attempt, may not mean that it is done. None if it does.

    Some scripts do so when they find what they, or an earlier run, wrote before, and some do not resume. A script whose
    steps are seen (``sees_steps``) must have made one, and have read its checkpoint. Of any other only the time counts:
    an attempt's, from the start of the script to its end.
    """
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        by_attempt.setdefault(event["attempt"], []).append(event)
    own = by_attempt.get(attempt, [])
    if died := next((event for event in map(decode, own) if isinstance(event, ChildDied)), None):
        return f"unconfirmed: {died.what()}, and the script exited with code 0"
    if unread := next((event["file"] for event in own if event["event"] == "not_read"), None):
        return f"unconfirmed: the script did not read {unread}, so it began again"
    ran = {number: seconds for number, own in by_attempt.items() if (seconds := _script_s(own)) is not None}
    if attempt not in ran:
        return None
    begin = f"unconfirmed: the script exited with code 0 after {duration(ran[attempt])}"
    before = [number for number in ran if number < attempt and _interrupted(by_attempt[number])]
    stepped = any(_made_steps(by_attempt[number]) for number in before)
    if stepped or _made_steps(own):
        why = "without completing a step, although an earlier attempt completed some"
        return None if _made_steps(own) else f"{begin} {why}"
    if sees_steps:
        return (
            f"{begin}, and no step was seen. Where clusterddp cannot see the steps, name what rank 0 prints, such as "
            "`steps: {log: 'step (\\d+)'}`, or set `steps: off`"
        )
    if not before or ran[attempt] >= SHORT * ran[last := max(before)]:
        return None
    return f"{begin}, less than a tenth of the {duration(ran[last])} of attempt {last}"


def _script_s(events: list[Mapping[str, Any]]) -> float | None:
    """For how long an attempt's script ran on rank 0. None if it was not started."""
    starts = [event["time"] for event in events if (event["event"], event.get("phase")) == ("phase", "importing")]
    ends = [event["time"] for event in events if (event["event"], event.get("phase")) == ("phase", "ending")]
    return (ends or [events[-1]["time"]])[-1] - starts[0] if starts else None


def _interrupted(events: list[Mapping[str, Any]]) -> bool:
    """Whether an attempt's script still had work to do: it neither completed nor failed before it had begun."""
    ends = {event["event"] for event in events} & {"completed", "failed"}
    return not ends or (ends == {"failed"} and _progressed(events))


def _made_steps(events: list[Mapping[str, Any]]) -> bool:
    return any(event["event"] in STEPPED for event in events)


def exceeded(job: Job, events: Iterable[Mapping[str, Any]], now: float) -> str | None:
    """Why there must not be another attempt. None if there may be one."""
    events = list(events)
    made = attempts_made(events)
    if job.limits.attempts is not None and made >= job.limits.attempts:
        return f"limits.attempts ({job.limits.attempts}) reached"
    hours = used_gpu_hours(job, events, now)
    if job.limits.gpu_hours is not None and hours >= job.limits.gpu_hours:
        return (
            f"limits.gpu_hours ({job.limits.gpu_hours:g}) reached: {hours:.2f} used. Raise it with --change --set "
            "limits.gpu_hours=N"
        )
    if _fruitless(job, events) >= FRUITLESS:
        failed = events[-1]["event"] == "restarted" or _found_busy(events[-1])
        ended, remedy = ("failed", "") if failed else ("reached their time limit", ". Request more time")
        which = f" that matches {' or '.join(job.resume.checkpoint)}" if job.resume else ""
        return f"{FRUITLESS} consecutive attempts {ended} without saving a new checkpoint{which}{remedy}"
    return None


def attempts_made(events: Iterable[Mapping[str, Any]]) -> int:
    """How many attempts have started their ranks."""
    return len({event["attempt"] for event in events if event["event"] not in WITHOUT_RANKS})


def gpu_hours_end(
    job: Job, events: Iterable[Mapping[str, Any]], attempt: int, began: float, idle_nodes: int = 0
) -> float:
    """When ``limits.gpu_hours`` is reached, in unix seconds, if an attempt that begins now runs on. Infinite without a
    limit. ``idle_nodes``: those of its job that have no ranks."""
    if job.limits.gpu_hours is None:
        return math.inf
    start = {"event": "started", "attempt": attempt, "time": began}
    left = job.limits.gpu_hours - used_gpu_hours(job, [*events, start], began)
    return began + 3600 * left / _gpus(job, job.world_size, idle_nodes)


def used_gpu_hours(job: Job, events: Iterable[Mapping[str, Any]], now: float) -> float:
    """Hours times GPUs, from each attempt's first event to its last. The newest attempt's last to now.

    An attempt whose record lacks the number of its ranks counts with those of ``job``.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    gpus: dict[int, int] = {}
    ended: set[int] = set()
    for event in events:
        if event["event"] not in WITHOUT_RANKS:
            first.setdefault(event["attempt"], event["time"])
        if event["event"] == "started" and is_count(event.get("ranks")):
            idle = sum(len(event[name]) for name in ("spares", "aside") if isinstance(event.get(name), list))
            gpus[event["attempt"]] = _gpus(job, event["ranks"], idle)
        last[event["attempt"]] = event["time"]
        if event["event"] in ATTEMPT_ENDS:
            ended.add(event["attempt"])
    if first and max(first) not in ended:  # time after the end is time in the queue
        last[max(first)] = now
    usual = _gpus(job, job.world_size, 0)
    return sum((last[attempt] - start) * gpus.get(attempt, usual) for attempt, start in first.items()) / 3600


def _gpus(job: Job, ranks: int, idle_nodes: int) -> int:
    """The GPUs of an attempt's nodes. With device cpu: its ranks, and those that its idle nodes could have."""
    return (ranks + idle_nodes * job.ranks_per_node) * (job.gpus_per_rank if job.device == "cuda" else 1)


def _fruitless(job: Job, events: list[Mapping[str, Any]]) -> int:
    """How many consecutive attempts, up to the newest, failed or reached their time limit without a new checkpoint.

    A script whose checkpoints are unknown may save on its own: then attempts that reached their time limit do not
    count, nor do long ones. One that reached it in less than a minute does: the limit leaves no time to train.
    """
    needs_own = job.resume is not None and bool(job.resume.args or job.resume.replace)
    saves_alone = any("log" in event for event in events if event["event"] == "training")
    known = any(
        event["event"] in SAVED_ITSELF or (event.get("step") is not None and not saves_alone) for event in events
    )
    count, records = 0, needs_own or known
    for attempt in sorted({event["attempt"] for event in events if event["event"] not in WITHOUT_RANKS}, reverse=True):
        own = [event for event in events if event["attempt"] == attempt]
        failed, timed = any(map(_failed, own)), any(map(_timed, own))
        lasted_s = own[-1]["time"] - own[0]["time"]
        if not records and lasted_s >= LONG_S:
            break
        saved = bool(new_checkpoints(own)) or any(event["event"] == "checkpoint" for event in own)
        if not (failed or (timed and (records or lasted_s < PROGRESS_S))) or saved:
            break
        count += 1
    return count


def _failed(event: Mapping[str, Any]) -> bool:
    """A resubmission for a cause unknown to the controller follows the failure of a node, which is excluded."""
    elsewhere = event["event"] == "resubmitted" and event.get("cause") == Cause.NONE.value
    drained = event.get("cause") == Cause.DRAIN_REQUESTED.value
    return (event["event"] == "restarted" and not drained) or elsewhere or _found_busy(event)


def _found_busy(event: Mapping[str, Any]) -> bool:
    return event["event"] in ATTEMPT_ENDS and event.get("cause") == Cause.NODES_BUSY.value


def _timed(event: Mapping[str, Any]) -> bool:
    return event.get("cause") in (Cause.TIME_LIMIT.value, Cause.TIMED_OUT.value)


def held(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The user's ``clusterddp stop`` in the newest attempt, after which only the user may continue the run."""
    events = list(events)
    newest = max((event["attempt"] for event in events), default=None)
    own = [event for event in events if event["attempt"] == newest]
    return next((event for event in own if event["event"] == "requested" and event.get("request") == "stop"), None)
