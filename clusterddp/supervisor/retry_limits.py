"""When a run must not have another attempt: a pure function of its history and its job definition."""

from __future__ import annotations

import math

from clusterddp.history.beginnings import Phase, Started, Training
from clusterddp.history.checkpoints import Checkpoint, SavedItself
from clusterddp.history.ends import Continues, Restarted, Resubmitted
from clusterddp.history.event import Event
from clusterddp.history.stops import Requested
from clusterddp.history.view import AttemptView, RunView
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.slurm_kinds import time_text
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.attempt_progress import LONG_S, PROGRESS_S, STEPPED, new_checkpoints

#: After this many consecutive attempts that end at their time limit, or by a transient failure, without a new
#: checkpoint, the run fails: the next attempt would not get further.
FRUITLESS = 3


def exceeded(job: Job, history: RunView, now: float) -> str | None:
    """Why there must not be another attempt. None if there may be one."""
    if job.limits.attempts is not None and history.attempts_made >= job.limits.attempts:
        return f"limits.attempts ({job.limits.attempts}) reached"
    hours = used_gpu_hours(job, history, now)
    if job.limits.gpu_hours is not None and hours >= job.limits.gpu_hours:
        return (
            f"limits.gpu_hours ({job.limits.gpu_hours:g}) reached: {hours:.2f} used. Raise it with --change --set "
            "limits.gpu_hours=N"
        )
    fruitless = _fruitless(job, history)
    if len(fruitless) < FRUITLESS:
        return None
    *_, newest = history
    which = f" that matches {' or '.join(job.resume.checkpoint)}" if job.resume else ""
    if isinstance(newest, Restarted) or _cause(newest) == Cause.NODES_BUSY.value:
        return f"{FRUITLESS} consecutive attempts failed without saving a new checkpoint{which}"
    stepped = any(attempt.has(*STEPPED) for attempt in fruitless)
    how = f"without saving a new checkpoint{which}" if stepped else "before their first step"
    ended = f"{FRUITLESS} consecutive attempts reached their time limit {how}"
    if job.time_min_s is None:
        return f"{ended}. Request more time"
    return (
        f"{ended}. `time_min` ({time_text(job.time_min_s)}) allows such limits. Raise it with --change --set time_min=T"
    )


def gpu_hours_end(job: Job, history: RunView, began: float, idle_nodes: int = 0) -> float:
    """When ``limits.gpu_hours`` is reached, in unix seconds, if an attempt that begins now runs on. Infinite without a
    limit. ``idle_nodes``: those of its job that have no ranks."""
    if job.limits.gpu_hours is None:
        return math.inf
    left = job.limits.gpu_hours - used_gpu_hours(job, history, None)
    return began + 3600 * left / _gpus(job, job.world_size, idle_nodes)


def used_gpu_hours(job: Job, history: RunView, now: float | None) -> float:
    """Hours times GPUs, from each attempt's first event to its last. If the newest attempt has no end, it runs until
    ``now``, if that is given.

    An attempt whose record lacks the number of its ranks counts with those of ``job``.
    """
    seconds = 0.0
    attempts = history.with_ranks
    for attempt in attempts:
        started = attempt.last(Started)
        idle = 0 if started is None else len(started.spares) + len(started.aside)
        ran_s = attempt.ran_s
        if now is not None and attempt is attempts[-1] and attempt.is_open:  # time after the end is time in the queue
            ran_s += now - attempt.last_time
        seconds += ran_s * _gpus(job, job.world_size if started is None else started.ranks, idle)
    return seconds / 3600


def _gpus(job: Job, ranks: int, idle_nodes: int) -> int:
    """The GPUs of an attempt's nodes. With device cpu: its ranks, and those that its idle nodes could have."""
    return (ranks + idle_nodes * job.ranks_per_node) * (job.gpus_per_rank if job.device == "cuda" else 1)


def _fruitless(job: Job, history: RunView) -> list[AttemptView]:
    """The consecutive attempts, up to the newest, that failed or reached their time limit without a new checkpoint.

    A script whose checkpoints are unknown may save on its own: then attempts that reached their time limit count only
    if it certainly had no time to train, and long ones that failed do not.
    """
    needs_own = job.resume is not None and bool(job.resume.args or job.resume.replace)
    saves_alone = any(event.log is not None for event in history.all(Training))
    known = history.has(SavedItself) or (not saves_alone and any(event.at_step is not None for event in history))
    found, records = list[AttemptView](), needs_own or known
    for attempt in reversed(history.with_ranks):
        failed, timed = any(map(_failed, attempt)), any(map(_timed, attempt))
        without_step = timed and _without_step(job, attempt)
        if not records and not without_step and attempt.lasted_s >= LONG_S:
            break
        if new_checkpoints(attempt) or attempt.has(Checkpoint):
            break
        if not failed and not without_step and not (timed and records):
            break
        found.append(attempt)
    return found


def _without_step(job: Job, attempt: AttemptView) -> bool:
    """Whether an attempt that reached its time limit made no step, as where ``time_min`` is shorter than a start.

    Steps of a script without torch are not seen, nor are any with ``steps: off``. It may have trained if it ran for a
    while.
    """
    phases = {event.phase for event in attempt.all(Phase)}
    if not phases:  # the script was not started
        return True
    if attempt.has(*STEPPED):
        return False
    if job.see_steps and "rendezvous" in phases:  # it has called clusterddp.init()
        return True
    return attempt.lasted_s < (LONG_S if job.see_steps else PROGRESS_S)


def _failed(event: Event) -> bool:
    """A resubmission for a cause unknown to the controller follows the failure of a node, which is excluded."""
    cause = _cause(event)
    elsewhere = isinstance(event, Resubmitted) and cause == Cause.NONE.value
    restarted = isinstance(event, Restarted) and cause != Cause.DRAIN_REQUESTED.value
    return restarted or elsewhere or cause == Cause.NODES_BUSY.value


def _timed(event: Event) -> bool:
    return _cause(event) in (Cause.TIME_LIMIT.value, Cause.TIMED_OUT.value)


def _cause(event: Event) -> str | None:
    return event.cause if isinstance(event, Continues) else None


def stop_request(history: RunView) -> Requested | None:
    """The user's ``clusterddp stop`` in the newest attempt, after which only the user may continue the run."""
    newest = history.newest
    requests = newest.all(Requested) if newest is not None else []
    return next((event for event in requests if event.request == "stop"), None)
