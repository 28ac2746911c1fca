"""How an attempt ended: how each of its ranks ended, which failure came first, and what the supervisor does next.

An exit code goes this way. ``worker/rank.run_script`` turns what the script did into a record: ``sys.exit(3)`` has exit
code 3, an exception none. The rank sends the record, writes it to a file and exits. ``rank_ends`` reads it. Without a
record, srun's messages or waitpid show that the rank was killed. ``judge`` finds the first failure and the next action,
and ``Recovery`` carries that out. If the run is over, the supervisor exits with ``Verdict.exit_code``. That is the
job's exit code, too, because the batch script becomes the supervisor by ``exec``.

``failure_text`` describes an attempt's first failure, for the report, and ``failure_box`` frames it, for
`submit --local`, the job's log, `logs` and `Handle.result()`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import shlex
import signal
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp.codec import Misfit, read
from clusterddp.errors import RunDirectoryError
from clusterddp.failures import exit_status
from clusterddp.failures.exit_status import KILLS, Blame, ErrorText, ExitStatus, LaunchFailure, launch_failure
from clusterddp.failures.stack_traces import (
    after_suspension,
    different_calls,
    end_of_log,
    uncaught,
    users_line,
    without_advice,
)
from clusterddp.history.beginnings import OwnResume
from clusterddp.history.checkpoints import SavedItself
from clusterddp.history.view import AttemptView
from clusterddp.history.words import at_step
from clusterddp.jobdef.masking import masked
from clusterddp.messages.reports import End, Left
from clusterddp.reporter import counted, printable
from clusterddp.rundir.files import open_binary
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.attempt_progress import LONG_S, PROGRESS_S, STEPPED, Progress
from clusterddp.supervisor.attempt_state import State
from clusterddp.supervisor.retry_limits import FRUITLESS

#: Two connections that end within this many seconds count as ending together.
JITTER_S = 0.5
#: So much later may the connection of a killed rank end than that of a peer that lost it. Where memory is short, the
#: kernel takes a while to close the sockets of a large process.
CLOSING_S = 3.0


class Action(enum.Enum):
    """What the supervisor does next."""

    COMPLETE = "completed"
    FAIL = "failed"
    CANCEL = "cancelled"
    RESTART = "restart"  # all ranks restart in the same job, if it has nodes enough that work
    AGAIN = "again"  # the job ends unless it is requeued, or the run is resubmitted
    LEAVE_TO_SLURM = "leave to Slurm"  # which requeues the job by itself, unless it cancels what it preempts
    LEAVE = "leave"  # the job ends, the run does not: a later submit continues it


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    ``lost_at``: unix seconds on the supervisor's clock when it reported its failure, or its connection broke. Infinity
    if it never joined.
    """

    rank: int
    host: str
    end: End
    lost_at: float
    error: str = ""
    exception: str = ""
    """The type of the exception that the script raised."""
    thrown: str = ""
    """The C++ exception, ``TYPE: MESSAGE``, by which its process aborted."""

    traceback: str = ""
    step: int | None = None
    exit_code: int | None = None
    used_clusterddp: bool = False
    death: ExitStatus | None = None
    left_loop: bool = False
    """Whether it is done with steps left, as after ``break``."""
    read_saved: bool = False
    """Whether it is done without a step, after it had opened what the script saved at its last stop."""

    without_torch: bool = False
    """Whether the script did not import torch, so that no steps could be seen."""

    lacks_gpus: bool = False
    """Whether its node has fewer GPUs than its ranks need."""

    lacks_interface: bool = False
    """Whether its node has none of the interfaces in ``interface``."""

    final: bool = False
    """Whether it raised an exception that a restart would raise again, as of a checkpoint that does not fit."""

    fault: str = ""
    """The fault of its GPU that may be the cause."""

    joined: bool = True
    """False if it died before it connected to the supervisor."""

    @classmethod
    def read(cls, rank: int, host: str, lost_at: float, path: Path, death: ExitStatus | None = None) -> RankEnd:
        """From the file that the rank wrote. An unreadable file counts as a missing one."""
        try:
            record = read_json(path)
            left = None if record is None else read(Left, record)
        except (RunDirectoryError, OSError, Misfit) as error:
            how = death.words() if death else "exited"
            problem = f"{path}: {error}" if isinstance(error, Misfit) else error
            words = f"{how}. Could not read its record: {problem}"
            return cls(rank, host, End.DIED, lost_at, error=words, death=death)
        return cls.of(rank, host, lost_at, left, death)

    @classmethod
    def of(cls, rank: int, host: str, lost_at: float, record: Left | None, death: ExitStatus | None = None) -> RankEnd:
        """From the record that the rank wrote. If it had no time to (None), ``death`` may be known."""
        if record is None:
            joined = math.isfinite(lost_at)
            error = death.words() if death else "was killed or called os._exit(), and left no traceback"
            if not joined and death is not None and death.exit_code is not None:  # its script has not begun
                error = f"exited with code {death.exit_code} before it reached the supervisor"
            return cls(rank, host, End.DIED, lost_at, error=error, death=death, joined=joined)
        return cls(
            rank,
            record.host,
            record.end,
            lost_at,
            error=record.error or ("" if record.exit_code is None else f"exit code {record.exit_code}"),
            exception=record.exception or record.error.partition(":")[0],  # the record of an older rank has none
            traceback=record.traceback,
            step=record.step,
            exit_code=record.exit_code,
            used_clusterddp=record.used_clusterddp,
            left_loop=record.left_loop,
            read_saved=record.read_saved,
            without_torch=record.without_torch,
            lacks_gpus=record.lacks_gpus,
            lacks_interface=record.lacks_interface,
            final=record.final,
        )

    def without(self, secrets: Sequence[str]) -> RankEnd:
        """The same with these values masked, which must not appear in the history or in logs."""
        return dataclasses.replace(
            self,
            error=masked(self.error, secrets),
            thrown=masked(self.thrown, secrets),
            traceback=masked(self.traceback, secrets),
        )

    @property
    def failed(self) -> bool:
        """Whether the rank ended by neither finishing nor stopping."""
        return not self.end.well

    @property
    def known(self) -> ErrorText | None:
        """What is known about its error, from its text."""
        if self.end not in (End.EXCEPTION, End.DIED):
            return None
        return exit_status.find(self.thrown or self.error, self.traceback)

    @property
    def may_pass(self) -> bool:
        """Whether the failure comes from outside the script: from a device, the network, or another rank."""
        if self.fault:
            return True
        if self.end is End.EXCEPTION:
            return self.known is not None and self.known.blame is not Blame.SCRIPT
        if self.end is End.DIED:
            return self.known is None or self.known.blame is not Blame.SCRIPT
        return self.end in (End.LOST, End.SILENT, End.UNREACHABLE, End.HUNG, End.EARLY, End.DISMISSED, End.UNLAUNCHED)

    @property
    def unfit_node(self) -> bool:
        """Whether its node lacks what every attempt needs."""
        return self.lacks_gpus or self.lacks_interface

    @property
    def of_the_node(self) -> bool:
        """Whether the failure may be the node's, rather than the script's or a peer's."""
        if self.fault or self.lacks_interface:
            return True
        if self.known is not None:
            return self.known.blame in (Blame.NODE, Blame.NETWORK)
        if self.end is End.DIED:
            if not self.joined:  # for any reason, such as a missing interpreter
                return self.death is not None and bool(self.death.not_started)
            return self.death is None or not (self.death.out_of_memory or self.death.oom_kill)
        return self.end in (End.LOST, End.SILENT)

    @property
    def started(self) -> bool:
        """Whether its process was started, as far as is known."""
        return self.death is None or not self.death.not_started

    @classmethod
    def of_launch(cls, failure: LaunchFailure, at: float = math.inf) -> RankEnd:
        """In place of the ends of all ranks, if none was started."""
        end = End.REFUSED if failure.refused else End.UNLAUNCHED
        lines, lacks = "\n".join(failure.lines), failure.lacks_interface
        return cls(0, failure.node, end, at, error=failure.error, traceback=lines, lacks_interface=lacks)

    @property
    def lost_peer(self) -> bool:
        """Whether its error means that another rank has exited."""
        return self.known is not None and self.known.blame is Blame.PEER

    @property
    def by_itself(self) -> bool:
        """Whether the rank failed by itself: not through a lost peer, nor killed after a peer failed."""
        if self.known is not None and self.known.blame in (Blame.PEER, Blame.NETWORK):
            return False
        if self.end is End.DIED:
            return self.death is not None and self.death.by_itself
        return self.end in (End.EXIT, End.UNFINISHED, End.SILENT, End.UNREACHABLE, End.EXCEPTION)

    @property
    def raised(self) -> str | None:
        """An exception's type, line of the script and step: ``OSError at a.py:17 (read), step 9``. Of ``sys.exit``, the
        code and the step. None if neither."""
        step = "" if self.step is None else f", step {self.step}"
        if self.end is End.EXIT:
            return f"exit code {self.exit_code}{step}"
        if self.end is not End.EXCEPTION:
            return None
        return f"{self.exception} at {users_line(self.traceback) or 'an unknown line'}{step}"

    @property
    def ended_by_us(self) -> bool:
        """Whether the supervisor or the launcher ended it because a peer had failed."""
        if self.end is End.DIED:
            return self.death is not None and self.death.signal in KILLS and not self.death.by_itself
        return self.end is End.DISMISSED

    @property
    def out_of_memory(self) -> bool:
        """Whether its exception is an out-of-memory error."""
        return self.end is End.EXCEPTION and self.known is not None and self.known.out_of_memory

    def sentence(self) -> str:
        """One line that names the rank, its host and what happened to it."""
        if self.end.hung or self.end.of_launcher:
            return self.error
        return f"rank {self.rank} ({self.host}) {self.words()}"

    def words(self) -> str:
        """What happened to it, in one line: a long error's first and last line, which has the exception of a worker."""
        what = {
            End.EXCEPTION: "raised ",
            End.EXIT: f"exited with code {self.exit_code}: ",
            End.LOST: "never joined: ",
            End.DISMISSED: "was stopped because ",
        }
        if self.end is End.EXIT and self.error == f"exit code {self.exit_code}":
            return f"exited with code {self.exit_code}"
        said = without_advice(self.error.removesuffix(": "))  # of an exception without a message
        lines = [line.strip() for line in said.splitlines() if line.strip()] or [self.end.value]
        error = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        return f"{'ran out of memory: ' if self.out_of_memory else what.get(self.end, '')}{error}"


