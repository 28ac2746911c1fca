"""The product with one mistake each, which the simulation must find: small changes of named functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from clusterddp.checkpoint import store
from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.sharded import folder
from clusterddp.checkpoint.sharded.folder import Manifest, RankFile, ShardedCheckpoint
from clusterddp.checkpoint.sharded.rank_files import RankFiles
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.errors import CheckpointError
from clusterddp.failures import node_memory, placement
from clusterddp.failures.hangs import Watch
from clusterddp.history.ends import ResubmissionRefused, Resubmitted
from clusterddp.history.view import Events
from clusterddp.messages import orders
from clusterddp.messages.reports import Committing, Saving
from clusterddp.messages.requests import Committed
from clusterddp.rundir.claims import Claim
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs import waiting
from clusterddp.slurm import commands
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor import controller, decide, lease, main, recovery, user_requests, verdict
from clusterddp.supervisor.attempt import Attempt
from clusterddp.supervisor.attempt_state import Broadcast
from clusterddp.supervisor.controller import SlurmController
from clusterddp.supervisor.history import History
from clusterddp.supervisor.hook import Hook
from clusterddp.supervisor.recovery import Recovery
from tests.simulation import product
from tests.simulation.history import drawn, play
from tests.simulation.world import Thread

Patches = list[tuple[Any, str, Any]]


def _no_superseded_check() -> Patches:
    """Supervisors, ranks and saves do not notice a newer attempt."""
    return [(RunDirectory, "superseded", lambda *_: False)]


def _requeue_without_asking_again() -> Patches:
    """If the answer to a requeue is lost, the supervisor requeues again without checking the job first."""

    def requeue(recovery: Any, cause: Cause) -> float:
        def ask() -> float:
            recovery._controller.requeue()
            return 0.0

        return commands.patiently(ask, 1e9, 0.5, (commands.SlurmUnavailable,))

    return [(Recovery, "_requeue", requeue)]


def _cancelled_is_not_remembered() -> Patches:
    """The mark that `clusterddp cancel` leaves is ignored."""
    return [(RunDirectory, "cancelled", False)]


def _hold_lifted_at_once() -> Patches:
    """`wait --resubmit` lifts the hold after a requeue within the first second."""
    return [(waiting, "SETTLE_S", -1.0)]


def _resubmitted_without_dependency() -> Patches:
    """A new job is submitted without a dependency on the old one."""
    real = SlurmController.resubmit
    return [(SlurmController, "resubmit", lambda self, without=(), after_this=True: real(self, without, False))]


def _scancel_is_a_preemption() -> Patches:
    """A run is continued after scancel."""
    real = SlurmController.why

    def why(self: SlurmController, notice_s: float) -> Cause:
        cause = real(self, notice_s)
        return Cause.PREEMPTED if cause in (Cause.CANCELLED, Cause.ENDED_IN_GRACE) else cause

    return [(SlurmController, "why", why)]


def _completed_runs_start_again() -> Patches:
    """A starting job does not check whether the run is over."""
    return [(main, "finished", lambda *_: None)]


def _lease_is_free() -> Patches:
    """A run can be submitted and started while another job holds it."""
    return [(lease, "held_by_other", lambda *_: None)]


def _requeue_forgotten() -> Patches:
    """The supervisor records a requeue but never sends it to Slurm."""
    return [(SlurmController, "requeue", lambda _: None)]


def _preempted_is_done() -> Patches:
    """A preempted attempt completes the run."""
    follows = {**verdict._FOLLOWS, Cause.PREEMPTED: verdict.Action.COMPLETE}
    return [(verdict, "_FOLLOWS", follows)]


def _end_not_recorded() -> Patches:
    """The end of an attempt is not recorded."""
    return [(Recovery, "_add_end", lambda *_, **__: None)]


def _no_outcome() -> Patches:
    """The outcome of a run is not written."""
    return [(History, "conclude", lambda *_, **__: True)]


def _oldest_checkpoint() -> Patches:
    """An attempt resumes from the oldest checkpoint."""
    real = Checkpoints.candidates
    return [(Checkpoints, "candidates", lambda self: real(self)[::-1])]


def _everything_is_deleted() -> Patches:
    """A superseded attempt still saves and deletes checkpoints."""
    return [(Checkpoints, "check_newest", lambda _: None)]


def _resubmit_always() -> Patches:
    """`wait --resubmit` resubmits a run however its job ended, even after scancel."""
    return [(waiting.Resubmitter, "_should_continue", lambda *_: True)]


def _hold_of_another_job() -> Patches:
    """`wait --resubmit` does not restart the timer of the hold for a different job."""

    def lift(hold: Any, job: Any) -> bool:
        if job.state != "PENDING" or job.reason != "BeginTime" or not job.restarts:
            return False
        if job.restarts != (hold._of or ("", 0))[1]:
            hold._of, hold._since = (job.job_id, job.restarts), waiting.time.monotonic()
        if waiting.time.monotonic() - hold._since < waiting.SETTLE_S:
            return False
        commands.lift_hold(job.job_id)
        return True

    return [(waiting.Hold, "lift_when_safe", lift)]


def _a_busy_controller_ends_a_start() -> Patches:
    """A starting job asks Slurm once who holds the run, and fails if it gets no answer."""
    asked_once = SimpleNamespace(**{**vars(commands), "patiently": lambda ask, *_: ask()})
    return [(main, "slurm", asked_once)]


def _limits_are_ignored() -> Patches:
    """A run that reaches one of its limits, or makes no progress within its time limit, is continued."""
    return [(recovery, "exceeded", lambda *_: None), (main, "exceeded", lambda *_: None)]


def _a_submission_ends_with_its_start() -> Patches:
    """A starting job removes the record of its submission at once (seed 1191)."""
    real = lease.take

    def take(run: RunDirectory, attempt: int, me: Claim) -> Any:
        submission = real(run, attempt, me)
        lease.unlink(run.submitted_file)
        return submission

    return [(lease, "take", take)]


def _hidden_outcomes_are_not_waited_for() -> Patches:
    """`wait`, with and without `--resubmit`, do not allow for an outcome that the disk does not show yet."""
    return [(RunDirectory, "may_be_over", lambda *_: False)]


def _stop_is_forgotten() -> Patches:
    """After `clusterddp stop` the run is requeued."""
    follows = {**verdict._FOLLOWS, Cause.STOP_REQUESTED: verdict.Action.AGAIN}
    return [
        (verdict, "_FOLLOWS", follows),
        (main, "stop_request", lambda _: None),
        (waiting, "stop_request", lambda _: None),
    ]


def _the_last_failure_is_shown() -> Patches:
    """The rank that failed last is reported as the first failure."""
    real = verdict._in_order
    return [(verdict, "_in_order", lambda failures: real(failures)[::-1])]


def _hook_is_told_again() -> Patches:
    """The hook is called again for an event that it was called for before."""
    real = Hook.call

    def call(hook: Any, word: str, event: Mapping[str, Any]) -> None:
        hook._called.clear()
        real(hook, word, event)

    return [(Hook, "call", call)]


def _controller_asked_all_the_time() -> Patches:
    """A supervisor queries Slurm every two seconds."""
    return [(controller, "pause_s", lambda *_: 0.0)]


def _saves_are_promised() -> Patches:
    """`save` reports success before the checkpoint is committed."""

    def on_saving(state: Any, waiting: Any, answer: Saving) -> Any:
        return user_requests._finish(state, waiting.request, Committed(answer.step or 0))

    return [(user_requests, "_on_saving", on_saving)]


def _a_new_job_survives_scancel() -> Patches:
    """A job that is scancelled while it resubmits the run does not cancel the new job."""

    def hand_over(recovery: Any, verdict: Any, new: str) -> int:
        recovery._add_end(partial(Resubmitted, job=new), verdict)
        return int(recovery._controller.again_code)

    return [(Recovery, "_hand_over", hand_over)]


def _lease_not_taken() -> Patches:
    """An attempt does not record that it holds the run."""
    return [(lease, "take", lambda *_: None)]


def _newest_checkpoint_is_deleted() -> Patches:
    """The newest checkpoint is deleted as an old one."""
    return [(Checkpoints, "old", lambda self: self.candidates())]


def _resubmit_gives_up_a_lost_node() -> Patches:
    """`wait --resubmit` does not resubmit a run whose job ended because a node failed."""
    return [(waiting, "_INVOLUNTARY_ENDS", frozenset())]


def _peers_are_never_dismissed() -> Patches:
    """The other ranks are not told to exit after a rank has failed."""
    return [(decide, "_dismiss_peers", lambda state, *_, **__: (state, []))]


def _a_silent_node_is_waited_for() -> Patches:
    """The supervisor waits forever for ranks on an unresponsive node."""
    return [(decide, "_lose_nodes", lambda state: (state, []))]


def _hangs_are_not_seen() -> Patches:
    """The watchdog never reports a hang."""
    return [(Watch, "look", lambda *_: [])]


def _a_rank_that_trains_on_alone_commits() -> Patches:
    """Rank 0 commits a checkpoint although another rank is lost."""

    def on_committing(state: Any, asking: Committing, now: float) -> Any:
        return state, [Broadcast(orders.Commit(asking.question), frozenset((0,)))]

    return [(decide, "_on_committing", on_committing)]


def _a_connected_rank_has_made_the_step() -> Patches:
    """Rank 0 commits a checkpoint as long as the supervisor has not noticed that another rank is lost."""
    real = decide._on_committing

    def on_committing(state: Any, asking: Committing, now: float) -> Any:
        if state.lost_at:
            return real(state, asking, now)
        return state, [Broadcast(orders.Commit(asking.question), frozenset((0,)))]

    return [(decide, "_on_committing", on_committing)]


def _an_array_stands_for_its_task() -> Patches:
    """A task of an array requeues or cancels all tasks of it."""
    return [(commands, "own_job_id", lambda environ: environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID"))]


def _a_frozen_start_begins_an_attempt() -> Patches:
    """A supervisor whose job Slurm has restarted begins an attempt (seed 1003605)."""
    return [(lease, "restarted", lambda *_: False)]


def _a_started_successor_survives_scancel() -> Patches:
    """A scancel is ignored once the job that was submitted has begun an attempt (seed 2201975)."""

    def is_cancelled(recovery: Any) -> bool:
        return recovery._why() in (Cause.CANCELLED, Cause.ENDED_IN_GRACE)

    return [(Recovery, "_is_cancelled", is_cancelled)]


def _unjoined_ranks_are_waited_for() -> Patches:
    """A job that outlives its nodes waits for a rank that was lost before it joined (seed 2124)."""
    return [(decide, "lose_unjoined", lambda state, _: state)]


def _the_history_waits_for_slurm() -> Patches:
    """An attempt records nothing until Slurm has told the grace period (seed 16819)."""
    tell, record = Attempt._tell_notice, Attempt._record_start

    def record_start(attempt: Attempt) -> None:
        tell(attempt)
        record(attempt)

    return [(Attempt, "_record_start", record_start), (Attempt, "_tell_notice", lambda _: None)]


def _a_node_that_was_left_takes_ranks_again() -> Patches:
    """After an attempt has moved to a spare, or to fewer nodes, the next one uses the first nodes again."""
    real = placement.place
    return [(main, "place", lambda job, allocated, _, start, now: real(job, allocated, Events(), start, now))]


def _a_spare_that_is_down_takes_ranks() -> Patches:
    """A supervisor moves to a spare without asking Slurm whether it works."""
    real = placement.choose
    return [(recovery, "choose", lambda job, placed, leave, _: real(job, placed, leave, None))]


def _a_run_never_shrinks() -> Patches:
    """A job with a range of nodes ends when it loses one."""
    real = placement.choose

    def choose(*args: Any) -> placement.Choice:
        choice = real(*args)
        shrinks = choice.course is placement.Course.SHRINK
        return placement.Choice(placement.Course.NEW_JOB, choice.why) if shrinks else choice

    return [(recovery, "choose", choose)]


def _a_run_that_fails_twice_on_a_node_has_it_avoided() -> Patches:
    """Two failures of one run count as those of two runs."""
    real = node_memory.weight

    def weight(failures: Sequence[node_memory.NodeFailure], now: float) -> float:
        return real([replace(failure, run=f"{number}") for number, failure in enumerate(failures)], now)

    return [(node_memory, "weight", weight)]


def _any_number_of_nodes_is_avoided() -> Patches:
    """A third of a partition may be avoided."""
    return [(node_memory, "MOST", 0.34)]


def _new_jobs_forget_other_runs() -> Patches:
    """A job that a supervisor submits does not avoid the nodes on which other runs failed."""
    forgetful = SimpleNamespace(**{**vars(node_memory), "avoided": lambda *_: []})
    return [(controller, "node_memory", forgetful)]


def _a_node_that_was_shut_down_takes_ranks_again() -> Patches:
    """A supervisor does not ask a node whose ranks left no trace, and waits for it in the next attempt."""
    return [(SlurmController, "unanswering", lambda *_: ())]


def _only_a_timeout_is_no_answer() -> Patches:
    """Slurm refuses a request unless its command names a timeout or a lost connection."""
    no_answer = re.compile("Unable to contact slurm controller|Connection refused|timed out|Unexpected message")
    return [(commands, "is_refusal", lambda _, lines: not any(map(no_answer.search, lines)))]


def _a_refused_job_ends_the_run() -> Patches:
    """If Slurm refuses a new job, the supervisor does not requeue its own."""

    def requeued(recovery: Any, verdict: Any) -> int:
        if recovery._history.view.has(ResubmissionRefused):
            raise commands.SlurmError("not tried")
        return real(recovery, verdict)

    real = Recovery._requeued
    return [(Recovery, "_requeued", requeued)]


def _a_step_that_waits_for_busy_nodes_is_waited_for() -> Patches:
    """A supervisor waits without bound for srun, which waits until an earlier step has ended."""
    return [(SlurmController, "waits_for_nodes", lambda *_: False)]


def _a_shard_is_announced_before_it_is_there() -> Patches:
    """The manifest of a sharded checkpoint is committed before the last shard: ranks announce files that they rename
    seconds later."""
    real = RankFiles.commit

    def commit(files: RankFiles, temporary: Path) -> RankFile:
        world, size = product._now.world, folder.status(temporary).st_size

        def rename() -> None:
            world.sleep(5.0)
            real(files, temporary)

        Thread(world.process, rename, "late").start()
        return RankFile(size, product._FORMAT.read_head(temporary).checksum)

    return [(RankFiles, "commit", commit)]


def _shards_of_superseded_attempts_count() -> Patches:
    """A folder is named by its step and the newest attempt, and a superseded attempt's ranks still write into it."""

    def sharded(checkpoints: Checkpoints, step: int) -> ShardedCheckpoint:
        newest = checkpoints._directory.newest_attempt() or 0
        return ShardedCheckpoint(checkpoints.folder / f"step-{step:012d}.attempt-{newest}", step, newest)

    return [(Checkpoints, "sharded", sharded), (Checkpoints, "check_newest", lambda _: None)]


