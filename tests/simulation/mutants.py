"""The product with one mistake each, which the simulation must find: small changes of named functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

from clusterddp.checkpoint.store import Checkpoints
from clusterddp.cli.runs import watch
from clusterddp.failures.hangs import Watch
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands
from clusterddp.slurm.cause import Cause
from clusterddp.supervisor import decide, lease, main, monitor, recovery, requests, verdict
from clusterddp.supervisor.controller import SlurmController
from clusterddp.supervisor.history import History
from clusterddp.supervisor.hook import Hook
from clusterddp.supervisor.recovery import Recovery
from tests.simulation import product
from tests.simulation.history import play

Patches = list[tuple[Any, str, Any]]


def _no_superseded_check() -> Patches:
    """Nobody sees a newer attempt: neither supervisors nor ranks, nor who saves."""
    return [(RunDirectory, "superseded", lambda *_: False)]


def _requeue_without_asking_again() -> Patches:
    """A requeue whose answer was lost is repeated without asking whether it was carried out, or the job cancelled."""

    def requeue(recovery: Any, cause: Cause) -> float:
        def ask() -> float:
            recovery._controller.requeue()
            return 0.0

        return commands.patiently(ask, 1e9, 0.5, (commands.SlurmUnavailable,))

    return [(Recovery, "_requeue", requeue)]


def _cancelled_is_not_remembered() -> Patches:
    """The mark of `clusterddp cancel` has no effect."""
    return [(RunDirectory, "cancelled", False)]


def _hold_lifted_at_once() -> Patches:
    """The hold after a requeue is lifted within its first second."""
    return [(watch, "SETTLE_S", -1.0)]


def _resubmitted_without_dependency() -> Patches:
    """A new job does not wait for this one."""
    real = SlurmController.resubmit
    return [(SlurmController, "resubmit", lambda self, without=(), after_this=True: real(self, without, False))]


def _scancel_is_a_preemption() -> Patches:
    """A scancelled job is continued."""
    real = SlurmController.why

    def why(self: SlurmController, notice_s: float) -> Cause:
        cause = real(self, notice_s)
        return Cause.PREEMPTED if cause in (Cause.CANCELLED, Cause.ENDED_IN_GRACE) else cause

    return [(SlurmController, "why", why)]


def _completed_runs_start_again() -> Patches:
    """A start does not look at the outcome."""
    return [(main, "finished", lambda *_: None)]


def _lease_is_free() -> Patches:
    """Whoever holds the run, another may submit and start it."""
    return [(lease, "held_by_other", lambda *_: None)]


def _requeue_forgotten() -> Patches:
    """The history says that the job is requeued, and nobody asks Slurm for it."""
    return [(SlurmController, "requeue", lambda _: None)]


def _preempted_is_done() -> Patches:
    """A preempted attempt counts as the end of the run."""
    follows = {**verdict._FOLLOWS, Cause.PREEMPTED: verdict.Action.COMPLETE}
    return [(verdict, "_FOLLOWS", follows)]


def _end_not_recorded() -> Patches:
    """How an attempt ended is not in the history."""
    return [(Recovery, "_add_end", lambda *_, **__: None)]


def _no_outcome() -> Patches:
    """The outcome of a run is not written."""
    return [(History, "conclude", lambda *_, **__: True)]


def _oldest_checkpoint() -> Patches:
    """An attempt resumes from the oldest checkpoint."""
    real = Checkpoints.candidates
    return [(Checkpoints, "candidates", lambda self: real(self)[::-1])]


def _everything_is_deleted() -> Patches:
    """A superseded attempt deletes, and saves, as if it were the newest."""
    return [(Checkpoints, "check_newest", lambda _: None)]


def _watch_resubmits_always() -> Patches:
    """`watch` continues whatever ended, also after scancel."""
    return [(watch.Watcher, "_should_continue", lambda *_: True)]


def _hold_of_another_job() -> Patches:
    """The time in the hold is that of the run's job before, if that was requeued as often."""

    def lift(hold: Any, job: Any) -> bool:
        if job.state != "PENDING" or job.reason != "BeginTime" or not job.restarts:
            return False
        if job.restarts != (hold._of or ("", 0))[1]:
            hold._of, hold._since = (job.job_id, job.restarts), watch.time.monotonic()
        if watch.time.monotonic() - hold._since < watch.SETTLE_S:
            return False
        commands.lift_hold(job.job_id)
        return True

    return [(watch.Hold, "lift_when_safe", lift)]


def _a_busy_controller_ends_a_start() -> Patches:
    """Who holds the run is asked once, and an error ends the job."""
    asked_once = SimpleNamespace(**{**vars(commands), "patiently": lambda ask, *_: ask()})
    return [(main, "slurm", asked_once)]


def _time_limit_without_progress() -> Patches:
    """A run that reaches its time limit again and again is requeued forever."""
    return [(recovery, "exceeded", lambda *_: None), (main, "exceeded", lambda *_: None)]


def _a_submission_ends_with_its_start() -> Patches:
    """Once a job has taken the lease its submission is forgotten, wherever the attempt can be seen (seed 1191)."""
    real = lease.take

    def take(run: RunDirectory, attempt: int, me: Mapping[str, Any]) -> Any:
        submission = real(run, attempt, me)
        lease.unlink(run.submitted_file)
        return submission

    return [(lease, "take", take)]


def _hidden_outcomes_are_not_waited_for() -> Patches:
    """`watch` and `wait` believe that there is no outcome where they see none."""
    return [(RunDirectory, "may_be_over", lambda *_: False)]