def rank_ends(run: RunDirectory, attempt: int, state: State, statuses: Mapping[int, ExitStatus]) -> list[RankEnd]:
    """How each rank of an attempt ended, once all have exited. ``statuses``: the launcher's, the first failure first.

    The rank at fault for a hang counts as ``hung``, however it ended, unless it was done or stopped.
    """
    hang = state.hang
    ranks = range(state.job.world_size)
    no_rank_seen = not (state.hosts or state.ends or state.silent or statuses)
    if hang is None and state.exit_code and no_rank_seen:
        no_record = not any(run.rank_record(attempt, rank).exists() for rank in ranks)
        messages = end_of_file(run.launcher_log(attempt)).strip()
        if no_record and messages:
            return [RankEnd.of_launch(launch_failure(messages))]
    if hang is None and not state.silent:  # else all were killed
        statuses = exit_status.in_order(statuses)
    ends = [_end_of(run, attempt, state, rank, statuses.get(rank)) for rank in ranks]
    if hang is not None and ends[hang.late[0]].failed:  # it comes first
        end = End.HUNG_FOR_GOOD if state.job.watchdog and state.job.watchdog.on_hang == "end" else End.HUNG
        ends[hang.late[0]] = RankEnd(hang.late[0], hang.host, end, state.hung_at, hang.what, used_clusterddp=True)
    return [_with_circumstances(end, state) for end in ends]