def _a_folder_counts_by_its_name() -> Patches:
    """A folder of a sharded model is a checkpoint with whatever files are in it, if it has no manifest."""
    real = ShardedCheckpoint.manifest

    def manifest(checkpoint: ShardedCheckpoint) -> Manifest:
        if checkpoint.manifest_file in checkpoint.files:
            return real(checkpoint)
        files = [file for file in checkpoint.files if not file.name.startswith(".")]
        if not files:
            raise CheckpointError("it is empty")
        found = [RankFile(folder.status(file).st_size, product._FORMAT.read_head(file).checksum) for file in files]
        return Manifest(checkpoint.step, checkpoint.attempt, {}, tuple(found), {})

    def visible(directory: RunDirectory) -> Iterator[Checkpoint]:
        yield from real_visible(directory)
        yield from (found for found in store.incomplete(directory) if isinstance(found, ShardedCheckpoint))

    real_visible = store.visible
    return [(store, "visible", visible), (ShardedCheckpoint, "manifest", manifest)]


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
        _resubmit_always,
        _hold_of_another_job,
        _a_busy_controller_ends_a_start,
        _limits_are_ignored,
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
        _resubmit_gives_up_a_lost_node,
        _peers_are_never_dismissed,
        _a_silent_node_is_waited_for,
        _hangs_are_not_seen,
        _a_rank_that_trains_on_alone_commits,
        _a_connected_rank_has_made_the_step,
        _an_array_stands_for_its_task,
        _a_frozen_start_begins_an_attempt,
        _a_started_successor_survives_scancel,
        _unjoined_ranks_are_waited_for,
        _the_history_waits_for_slurm,
        _a_node_that_was_left_takes_ranks_again,
        _a_spare_that_is_down_takes_ranks,
        _a_run_never_shrinks,
        _a_run_that_fails_twice_on_a_node_has_it_avoided,
        _any_number_of_nodes_is_avoided,
        _new_jobs_forget_other_runs,
        _a_node_that_was_shut_down_takes_ranks_again,
        _only_a_timeout_is_no_answer,
        _a_refused_job_ends_the_run,
        _a_step_that_waits_for_busy_nodes_is_waited_for,
        _a_shard_is_announced_before_it_is_there,
        _shards_of_superseded_attempts_count,
        _a_folder_counts_by_its_name,
    )
}