def _stop_is_forgotten() -> Patches:
    """After `clusterddp tell stop` a run is requeued like any other."""
    follows = {**verdict._FOLLOWS, Cause.STOP_REQUESTED: verdict.Action.AGAIN}
    return [(verdict, "_FOLLOWS", follows), (main, "held", lambda _: False), (watch, "held", lambda _: False)]


def _the_last_failure_is_shown() -> Patches:
    """Of the ranks that failed, the last one is called the first."""
    real = verdict._in_order
    return [(verdict, "_in_order", lambda failures: real(failures)[::-1])]


def _hook_is_told_again() -> Patches:
    """The hook is called for each event, also of a kind that it knows."""
    real = Hook.call

    def call(hook: Any, word: str, event: Mapping[str, Any]) -> None:
        hook._told.clear()
        real(hook, word, event)

    return [(Hook, "call", call)]


def _controller_asked_all_the_time() -> Patches:
    """A supervisor asks Slurm every two seconds."""
    return [(monitor, "pause_s", lambda *_: 0.0)]


def _saves_are_promised() -> Patches:
    """`tell save` is answered before the checkpoint is committed."""

    def on_saving(state: Any, waiting: Any) -> Any:
        return requests._finish(state, waiting.request, {"checkpoint": waiting.answers[0].get("step") or 0})

    return [(requests, "_on_saving", on_saving)]


def _a_new_job_survives_scancel() -> Patches:
    """A job that was scancelled while it resubmitted the run leaves the new one."""

    def hand_over(recovery: Any, verdict: Any, new: str) -> int:
        recovery._add_end("resubmitted", verdict, job=new)
        return int(recovery._controller.again_code)

    return [(Recovery, "_hand_over", hand_over)]


def _lease_not_taken() -> Patches:
    """An attempt does not record who holds the run."""
    return [(lease, "take", lambda *_: None)]


def _newest_checkpoint_is_deleted() -> Patches:
    """The newest checkpoint counts as an old one."""
    return [(Checkpoints, "old", lambda self: self.candidates())]


def _watch_gives_up_a_lost_node() -> Patches:
    """`watch` leaves a run whose job lost its node."""
    return [(watch, "_INVOLUNTARY_ENDS", frozenset())]


def _peers_are_never_dismissed() -> Patches:
    """The peers of a failed rank are left alone."""
    return [(decide, "_dismiss_peers", lambda state, *_, **__: (state, []))]


def _a_silent_node_is_waited_for() -> Patches:
    """Ranks on a node that does not answer are never given up."""
    return [(decide, "_lose_nodes", lambda state: (state, []))]


def _hangs_are_not_seen() -> Patches:
    """The watchdog finds nothing."""
    return [(Watch, "look", lambda *_: [])]


#: By name.
MUTANTS: Mapping[str, Callable[[], Patches]] = {
    made.__name__.strip("_").replace("_", " "): made
    for made in (
        _no_superseded_check,
        _requeue_without_asking_again,
        _cancelled_is_not_remembered,
        _hold_lifted_at_once,
        _resubmitted_without_dependency,
        _scancel_is_a_preemption,
        _completed_runs_start_again,
        _lease_is_free,
        _requeue_forgotten,
        _preempted_is_done,
        _end_not_recorded,
        _no_outcome,
        _oldest_checkpoint,
        _everything_is_deleted,
        _watch_resubmits_always,
        _hold_of_another_job,
        _a_busy_controller_ends_a_start,
        _time_limit_without_progress,
        _a_submission_ends_with_its_start,
        _hidden_outcomes_are_not_waited_for,
        _stop_is_forgotten,
        _the_last_failure_is_shown,
        _hook_is_told_again,
        _controller_asked_all_the_time,
        _saves_are_promised,
        _a_new_job_survives_scancel,
        _lease_not_taken,
        _newest_checkpoint_is_deleted,
        _watch_gives_up_a_lost_node,
        _peers_are_never_dismissed,
        _a_silent_node_is_waited_for,
        _hangs_are_not_seen,
    )
}


#: The seed of a history that finds each of them: there may be earlier ones. None: no such history is known.
FOUND_BY: Mapping[str, int | None] = {
    "no superseded check": 1994,
    "requeue without asking again": None,
    "cancelled is not remembered": 44,
    "hold lifted at once": 13,
    "resubmitted without dependency": 434,
    "scancel is a preemption": 55,
    "completed runs start again": 11,
    "lease is free": 6,
    "requeue forgotten": 88,
    "preempted is done": 25,
    "end not recorded": 127,
    "no outcome": 0,
    "oldest checkpoint": 25,
    "everything is deleted": None,
    "watch resubmits always": 624,
    "hold of another job": None,
    "a busy controller ends a start": None,
    "time limit without progress": None,
    "a submission ends with its start": 33,
    "hidden outcomes are not waited for": 226,
    "stop is forgotten": 24,
    "the last failure is shown": 6,
    "hook is told again": 396,
    "controller asked all the time": 20,
    "saves are promised": 97,
    "a new job survives scancel": None,
    "lease not taken": 7,
    "newest checkpoint is deleted": 19,
    "watch gives up a lost node": 4521,
    "peers are never dismissed": None,
    "a silent node is waited for": None,
    "hangs are not seen": 386,
}


def found_after(name: str, first: int, most: int) -> tuple[int, str] | None:
    """How many histories, from seed ``first`` on, find the mutant, and what it violates; None if ``most`` do not."""
    with product.installed():
        patches = [mock.patch.object(owner, attribute, by) for owner, attribute, by in MUTANTS[name]()]
        for patch in patches:
            patch.start()
        try:
            for number in range(most):
                if violations := play(first + number).violations:
                    return number + 1, violations[0]
            return None
        finally:
            for patch in reversed(patches):
                patch.stop()