def _with_circumstances(end: RankEnd, state: State) -> RankEnd:
    """The end of a rank with the fault of its GPU, and with a remark if its error may come from a suspension."""
    if end.failed and not end.end.hung:
        fault = state.gpu_fault_of(end.rank, min(end.lost_at, time.time()))
        end = dataclasses.replace(end, fault=fault)
    remark = after_suspension(end.error, state.stood_s, state.job.timeouts.step_s)
    return dataclasses.replace(end, error=f"{end.error}\n{remark}") if remark else end


def _end_of(run: RunDirectory, attempt: int, state: State, rank: int, status: ExitStatus | None) -> RankEnd:
    """How a rank ended, from its last report, else its record, else the exit status of its process."""
    node = state.node_of(rank)
    host, lost_at = state.hosts.get(rank, node), state.lost_at.get(rank, float("inf"))
    if rank in state.ends:
        return RankEnd.of(rank, host, lost_at, state.ends[rank])
    end = RankEnd.read(rank, host, lost_at, run.rank_record(attempt, rank), status)
    if end.end is End.DIED and state.exit_code == 0 and state.hosts.get(rank) is None:
        # srun returns 0 for tasks that it could not launch (seen on 22.05.8: slurmstepd did not find its cgroup).
        if status is not None and status.not_started:
            return end
        words = "the launcher returned 0, but the process left no record"
        return RankEnd(rank, host, End.LOST, lost_at, error=words)
    if end.end is End.DIED and state.exit_code == 0:  # by os._exit(0); unfinished is None without a training loop
        if state.unfinished:
            words = "called os._exit(0) inside its training loop"
            return RankEnd(rank, host, End.UNFINISHED, lost_at, error=words, used_clusterddp=True)
        if state.job.stop.signal and state.heard and state.unfinished is None:
            return RankEnd(rank, host, End.STOPPED, lost_at)
        return RankEnd(rank, host, End.DONE, lost_at, used_clusterddp=state.unfinished is False)
    if status is not None and status.signal == signal.SIGABRT and end.end is End.DIED:
        log = run.attempt_logs(attempt) / f"rank-{rank}.err"
        if thrown := uncaught(end_of_file(log)):
            return dataclasses.replace(end, error=f"aborted: {thrown}", thrown=thrown)
    if rank in state.unreachable and end.end is End.DIED:
        words = "lost its connection to the supervisor for 15 s, although its node responds. Check the network"
        return RankEnd(rank, host, End.UNREACHABLE, lost_at, error=words)
    if rank in state.silent and end.end is End.DIED:
        return RankEnd(rank, host, End.SILENT, lost_at, error=f"was lost because node {node} no longer responds")
    return end


