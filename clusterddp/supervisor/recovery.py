"""What follows once an attempt's ranks have exited: a restart in place, a requeue, a new job, or the end of the run.

``Recovery.act`` asks the controller why the ranks stopped (``slurm/run_states.Cause``), and ``verdict.judge`` gives the
action for that. A run that exceeds a limit fails instead of a RESTART or AGAIN (``retry_limits.exceeded``).

- RESTART, after a failure that may pass, or to leave a node: ``_restart``. The run gets a new job only if this one has
  too few nodes without a lost or drained one, or if ranks run on a node that is to be excluded. If no rank could start
  because nodes of the job stayed busy, and there is no spare one, AGAIN follows.
- AGAIN, for example after a preemption: ``_again``. The job is requeued if ``_requeues`` allows it and Slurm accepts
  it. Otherwise the run gets a new job: its ``job.sbatch`` is submitted again (``Controller.resubmit``).
- LEAVE_TO_SLURM, after a preemption without grace or by `scontrol requeue`: Slurm requeues the job. Where Slurm cancels
  preempted jobs, the run continues as with AGAIN.
- LEAVE: the job ends, and the run waits for its user. COMPLETE, FAIL and CANCEL: ``outcome.json`` is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from clusterddp.errors import (
    ClusterddpError,
    RunDirectoryError,
    SlurmError,
    SlurmMissing,
    SlurmUnavailable,
    SubmissionForbidden,
)
from clusterddp.failures import exclusion
from clusterddp.failures.placement import Choice, Course, choose
from clusterddp.history.beginnings import Beginning, OwnResume, Phase
from clusterddp.history.checkpoints import OwnCheckpointRejected, SavedItself
from clusterddp.history.ends import (
    Cancelled,
    Completed,
    Continues,
    Failed,
    Requeued,
    RequeueRefused,
    Restarted,
    ResubmissionRefused,
    Resubmitted,
    RunEnd,
    Stopped,
    marked,
)
from clusterddp.history.failures import Excluded, LaunchFailed, Moved, NodeLost, NotExcluded, RankFailed
from clusterddp.history.steps import ChildDied, StepsSeen
from clusterddp.history.stops import Requested
from clusterddp.history.view import AttemptView, RunView
from clusterddp.history.words import BY_SLURM, NOT_CONTINUED, RESTARTING
from clusterddp.messages.reports import End
from clusterddp.reporter import say, show
from clusterddp.rundir.files import LASTING
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor import completion_marker, lease
from clusterddp.supervisor.attempt_progress import STEPPED, doubt, progress
from clusterddp.supervisor.attempt_state import State, Stop
from clusterddp.supervisor.controller import Controller
from clusterddp.supervisor.history import History, highest
from clusterddp.supervisor.retry_limits import exceeded
from clusterddp.supervisor.verdict import (
    Action,
    FirstFailure,
    RankEnd,
    Verdict,
    added_arguments,
    failure_box,
    failure_text,
    judge,
)

_T = TypeVar("_T")
#: Returned when the ranks are to be restarted in this job.
RESTART = -1
#: The first pause before an unreachable controller is asked again, in seconds.
FIRST_PAUSE_S = 0.5
#: The pause before srun is started again that has started no rank, in seconds.
RELAUNCH_S = 5.0
#: For how long nodes are held while the run directory cannot be written, in seconds.
OUTAGE_S = 600.0
_NOT_RESUBMITTED = "Could not resubmit the run"
_RUN_ENDS: Mapping[Action, type[RunEnd]] = {
    Action.COMPLETE: Completed,
    Action.FAIL: Failed,
    Action.CANCEL: Cancelled,
}
_WISHES = {
    Stop.REQUEUE: Cause.REQUEUE_REQUESTED,
    Stop.DRAIN: Cause.DRAIN_REQUESTED,
}


@dataclass(frozen=True)
class AttemptResult:
    """An attempt whose ranks have exited: its last state, how each rank ended, and, if step numbers are unknown, how
    many steps rank 0 made at least. ``unended``: the nodes with ranks of which the launcher has not seen the end."""

    state: State
    ends: tuple[RankEnd, ...]
    made: int | None = None
    unended: tuple[str, ...] = ()


class Recovery:
    """What follows once the ranks of attempt ``number`` have exited."""

    def __init__(
        self, run: RunDirectory, number: int, controller: Controller, history: History, result: AttemptResult
    ) -> None:
        self._run, self._number, self._controller, self._history = run, number, controller, history
        self._state, self._job, self._ends, self._made = result.state, result.state.job, result.ends, result.made
        self._unended = result.unended

    @property
    def _attempt_view(self) -> AttemptView:
        """The events of this attempt so far."""
        return self._history.view.attempt(self._number)

    def act(self) -> int:
        """Restarts, requeues, resubmits or ends the run. Returns this process's exit code, or RESTART."""
        reached = highest([self._history.reached(), *(end.step for end in self._ends)])
        self._progress = progress(self._history.view, self._number, reached, time.time(), self._made)
        # A launcher that was ended for a lost node has no exit code of its own.
        exit_code = 0 if self._state.lost_nodes else self._state.exit_code or 0
        return self._act(self._judge(self._why, exit_code))

    def _judge(self, ask: Callable[[], Cause], exit_code: int = 0) -> Verdict:
        verdict = judge(self._ends, exit_code, bool(self._state.stops_sent), ask, self._progress)
        if self._job.done is None or verdict.action is Action.CANCEL or verdict.cause is Cause.SUPERSEDED:
            return verdict
        completes = verdict.action is Action.COMPLETE
        is_done, found = _until_answered(
            partial(completion_marker.look, self._run, self._job, self._history.view, completes)
        )
        if is_done:
            reason = marked(found if completes else f"{found}. The last attempt: {verdict.reason}")
            return replace(verdict, action=Action.COMPLETE, reason=reason, because="")
        if not completes:
            return verdict
        missing = f"all ranks exited with code 0, but the completion marker (`done`) is missing: {found}"
        # A script that trains from the beginning each time would do so forever. With clusterddp, it continues.
        unmarked_before = any(end.unmarked for end in self._history.view.all(Continues))
        uses_clusterddp = any(end.used_clusterddp for end in self._ends)
        would_repeat = unmarked_before and not self._progress.saved and not uses_clusterddp
        action = Action.COMPLETE if would_repeat else Action.RESTART
        return Verdict(action, f"{missing}. If the training is complete, correct `done`", unmarked=True)

    def _doubt(self) -> str | None:
        """Why exit code 0 may not mean that the script is done. None if it probably is.

        A script that was stopped at its last step, reads what it saved there and has no step left is done.
        """
        attempt = self._attempt_view
        if attempt.has(ChildDied) or (self._job.done is None and attempt.unread):
            return doubt(self._history.view, self._number)
        if any(event.phase == "restoring" for event in attempt.all(Phase)) and not attempt.has(Beginning):
            return "unconfirmed: the script called ctx.run(), but it began no loop over run.steps() or run.epochs()"
        if any(end.used_clusterddp or end.read_saved for end in self._ends):
            return None
        if self._job.done is not None and completion_marker.confirms(self._job, attempt):
            return None
        sees = self._job.see_steps and not all(end.without_torch for end in self._ends)
        return doubt(self._history.view, self._number, sees)

    def _why(self) -> Cause:
        """Why the ranks stopped. A newer attempt, ``cancel`` and ``stop`` take precedence over the controller.

        Asks an unreachable controller until it answers, or until this process is killed at the end of the grace
        period, because without an answer the job must not be requeued.
        """

        def ask() -> Cause:
            if self._run.superseded(self._number):
                return Cause.SUPERSEDED
            if self._run.cancelled:
                return Cause.CANCELLED
            if self._state.wanted is Stop.HOLD:
                return Cause.STOP_REQUESTED
            cause = self._controller.why(self._state.stop_margin_s)
            if cause is Cause.REQUEUED and self._state.preempted:
                return Cause.PREEMPTED_WITHOUT_GRACE  # and its grace has passed
            # The limit was extended since, or the job was suspended, which does not use it up. The run continues.
            if cause is Cause.NONE and Stop.TIME_LIMIT.value in self._state.stops_sent:
                return Cause.TIME_LIMIT
            if cause is Cause.NONE and Stop.GPU_HOURS.value in self._state.stops_sent:
                return Cause.GPU_HOURS
            if self._state.busy and not self._state.stops_sent and cause in (Cause.NONE, Cause.TIME_LIMIT):
                return Cause.NODES_BUSY  # near the time limit, too, no rank was asked to stop for it
            if cause is Cause.NONE and self._state.wanted:
                return _WISHES.get(self._state.wanted, cause)
            return cause

        try:
            return _until_answered(ask)
        except SlurmError as error:
            if not isinstance(error, SlurmMissing):
                say(str(error))
            return Cause.UNKNOWN

    def _act(self, verdict: Verdict) -> int:
        if verdict.cause is Cause.SUPERSEDED or _until_answered(partial(self._run.superseded, self._number)):
            newest = self._run.newest_attempt()
            say(f"attempt {self._number} was superseded by attempt {newest} and exits without writing")
            return 1
        if verdict.first_failure is not None:
            self._tell_failure(verdict.first_failure, verdict)
        if verdict.action is Action.RESTART:
            return self._restart(verdict)
        if verdict.action is Action.AGAIN:
            return self._again(verdict)
        if verdict.cause is Cause.PREEMPTED_WITHOUT_GRACE and self._ends_for_good():
            return self._again(verdict)
        if verdict.action in (Action.LEAVE, Action.LEAVE_TO_SLURM):
            then = BY_SLURM if verdict.action is Action.LEAVE_TO_SLURM else None
            if verdict.cause is Cause.STOP_REQUESTED:
                self._controller.hold()
                then = "held until it is submitted again"
            return self._stop(verdict, then=then)
        unconfirmed = self._doubt() if verdict.action is Action.COMPLETE else None
        if verdict.unmarked:
            unconfirmed = unconfirmed or f"unconfirmed: {verdict.reason}"
        end = _RUN_ENDS[verdict.action]
        self._history.conclude(end, unconfirmed or verdict.reason, confirmed=unconfirmed is None)
        return verdict.exit_code

    def _tell_failure(self, failure: RankEnd, verdict: Verdict) -> None:
        """Records the first failure and prints it in a box, after an exception with why all ranks restart or not."""
        step = self._step_of(failure, verdict.others)
        if failure.end.of_launcher:
            failed_launch = LaunchFailed(
                error=failure.error,
                lines=tuple(failure.traceback.splitlines()),
                refused=failure.end is End.REFUSED,
                suspect=failure.host or None if self._controller.resubmits else None,
                lacks_interface=failure.lacks_interface or None,
            )
            self._history.add(failed_launch)
        elif self._state.hang is None:  # a hang is recorded already
            suspected = failure.of_the_node and self._controller.resubmits
            failed = RankFailed(
                rank=failure.rank,
                host=failure.host,
                error=failure.words(),
                step=step,
                since=failure.lost_at if math.isfinite(failure.lost_at) else None,
                suspect=self._state.node_of(failure.rank) if suspected else None,
                fault=failure.fault or None,
                lacks_gpus=failure.lacks_gpus or None,
                lacks_interface=failure.lacks_interface or None,
                raised=failure.raised,
            )
            self._history.add(failed)
        first = FirstFailure(failure, verdict.others, step)
        more = (added_arguments(self._run, self._attempt_view), self._what_follows(verdict))
        above = self._controller.output_above and failure.rank == 0 and not failure.end.of_launcher
        text = failure_text(self._run, self._number, first, time.time(), self._history.secrets, more, above)
        show(failure_box(text))

    def _what_follows(self, verdict: Verdict) -> str:
        """Why all ranks restart after an exception of the script, or why not. Empty for other failures."""
        if not verdict.because:
            return ""
        if verdict.action is Action.FAIL:
            return f"not restarted, because {verdict.because}"
        if self._exceeded(Restarted, verdict) is not None:
            return ""
        return f"{RESTARTING}, because {verdict.because}"

    def _step_of(self, failure: RankEnd, others: Sequence[RankEnd]) -> int | None:
        """The number of steps completed when a rank failed. A killed rank reports none, but the others then failed in
        the collective in which they waited for it. The metrics, which rank 0 writes, lag some steps behind."""
        if failure.step is not None:
            return failure.step
        known = (self._attempt_view.first_step, self._history.reached())
        return highest([*known, *(end.step for end in others if end.failed)])

    def _ends_for_good(self) -> bool:
        """Whether Slurm will not run the preempted job again."""
        try:
            return self._controller.ends_what_it_preempts()
        except SlurmError as error:
            say(f"could not determine whether this partition requeues preempted jobs: {error}")
            return False

    def _restart(self, verdict: Verdict) -> int:
        """Restarts the ranks in place, as a new attempt of the same job, or continues the run in a new one.

        If a node lacks GPUs, or a network, and the run cannot leave it, the run stops.
        """
        lost, failure = self._state.lost_nodes, verdict.first_failure
        self._record_lost(lost)
        if self._bounded(Restarted, verdict):
            return verdict.exit_code
        unfit_host = failure is not None and failure.end.of_launcher and failure.unfit_node  # wherever ranks move to
        choice = Choice(Course.NEW_JOB) if unfit_host else self._choose_course(lost)
        leaves = verdict
        if choice.why and choice.course is Course.NEW_JOB and self._state.job.outlives_nodes:
            leaves = replace(verdict, reason=f"{verdict.reason}. {choice.why[0].upper()}{choice.why[1:]}")
        if choice.course is Course.NEW_JOB and lost and not self._controller.starts_again:
            return self._stop(leaves)  # the rest of the allocation is too small for the ranks
        if choice.course in (Course.SPARE, Course.SHRINK):
            self._choose_nodes(())  # for the run's next job
            moved = choice.placement
            aside = tuple(node for node in moved.aside if node not in self._state.placement.aside)
            self._history.add(Moved(nodes=moved.nodes, aside=aside, why=choice.why))
            return self._restart_ranks(verdict)
        if verdict.cause is Cause.NODES_BUSY and not lost:
            return self._again(verdict)
        if self._controller.resubmits and self._controller.starts_again:
            excluded = self._choose_nodes(lost)
            if lost or self._state.placement.is_short(self._state.job) or self._state.wanted is Stop.DRAIN:
                return self._resubmit(leaves, excluded.nodes or self._excluded(), node_lost=bool(lost))
            used = {self._state.node_of(rank) for rank in range(self._job.world_size)}
            if failure is not None and failure.end.of_launcher:
                used.add(failure.host)  # the batch step's node, which may have no ranks
            if not used.isdisjoint(excluded.nodes):
                try:
                    return self._hand_over(leaves, self._submit(excluded.nodes))
                except SlurmError as error:
                    self._history.add(NotExcluded(reason=f"a new job could not be submitted ({error})"))
        if failure is not None and failure.unfit_node:
            return self._stop(verdict)
        return self._restart_ranks(verdict)

    def _restart_ranks(self, verdict: Verdict) -> int:
        self._reject_checkpoint(verdict)
        hang = self._state.hang
        reason = f"rank {hang.late[0]} ({hang.host}) hung" if hang else None
        self._add_end(partial(Restarted, unended=self._unended), verdict, reason)
        # An outage of the disk may have broken the rank, and the next attempt begins by writing to that disk.
        _until_answered(self._history.write_pending, OUTAGE_S)
        if verdict.first_failure is not None and verdict.first_failure.end.of_launcher:
            time.sleep(RELAUNCH_S)
        return RESTART

    def _reject_checkpoint(self, verdict: Verdict) -> None:
        """Has the next attempt take the checkpoint before, if the script failed with this one before its first step.

        Files that belong to it may be missing. A script that looks for its checkpoint itself would not follow.
        """
        given, failure = self._attempt_view.first(OwnResume), verdict.first_failure
        if given is None or given.file is None or given.written is None or not given.arguments:
            return
        if failure is None or failure.end not in (End.EXCEPTION, End.EXIT) or failure.may_pass:
            return
        if not failure.out_of_memory and not self._attempt_view.has(*STEPPED, SavedItself):
            self._history.add(OwnCheckpointRejected(file=given.file, written=given.written))

    def _choose_course(self, lost: Sequence[str]) -> Choice:
        """Where the ranks restart."""
        state, now = self._state, time.time()
        leave = dict.fromkeys(lost, "is lost")
        if state.drained:
            leave.setdefault(state.drained, "is drained")
        if state.job.outlives_nodes:
            suspects = {event.suspect for event in exclusion.of_nodes(self._attempt_view)}
            for node in exclusion.failed(self._history.view, now):
                if node in suspects:
                    leave.setdefault(node, "failed repeatedly in this run")
            for end in self._ends:
                if end.death is not None and end.death.not_started:
                    leave.setdefault(state.node_of(end.rank), "did not start its ranks")
            if state.busy:
                leave |= dict.fromkeys(self._unended_before(), "still has ranks of an earlier attempt")
            # The script may hang instead, which is no reason to shrink.
            if state.placement.spares and (hung := hung_node(state)):
                leave.setdefault(hung, "hangs")
        needed = state.job.outlives_nodes and any(node in state.placement.nodes for node in leave)
        usable = self._usable_nodes() if needed else None
        return choose(state.job, state.placement, leave, usable)

    def _unended_before(self) -> Sequence[str]:
        """The nodes on which the launcher did not see the ranks of the previous attempt end."""
        end = self._history.view.attempt(self._number - 1).first(Restarted)
        return () if end is None else end.unended

    def _record_lost(self, nodes: Sequence[str]) -> None:
        """Records the nodes that stopped responding after the first one, while the ranks were exiting."""
        known = [event.node for event in self._attempt_view.all(NodeLost)]
        for node in nodes:
            if node not in known:
                self._history.add(NodeLost(node=node, suspect=node))

    def _choose_nodes(self, lost: Sequence[str]) -> exclusion.Choice:
        """Which nodes the next job excludes. Records new ones, and those that cannot be excluded."""
        history, now = self._history.view, time.time()
        if not lost and not set(exclusion.failed(history, now)) - set(exclusion.excluded(history, now)):
            return exclusion.Choice()
        if (usable := self._usable_nodes()) is None:
            return exclusion.Choice()
        choice = exclusion.choose(history, lost, usable, self._job, now)
        if choice.refused:
            self._history.add(NotExcluded(reason=choice.refused))
        if choice.new:
            times = tuple(len(exclusion.failures(history, node, now)) for node in choice.new)
            self._history.add(Excluded(nodes=choice.new, failures=times))
        return choice

    def _excluded(self) -> list[str]:
        """The nodes that a new job excludes, as the previous ones did."""
        return exclusion.still_excluded(self._history.view, time.time(), self._usable_nodes, self._job)

    def _usable_nodes(self) -> list[str] | None:
        """The nodes that the job could be given. None if unknown."""
        try:
            return self._controller.usable_nodes()
        except ClusterddpError as error:  # Slurm does not answer, or the job's `exclude` names a file
            say(f"could not list the usable nodes, so no node is excluded: {error}")
            return None

    def _bounded(self, kind: type[Restarted | Stopped], verdict: Verdict) -> bool:
        """Ends the run as failed if it must not have another attempt. Returns whether it did."""
        reason = self._exceeded(kind, verdict)
        if reason is not None:
            self._history.conclude(Failed, f"{reason}. Last attempt: {verdict.reason}")
        return reason is not None

    def _exceeded(self, kind: type[Restarted | Stopped], verdict: Verdict) -> str | None:
        """Why the run must not have another attempt after this one has ended so. None if it may."""
        now, cause = time.time(), verdict.cause.value
        end = kind(time=now, attempt=self._number, reason=verdict.reason, cause=cause, step=None, checkpoint=None)
        return exceeded(self._job, RunView([*self._history.view, end]), now)

    def _again(self, verdict: Verdict) -> int:
        """Continues the run: by a requeue if that is possible and wanted, else in a new job."""
        if self._bounded(Stopped, verdict):
            return 1
        if not self._controller.starts_again:
            return self._stop(verdict)
        began = math.inf if self._attempt_view.began is None else self._attempt_view.began
        me = self._controller.holder()
        other = _until_answered(partial(lease.submitted_again, self._run, self._number, me, began))
        # This process was stopped past the end of its job. While it holds the run, the other job exits as it starts.
        if other is not None and verdict.cause is Cause.TIMED_OUT:
            return self._stop(verdict, f"{verdict.reason}. The run was submitted again as job {other}")
        if not self._can_requeue(verdict.cause):
            return self._resubmit(verdict, self._excluded())
        if self._requeues(verdict.cause):
            try:
                return self._requeued(verdict)
            except SlurmError as error:
                self._history.add(RequeueRefused(error=str(error)))
                return self._resubmit(verdict, self._excluded())
        try:
            return self._hand_over(verdict, self._submit(self._excluded()))
        except SlurmError as error:
            refused = str(error)
            forbidden = isinstance(error, (SubmissionForbidden, SlurmMissing)) or None
            self._history.add(ResubmissionRefused(error=refused, forbidden=forbidden))
        try:
            return self._requeued(verdict)
        except SlurmError as error:
            self._history.add(RequeueRefused(error=str(error)))
            return self._stop(verdict, f"{verdict.reason}. {_NOT_RESUBMITTED}: {refused}", refused=refused)

    def _requeued(self, verdict: Verdict) -> int:
        """Requeues the job. Returns the exit code. Raises SlurmError if Slurm refuses."""
        requeued = self._requeue(verdict.cause)
        if isinstance(requeued, Verdict):
            return self._act(requeued)
        self._add_end(partial(Requeued, window_s=requeued), verdict)
        return self._controller.again_code

    def _can_requeue(self, cause: Cause) -> bool:
        """Whether Slurm probably accepts a requeue of this job, and it serves the purpose.

        It needs a job that is still running: in a preemption's grace period, before the time limit, after `clusterddp
        requeue`, or if nodes stay busy. A requeue cannot leave out nodes, so there is none if the user asked for that
        (`requeue --exclude`, `drain`).
        """
        if cause not in (Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.REQUEUE_REQUESTED, Cause.NODES_BUSY):
            return False
        return not any(event.nodes for event in self._attempt_view.all(Requested))

    def _requeues(self, cause: Cause) -> bool:
        """Whether to requeue a job that can be requeued, rather than to submit the run as a new job. If Slurm refuses
        one, the supervisor tries the other. Once a site has refused a new job because nodes may not submit any, it
        tries the requeue first.

        The job definition's ``policy: resubmit`` asks for a new job, except in a local run, which has no queue. For a
        range of nodes without a policy, ``main.as_started`` sets ``resubmit``. If Slurm cancels what it preempts
        (PreemptMode=CANCEL), a preempted job is requeued only with ``policy: requeue``.
        """
        forbidden = any(event.forbidden for event in self._history.view.all(ResubmissionRefused))
        if self._job.policy == "resubmit" and self._controller.resubmits and not forbidden:
            return False
        # Slurm would accept a requeue within the grace, too, but `submit` has announced a new job, which is not held.
        return self._job.policy is not None or cause is not Cause.PREEMPTED or not self._ends_for_good()

    def _requeue(self, cause: Cause) -> float | Verdict:
        """Requeues the job, retrying until the controller answers. Before each try, asks whether the cause has changed.

        A request without an answer may have been carried out. Returns the seconds from that question to the requeue's
        answer: a scancel in between has no effect, because Slurm also requeues a job that is being cancelled. If the
        cause has changed, returns the new verdict instead.
        """

        requests = 0

        def ask() -> float | Verdict:
            nonlocal requests
            now = self._why()
            if requests and now in (Cause.REQUEUED, Cause.PREEMPTED_WITHOUT_GRACE):
                return Verdict(Action.LEAVE_TO_SLURM, cause.value, cause)  # carried out
            if now is not cause:
                return self._judge(lambda: now)
            requests += 1
            asked = time.monotonic()
            self._controller.requeue()
            return round(time.monotonic() - asked, 4)

        return _until_answered(ask)

    def _resubmit(self, verdict: Verdict, without: Sequence[str] = (), node_lost: bool = False) -> int:
        """Continues the run in a new job. If Slurm refuses it, the run stops and can be continued by hand.

        Slurm may take minutes to end a job with a lost node, so the new job does not wait for that.
        """
        if node_lost:
            _until_answered(partial(lease.let_go, self._run, self._number))
        try:
            new = self._submit(without, after_this=not node_lost)
        except SlurmError as error:
            if node_lost:
                _until_answered(partial(lease.take, self._run, self._number, self._controller.holder()))
            return self._stop(verdict, f"{verdict.reason}. {_NOT_RESUBMITTED}: {error}", refused=str(error))
        return self._hand_over(verdict, new)

    def _submit(self, without: Sequence[str], after_this: bool = True) -> str | None:
        """Submits the next job, retrying until Slurm answers. Returns its id, None if this job was cancelled meanwhile
        or the run has begun another attempt.

        A submission without an answer may have been carried out.
        """
        sent = False

        def ask() -> str | None:
            nonlocal sent
            if sent and (new := self._controller.successor()):
                return new
            if sent and (self._is_cancelled() or self._run.superseded(self._number)):  # by the user's own submission
                return None
            sent = True
            return self._controller.resubmit(without, after_this)

        return _until_answered(ask)

    def _is_cancelled(self) -> bool:
        """Whether this job or the run was cancelled. The job that it has submitted may have begun an attempt."""

        def ask() -> bool:
            ends = (Cause.CANCELLED, Cause.ENDED_IN_GRACE)
            return self._run.cancelled or self._controller.why(self._state.stop_margin_s) in ends

        try:
            return _until_answered(ask)
        except SlurmError as error:
            say(str(error))
            return False

    def _hand_over(self, verdict: Verdict, new: str | None) -> int:
        """Hands the run over to the job ``new``, which is cancelled if this job was cancelled meanwhile.

        If it starts nevertheless, it finds the outcome and exits. If it has begun an attempt, it writes the outcome
        itself.
        """
        if new is None or self._is_cancelled():
            if not _until_answered(partial(self._run.superseded, self._number)):
                self._history.conclude(Cancelled, "cancelled while it was being resubmitted")
            if new is None:
                return 1
            try:
                _until_answered(partial(slurm.cancel, new))
            except SlurmError as error:
                say(f"could not cancel job {new}, which will exit as soon as it starts: {error}")
            return 1
        self._add_end(partial(Resubmitted, job=new), verdict)
        return self._controller.again_code

    def _stop(
        self, verdict: Verdict, reason: str | None = None, *, then: str | None = None, refused: str | None = None
    ) -> int:
        """Ends the attempt so that the run can be continued. Returns the exit code."""
        if not self._job.continues and self._controller.resubmits:
            then = then or NOT_CONTINUED
        self._add_end(partial(Stopped, then=then, refused=refused), verdict, reason)
        return self._controller.leave_code

    def _add_end(self, end: Callable[..., Continues], verdict: Verdict, reason: str | None = None) -> None:
        """Adds the attempt's end. ``end`` makes the event from the fields that all ends have."""
        newest = self._attempt_view.last(SavedItself) or self._attempt_view.first(OwnResume)
        ended = end(
            reason=reason or verdict.reason,
            cause=verdict.cause.value,
            step=self._history.reached(),
            checkpoint=self._history.checkpoint,
            file=None if newest is None else newest.file,
            made=max(1, self._made or 0) if self._attempt_view.has(StepsSeen) else None,
            unmarked=verdict.unmarked or None,
        )
        self._history.add(ended)


def hung_node(state: State) -> str | None:
    """The node whose ranks, all of them and no others, have stopped with their heartbeats."""
    if state.hang is None or not state.hang.silent:
        return None
    nodes = [state.node_of(rank) for rank in range(state.job.world_size)]
    (node, *others) = dict.fromkeys(nodes[rank] for rank in state.hang.late)
    return node if not others and nodes.count(node) == len(state.hang.late) else None


def _until_answered(ask: Callable[[], _T], patience_s: float = math.inf) -> _T:
    """The result of ``ask``, once the controller and the run directory answer. RunDirectoryError if one never will."""

    def answer() -> _T:
        try:
            return ask()
        except OSError as error:
            if error.errno not in LASTING:
                raise
            raise RunDirectoryError(
                f"{error.filename}: {error.strerror}. This job ends, and the run does not continue by itself. Once the "
                "run directory is usable again, continue with `clusterddp submit --run-dir`"
            ) from error

    return slurm.patiently(answer, patience_s, FIRST_PAUSE_S, (SlurmUnavailable, OSError))