#: How many histories, from seed 0 on, find each of them: the last one violates what must be true.
FOUND_AFTER: Mapping[str, int] = {
    "no superseded check": 113,
    "requeue without asking again": 2693,
    "cancelled is not remembered": 28,
    "hold lifted at once": 5,
    "resubmitted without dependency": 691,
    "scancel is a preemption": 9,
    "completed runs start again": 21,
    "lease is free": 10_336,
    "requeue forgotten": 3,
    "preempted is done": 4,
    "end not recorded": 35,
    "no outcome": 1,
    "oldest checkpoint": 14,
    "everything is deleted": 1468,
    "resubmit always": 199,
    "hold of another job": 677,
    "a busy controller ends a start": 4163,
    "limits are ignored": 948,
    "a submission ends with its start": 1522,
    "hidden outcomes are not waited for": 360,
    "stop is forgotten": 35,
    "the last failure is shown": 24,
    "hook is told again": 161,
    "controller asked all the time": 581,
    "saves are promised": 14,
    "lease not taken": 476,
    "newest checkpoint is deleted": 1,
    "resubmit gives up a lost node": 768,
    "peers are never dismissed": 233,
    "a silent node is waited for": 1669,
    "hangs are not seen": 796,
    "a rank that trains on alone commits": 1214,
    "a connected rank has made the step": 1214,
    "an array stands for its task": 3,
    "unjoined ranks are waited for": 2125,
    "a new job survives scancel": 1352,
    "the history waits for slurm": 98,
    "a frozen start begins an attempt": 4992,
    "a node that was left takes ranks again": 53,
    "a spare that is down takes ranks": 13_701,
    "a run never shrinks": 349,
    "a run that fails twice on a node has it avoided": 63,
    "any number of nodes is avoided": 63,
    "new jobs forget other runs": 2409,
    "a started successor survives scancel": 8465,
    "a node that was shut down takes ranks again": 115,
    "only a timeout is no answer": 4,
    "a refused job ends the run": 208,
    "a step that waits for busy nodes is waited for": 636,
    "a shard is announced before it is there": 2,
    "shards of superseded attempts count": 1036,
    "a folder counts by its name": 819,
}
#: Of a plan whose model is sharded.
SHARDED = "sharded"
#: The kinds of faults without which some of them cannot be seen: other histories are drawn and counted, but not played.
NEEDS: Mapping[str, set[str]] = {
    "requeue without asking again": {"answers lost", "scancel"},
    "resubmitted without dependency": {"preempt"},
    "everything is deleted": {"freeze the host"},
    "resubmit always": {"scancel"},
    "hold of another job": {"preempt", "lose a node"},
    "a busy controller ends a start": {"preempt", "answers lost"},
    "a new job survives scancel": {"scancel"},
    "resubmit gives up a lost node": {"lose a node"},
    "peers are never dismissed": {"kill a rank"},
    "a rank that trains on alone commits": {"kill a rank"},
    "a connected rank has made the step": {"kill a rank"},
    "a silent node is waited for": {"lose a node"},
    "hangs are not seen": {"hang"},
    "a frozen start begins an attempt": {"freeze the host"},
    "a started successor survives scancel": {"lose a node", "scancel"},
    "unjoined ranks are waited for": {"lose a node"},
    "a node that was left takes ranks again": {"lose a node"},
    "a spare that is down takes ranks": {"lose a node"},
    "a run never shrinks": {"lose a node"},
    "a node that was shut down takes ranks again": {"shut down a node"},
    "a step that waits for busy nodes is waited for": {"kill a stepd"},
    "a shard is announced before it is there": {SHARDED},
    "shards of superseded attempts count": {SHARDED, "freeze the host"},
    "a folder counts by its name": {SHARDED},
}


def found_after(name: str, first: int, most: int) -> tuple[int, str] | None:
    """How many histories, from seed ``first`` on, find the mutant, and what it violates; None if ``most`` do not."""
    needs = NEEDS.get(name, set())
    with product.installed():
        patches = [mock.patch.object(owner, attribute, by) for owner, attribute, by in MUTANTS[name]()]
        for patch in patches:
            patch.start()
        try:
            for number in range(most):
                plan = drawn(first + number)
                if not needs <= {*(fault.kind for fault in plan.faults), *([SHARDED] if plan.script.sharded else [])}:
                    continue
                if violations := play(plan).violations:
                    assert "(mutants.py:" not in violations[0], f"{name} does not fit the product: {violations[0]}"
                    return number + 1, violations[0]
            return None
        finally:
            for patch in reversed(patches):
                patch.stop()