@dataclass(frozen=True)
class Verdict:
    """The supervisor's next action, its reason, the first failure if there was one, and the others."""

    action: Action
    reason: str
    cause: Cause = Cause.NONE
    first_failure: RankEnd | None = None
    others: tuple[RankEnd, ...] = ()
    because: str = ""
    """Why all ranks restart after an exception of the script, or why not."""
    unmarked: bool = False
    """Whether all ranks exited with code 0 without the mark of ``done``."""

    @property
    def exit_code(self) -> int:
        """The exit code of a run that is over, and so of its batch job: 0 if it completed, else the code of the first
        failed rank, else 1, for example after an exception or a KILL.

        After an attempt of a run that is not over, the supervisor exits with the controller's ``again_code`` if the run
        starts again by itself, else with its ``leave_code``. In a Slurm job both are 0. A local run has 75, on which
        ``runs/local.py`` starts the next attempt, and 130, which an own allocation has, too. A superseded supervisor
        exits with 1, and one that ends by an error with that of the error (``entry.exit_with``).
        """
        if self.action is Action.COMPLETE:
            return 0
        return (self.first_failure and self.first_failure.exit_code) or 1


#: Causes other than the end of the job.
_BY_REQUEST = (Cause.INTERRUPTED, Cause.STOP_REQUESTED, Cause.REQUEUE_REQUESTED, Cause.DRAIN_REQUESTED)
#: After any other cause the job ends, and the run does not.
_FOLLOWS = {
    Cause.PREEMPTED: Action.AGAIN,
    Cause.TIME_LIMIT: Action.AGAIN,
    Cause.TIMED_OUT: Action.AGAIN,
    Cause.PREEMPTED_WITHOUT_GRACE: Action.LEAVE_TO_SLURM,
    Cause.REQUEUED: Action.LEAVE_TO_SLURM,
    Cause.CANCELLED: Action.CANCEL,
    Cause.REQUEUE_REQUESTED: Action.AGAIN,
    Cause.DRAIN_REQUESTED: Action.RESTART,
    Cause.NODES_BUSY: Action.RESTART,
    Cause.GPU_HOURS: Action.FAIL,
}


def judge(
    ends: Sequence[RankEnd], exit_code: int, stop_sent: bool, ask: Callable[[], Cause], progress: Progress | None = None
) -> Verdict:
    """The verdict. ``ask`` queries the controller and is called only where its answer matters.

    ``exit_code`` is the launcher's (srun's). It shows what happened while an interpreter shut down, after the records.
    A signal then (128 + its number) does not undo the training, as gloo of torch 2.13 may abort a rank there.
    ``stop_sent``: whether ranks were asked to stop. A crash just before the time limit is no consequence of it.
    ``progress``: of this attempt and those before. None if there was none.
    """
    launcher_done = exit_code == 0 or exit_code > 128
    all_done = launcher_done and all(end.end is End.DONE for end in ends)
    left_loop = any(end.left_loop for end in ends)
    finished = "all ranks finished"
    if exit_code:
        finished += f", and one exited with code {exit_code} during its shutdown"
    if all_done and not left_loop and all(end.used_clusterddp for end in ends):
        return Verdict(Action.COMPLETE, finished)
    failures = _in_order([end for end in ends if end.failed])
    first = failures[0] if failures else None
    raised = first if first is not None and first.end is End.EXCEPTION else None
    others = tuple(failures[1:])
    restarts, because = (False, "") if first is None else _restarts(first, progress or Progress())
    if raised is not None and raised.used_clusterddp and not restarts and not stop_sent:
        return Verdict(Action.FAIL, _with(raised, because), Cause.NONE, raised, others, because)
    if first is not None and first.end is End.REFUSED and not restarts and not stop_sent:
        return Verdict(Action.FAIL, first.sentence(), Cause.NONE, first)
    if first is not None and first.end is End.DECLINED:
        return Verdict(Action.FAIL, first.sentence(), Cause.NONE, first)
    cause = ask()
    if cause is Cause.TIME_LIMIT and not stop_sent:
        cause = Cause.NONE
    if all_done and not _stopped(cause, left_loop, stop_sent):
        cause = Cause.NONE
    script_failed = raised is not None and not restarts and cause is Cause.UNKNOWN
    if cause is not Cause.NONE and not script_failed:
        reported = raised
        if reported is None and cause is Cause.UNKNOWN:
            reported = next((end for end in failures if end.end.of_launcher), None)
        return Verdict(_FOLLOWS.get(cause, Action.LEAVE), cause.value, cause, reported, others if raised else ())
    if all_done:
        return Verdict(Action.COMPLETE, finished)
    if first is not None and (early := _early_leaver(ends, failures)) is not None:
        others = tuple(end for end in failures if end.rank != early.rank)
        return Verdict(Action.RESTART, early.sentence(), cause, early, others)
    if first is not None and restarts:
        return Verdict(Action.RESTART, first.sentence(), cause, first, others, because)
    if first is not None:
        return Verdict(Action.FAIL, _with(first, because), cause, first, others, because)
    if stopped := [end for end in ends if end.end is End.STOPPED]:
        # By run.stop() or requeue(). A signal before all ranks had joined is not reported as one.
        if not stop_sent and all(end.used_clusterddp for end in stopped):
            cause = Cause.BY_SCRIPT
        return Verdict(Action.LEAVE, cause.value, cause)
    return Verdict(Action.FAIL, f"all ranks finished, but the launcher exited with code {exit_code}")


def _stopped(cause: Cause, left_loop: bool, stop_sent: bool) -> bool:
    """Whether ranks that exited with code 0 were stopped. A script that does not use clusterddp, or left its loop, also
    does so after a notice."""
    if left_loop:
        return stop_sent or cause is not Cause.UNKNOWN
    return cause not in _BY_REQUEST


def _restarts(failure: RankEnd, progress: Progress) -> tuple[bool, str]:
    """Whether all ranks restart in place after this first failure, and why if that depends on the progress made.

    Failures from outside the script may pass. So may an error of the script's own code (a file system that did not
    answer, a worker that was killed) if the code has worked before and does not fail at the same place again.
    """
    if failure.final or (failure.lacks_gpus and not progress.earlier):  # the job asks for too many
        return False, ""
    if failure.lacks_interface:  # without an attempt whose nodes had it, probably none has
        return progress.started, ""
    if failure.may_pass or (failure.end is End.REFUSED and progress.earlier):  # it has worked with these options
        return True, ""
    if failure.end not in (End.EXCEPTION, End.EXIT, End.DIED):
        return False, ""
    if failure.out_of_memory and progress.earlier and not progress.steps and progress.seconds < LONG_S:
        return True, "the previous attempt may still have held memory"
    again = failure.raised is not None and failure.raised == progress.last_failure
    same = "exit code at the same step" if failure.end is End.EXIT else "exception at the same line and step"
    if again and progress.quickly >= FRUITLESS - 1 and progress.seconds < LONG_S:  # it may save the same every time
        return False, f"3 attempts in a row failed with the same {same}, each in less than 10 minutes"
    if progress.saved:
        return True, "the script had written a new checkpoint"
    if again:
        return False, f"the previous attempt failed with the same {same}"
    if progress.steps:
        return True, f"the attempt had completed {counted(progress.steps, 'step')}"
    if progress.steps is None and progress.seconds >= PROGRESS_S:
        return True, f"the attempt had run for {progress.seconds:.0f} s"
    if progress.earlier:
        return True, "an earlier attempt had made progress"
    return False, ""


def _with(failure: RankEnd, because: str) -> str:
    return f"{failure.sentence()}. Not restarted, because {because}" if because else failure.sentence()


def _in_order(failures: list[RankEnd]) -> list[RankEnd]:
    """The failures, the first one in front: the rank whose connection ended first.

    A rank whose GPU had a fault comes first in any case. Among those that ended together, a rank that failed by itself
    comes before one that lost a peer, or was killed after a peer failed: these are likely its consequences. One that
    was asked to exit never comes first, even if the rank that failed before it was killed before it joined.
    """
    failures = sorted(failures, key=lambda end: (end.started, end.end is End.DISMISSED, end.lost_at, end.rank))
    # A peer that was lost must have failed before.
    within_s = CLOSING_S if failures and failures[0].lost_peer else JITTER_S
    near = [end for end in failures if end.lost_at <= failures[0].lost_at + within_s]
    near_by_themselves = [end for end in near if end.by_itself]
    # One that ended before it joined was never connected, but the launcher saw that it was the first.
    unseen = [end for end in failures if end.by_itself and math.isinf(end.lost_at)]
    faulty = [end for end in failures if end.fault]
    first = (faulty or near_by_themselves or unseen or near)[:1]
    return first + [end for end in failures if end not in first]


def _early_leaver(ends: Sequence[RankEnd], failures: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that exited with code 0 before the others failed, if all of those failed because they lost a peer.

    A rank without a record, for which the launcher reports no failure either, exited by ``os._exit(0)``.
    """
    silent = {end.rank for end in failures if end.end is End.DIED and end.death is None}
    consequences = [end for end in failures if end.rank not in silent and not end.ended_by_us]
    if not consequences or not all(end.lost_peer for end in consequences):
        return None
    until = consequences[0].lost_at + JITTER_S
    left = [end for end in ends if (end.end is End.DONE or end.rank in silent) and end.lost_at <= until]
    if not left:
        return None
    first = min(left, key=lambda end: end.lost_at)
    how = "exited with code 0" if first.end is End.DONE else "called os._exit(0), or was killed,"
    return dataclasses.replace(first, end=End.EARLY, error=f"{how} while other ranks waited for it")


#: The most other ranks that a box lists.
MOST_OTHERS = 8
#: How many bytes at the end of a rank's log are searched for a stack.
_LOG_BYTES = 1 << 20


def added_arguments(run: RunDirectory, attempt: AttemptView) -> str:
    """A line about the arguments that ``resume`` added to an attempt that failed before it made progress, else ''."""
    resumed = attempt.first(OwnResume)
    if resumed is None or attempt.has(*STEPPED, SavedItself):
        return ""
    if resumed.file is None:
        return "`resume` added no arguments, because there was no complete checkpoint"
    if not resumed.arguments:
        return ""
    there = "Check that the script can load it" if (run.path / resumed.file).exists() else "It does not exist"
    return f"`resume` added `{shlex.join(resumed.arguments)}` for {resumed.file}. {there}"


@dataclass(frozen=True)
class FirstFailure:
    """An attempt's first failure: how its rank ended, and then the others. How many steps were completed, if known."""

    end: RankEnd
    others: Sequence[RankEnd] = ()
    step: int | None = None


def failure_box(text: str) -> str:
    """``failure_text`` in a box."""
    lines = text.split("\n")
    wrapped = [piece for line in lines for piece in (textwrap.wrap(line, 116, drop_whitespace=False) or [""])]
    rule = "-" * 118
    return "\n".join([f"+{rule}", *(f"| {line}" for line in wrapped), f"+{rule}"])


def failure_text(
    run: RunDirectory,
    attempt: int,
    first: FirstFailure,
    now: float,
    secrets: Sequence[str] = (),
    then: Sequence[str] = (),
    above: bool = False,
) -> str:
    """The first failure: rank, host, time, its traceback or the end of its log, and the failures that it caused.

    ``secrets``: values to mask in the log. ``then``: further lines. ``above``: whether what the rank has printed is
    shown above, and is not repeated. A script may have closed its stderr.
    """
    failure, others = first.end, first.others
    logs = [run.attempt_logs(attempt) / f"rank-{failure.rank}.{kind}" for kind in ("err", "out")]
    if failure.end.of_launcher:
        logs = [run.launcher_log(attempt), run.nodes_log(attempt)]
    log = next((log for log in logs if end_of_file(log).strip()), logs[0])  # some programs report errors on stdout
    body = (failure.traceback or end_of_log(masked(end_of_file(log), secrets))).rstrip()
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(failure.lost_at, now)))
    # The end of a log of a rank that died may have a stack of many threads, of which the body is the one that matters.
    raised = failure.end is End.EXCEPTION and any(body in end_of_file(log) for log in logs)
    shown = [] if above and (raised or failure.end is End.EXIT) else [*body.splitlines(), ""]
    lines = [failure.sentence(), f"attempt {attempt}{at_step(first.step)}, {when}", "", *shown]
    lines += [*_who_waited(failure, others), *_different_calls(failure, others, body)]
    cause = failure.fault or (failure.known.cause if failure.known is not None else "")
    lines += [f"likely cause: {cause}"] if cause else []
    lines += [f"log: {log}", *filter(None, then), *_other_ends(failure, others)]
    return "\n".join(map(printable, lines))


def end_of_file(log: Path) -> str:
    """The last MiB of a log. Empty if it cannot be read."""
    try:
        with open_binary(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _who_waited(failure: RankEnd, others: Sequence[RankEnd]) -> list[str]:
    """The traceback of a rank that waited for one that exited early, as the latter has none."""
    exited = failure.end in (End.EARLY, End.UNFINISHED)
    waiting = next((end for end in others if end.traceback), None) if exited else None
    return [f"rank {waiting.rank} waited for this rank:", *waiting.traceback.splitlines(), ""] if waiting else []


def _different_calls(failure: RankEnd, others: Sequence[RankEnd], body: str) -> list[str]:
    """Where the ranks were, if they were in different collectives."""
    texts = {failure.rank: body, **{end.rank: end.traceback for end in others}}
    said = different_calls(f"{failure.error}\n{body}", texts)
    return [said, ""] if said else []


def _other_ends(failure: RankEnd, others: Sequence[RankEnd]) -> list[str]:
    """How the other ranks ended, independent failures first."""
    ordered = sorted(others, key=lambda end: (not end.by_itself, end.rank))
    lines = [_other_end(end, failure) for end in ordered[:MOST_OTHERS]]
    if len(ordered) > MOST_OTHERS:
        lines.append(f"as a result: {counted(len(ordered) - MOST_OTHERS, 'more rank')}")
    return ["", *lines] if lines else []


def _other_end(end: RankEnd, failure: RankEnd) -> str:
    """How another rank ended, which the launcher may have killed as the peer of a failed one."""
    if end.by_itself:
        return f"also failed: {end.sentence()}"
    if not end.ended_by_us:
        return f"as a result: {end.sentence()}"
    exited = failure.end in (End.EARLY, End.UNFINISHED)
    what = "hung" if failure.end.hung else "exited" if exited else "failed"
    return f"as a result: rank {end.rank} ({end.host}) was killed by clusterddp after rank {failure.rank} {what}"
