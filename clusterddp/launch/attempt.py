"""One attempt of one run: start all ranks, hear them, and when they are gone decide how the run goes on."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from clusterddp.errors import ClusterddpError, SlurmError, SlurmMissing, SlurmUnavailable
from clusterddp.hostlist import expand
from clusterddp.job import Job
from clusterddp.launch import exclusion, holder, slurm
from clusterddp.launch.cause import Cause
from clusterddp.launch.code_state import changed, code_state
from clusterddp.launch.controller import Controller
from clusterddp.launch.deaths import Death, in_order
from clusterddp.launch.hangs import Hang, Slow, Watch
from clusterddp.launch.history import History
from clusterddp.launch.launcher import Launcher, rank_command
from clusterddp.launch.limits import exceeded
from clusterddp.launch.link_server import LinkServer
from clusterddp.launch.monitor import Monitor, lead_s
from clusterddp.launch.narration import failure_box
from clusterddp.launch.verdict import Action, RankEnd, Verdict, check_record, judge
from clusterddp.link import ADDRESS_VARIABLE, SILENCE_S, TOKEN_VARIABLE
from clusterddp.masking import secret_values
from clusterddp.rundir import RunDirectory, write_json

#: What ``supervise`` returns when the ranks are to be started anew in this very job.
RESTART = -1
#: Pauses between two questions to a controller that does not answer: from the first to the longest, in seconds.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
#: Seconds that the ranks of a run that hangs have to leave by themselves; and that the peers of a rank that failed have
#: to fail of it, with words of their own, before they are told to leave, too. The launcher ends them as well, but Slurm
#: waits for KillWait where they take no TERM.
LEAVE_S = LET_GO_S = 3.0
#: From one question to a controller that does not answer to the next, while a node is silent, in seconds.
SILENT_PAUSE_S = 2.0


class Attempt:
    """The supervisor's work; the number was claimed before. ``submission``: the entry of the one that led to it."""

    def __init__(
        self,
        run: RunDirectory,
        job: Job,
        number: int,
        launcher: Launcher,
        controller: Controller,
        submission: Mapping[str, Any] | None = None,
    ) -> None:
        self._run, self._job, self._number, self._submission = run, job, number, submission
        self._launcher, self._controller = launcher, controller
        self._history = History(run, number)
        self._steps_before = (run.last_metrics() or {"step": -1})["step"] + 1
        self._secrets = secret_values(job, os.environ)
        self._hosts: dict[int, str] = {}
        self._lost_at: dict[int, float] = {}
        self._left: dict[int, Mapping[str, Any]] = {}
        self._silent: set[int] = set()
        self._letting_go: threading.Timer | None = None
        self._recorded, self._gone = threading.Event(), threading.Event()
        #: Cleared from when all ranks stop until rank 0, which saves then, is gone.
        self._saved = threading.Event()
        self._saved.set()
        self._told = self._heard = self._deaf = False
        self._watch: Watch | None = None
        if job.watchdog:
            self._watch = Watch(job.watchdog.beat_s, self._on_hang, self._on_slow, lambda: self._deaf)
        self._hang: tuple[Hang, float] | None = None

    def supervise(self) -> int:
        """Runs the attempt to its end; returns this process's exit code, or RESTART."""
        exit_code = self._train()
        return self._act(judge(self._ends(), exit_code, self._told, self._why))

    # --- while the ranks train

    def _train(self) -> int:
        token = secrets.token_hex(16)
        self._server = LinkServer(
            token, self._on_event, self._on_lost, self._launcher.supervisor_host, self._job.world_size
        )
        environment = {
            **os.environ,
            **self._job.env,
            "CLUSTERDDP_RUN_DIR": str(self._run),
            "CLUSTERDDP_ATTEMPT": str(self._number),
            "CLUSTERDDP_DEVICE": self._job.device,
            "CLUSTERDDP_LAUNCHER": self._launcher.name,
            ADDRESS_VARIABLE: f"{self._launcher.supervisor_host}:{self._server.port}",
            TOKEN_VARIABLE: token,
            "CLUSTERDDP_USR2_NOTICE_S": str(self.lead_s()),
            "CLUSTERDDP_WATCHDOG": "on" if self._watch else "off",
        }
        logs = self._run.attempt_logs(self._number)
        self._launcher.start(rank_command(self._job, self._number), environment, logs)
        monitor = Monitor(self._controller, self)
        try:
            self._tell_notice()
            try:
                self._record_start()  # while the ranks import torch: it asks git, on a disk that may be slow
            except OSError as error:
                print(f"clusterddp: the attempt's start cannot be recorded ({error}); training goes on", flush=True)
            self._recorded.set()
            return self._launcher.wait()
        finally:
            for happened in (self._gone, self._recorded, self._saved):
                happened.set()
            if self._letting_go is not None:
                self._letting_go.cancel()
            monitor.close()
            if self._watch:
                self._watch.close()
            self._server.close()

    def _tell_notice(self) -> None:
        """While the ranks are on their way: how long after a TERM they are killed. Without an answer nobody knows."""
        try:
            self._server.tell(term_notice_s=self._controller.term_notice_s())
        except SlurmError as error:
            print(f"clusterddp: cannot ask what notice a preemption gives: {error}", flush=True)

    def _record_start(self) -> None:
        if self._submission is not None:
            self._history.add("submitted", job=self._submission["job"], submitted=self._submission["time"])
        state = code_state(self._job)
        before = [event.get("code") or {} for event in self._run.events() if event["event"] == "started"]
        differences = changed(before[-1], state) if before else []
        started = {**self._controller.describe(), "ranks": self._job.world_size}
        self._history.add("started", **started, code=state, changed=differences)

    def _on_event(self, rank: int, event: str, values: Mapping[str, Any]) -> None:
        if event == "joined":
            self._hosts[rank] = values["host"]
            return
        if event == "alive":
            if self._watch:
                self._watch.hear(rank, self._hosts[rank], values)
            return
        if event == "left":
            self._on_left(rank, values)
            return
        if event == "stopping":
            self._saved.clear()
        if event == "signal":
            self._told = self._heard = True
        values = {"rank": rank, **values}
        if event == "resumed" and self._steps_before:
            values["redone"] = max(0, self._steps_before - values["step"])
        self._deaf = True  # no other event, and no sign of life, is heard meanwhile
        try:
            self._recorded.wait()  # the attempt's start comes first in the history
            self._history.add(event, **values)
        finally:
            self._deaf = False

    def _on_left(self, rank: int, values: Mapping[str, Any]) -> None:
        """A rank's last words: the record of its end."""
        check_record(values)
        self._left.setdefault(rank, values)
        if values["end"] not in ("done", "stopped"):
            self._lost_at.setdefault(rank, time.time())
            self._let_go(f"rank {rank} ({values['host']}) failed")

    def _on_lost(self, rank: int, silent: bool) -> None:
        # A peer that fails for want of a silent rank may say so before the silence is long enough.
        self._lost_at.setdefault(rank, time.time() - (SILENCE_S if silent else 0.0))
        if rank == 0:
            self._saved.set()
        if self._watch:
            self._watch.close()  # a lost rank, or node, is no hang
        if silent and rank not in self._left:
            first = not self._silent
            self._silent.add(rank)
            if first:
                threading.Thread(target=self._on_silence, args=(rank,), name="silence", daemon=True).start()
        elif rank not in self._left:
            self._let_go(f"rank {rank} ({self._hosts[rank]}) is gone")

    def _let_go(self, why: str) -> None:
        """Tells the other ranks to leave, soon; in a stop, and without a word of it, they may be saving."""
        if self._letting_go is None and not self._told:
            self._letting_go = threading.Timer(LET_GO_S, self._tell_to_leave, args=(why,))
            self._letting_go.daemon = True
            self._letting_go.start()

    def _tell_to_leave(self, why: str) -> None:
        if not self._told and self._saved.is_set():
            self._server.say(leave=why)

    def _on_silence(self, rank: int) -> None:
        """A rank's node does not answer. It is lost, unless this one is cut off: the controller is out of reach then.

        srun would wait for it until Slurm gives the node up, and so would the ranks on other nodes.
        """
        node, waiting = self._node_of(rank), False
        while not self._controller_answers():
            if not waiting:
                print(f"clusterddp: neither {node} nor the controller answers, waiting", flush=True)
            waiting = True
            if self._gone.wait(SILENT_PAUSE_S) or self.superseded():
                return
        self._recorded.wait()
        if self._gone.is_set():
            return
        self._history.add("node_lost", node=node, suspect=node, silent=sorted(self._silent))
        self._saved.wait()  # all ranks have agreed to stop: rank 0 needs nobody any more, and time
        self._server.say(leave=f"node {node} lost")
        self._launcher.abandon()

    def _controller_answers(self) -> bool:
        try:
            self._controller.notice()
        except SlurmUnavailable:
            return False
        except SlurmError:
            pass
        return True

    def _node_of(self, rank: int) -> str:
        """The node that a rank is on: its host, where Slurm calls it so, else where the launcher puts that rank."""
        host = self._hosts.get(rank, "unknown")
        try:
            nodes = expand(self._controller.describe()["nodes"])
            return host if host in nodes else nodes[rank // self._job.ranks_per_node]
        except (ClusterddpError, IndexError):
            return host

    def _on_slow(self, slow: Slow) -> None:
        self._history.add("slow", **dataclasses.asdict(slow))

    def _on_hang(self, hang: Hang) -> None:
        """Ends all ranks: those that can leave by themselves do when they are told, and the launcher ends the rest."""
        if self._gone.is_set():
            return
        self._hang = hang, time.time()
        self._history.add("hung", rank=hang.late[0], **dataclasses.asdict(hang))
        self._server.say(leave=hang.what)
        if not self._gone.wait(LEAVE_S):
            self._launcher.kill()

    # --- what the monitor asks and tells

    def superseded(self) -> bool:
        """Whether a newer attempt exists."""
        return self._run.superseded(self._number)

    def lead_s(self) -> float:
        """How many seconds before the time limit to stop."""
        return lead_s(self._job, self._history.last_save_s)

    def training(self) -> bool:
        """Whether the ranks have been heard of."""
        return bool(self._hosts)

    def heard(self) -> bool:
        """Whether a rank has said that it was told to stop."""
        return self._heard

    def on_notice(self, why: str) -> None:
        """Tells the ranks first."""
        self._launcher.notify()
        if not self._told:
            self._history.add("notice", why=why)
        self._told = True

    def on_superseded(self) -> None:
        """A newer attempt trains the run: the ranks notice it when their line breaks, and leave by themselves.

        srun may wait for ever for a node that it cannot reach any more.
        """
        self._history.close()
        self._server.close()
        self._launcher.abandon()

    def on_controller(self, away: str | None) -> None:
        """Training goes on without it."""
        self._recorded.wait()
        if away is None:
            self._history.add("controller_back")
        else:
            self._history.add("controller_away", error=away)

    # --- when the ranks are gone

    def _ends(self) -> list[RankEnd]:
        """How every rank ended: by its last words, else its record, else what the launcher knows of its process.

        The one that hung comes first.
        """
        deaths = in_order(self._launcher.deaths())
        ends = [self._end_of(rank, deaths.get(rank)) for rank in range(self._job.world_size)]
        if self._hang is not None and ends[self._hang[0].late[0]].failed:
            hang, found_at = self._hang
            end = "hung" if self._job.watchdog and self._job.watchdog.on_hang == "restart" else "hung for good"
            ends[hang.late[0]] = RankEnd(hang.late[0], hang.host, end, found_at, hang.what, used_clusterddp=True)
        return [end.without(self._secrets) for end in ends]

    def _end_of(self, rank: int, death: Death | None) -> RankEnd:
        host, lost_at = self._hosts.get(rank) or self._node_of(rank), self._lost_at.get(rank, float("inf"))
        if rank in self._left:
            return RankEnd.from_record(rank, host, lost_at, self._left[rank])
        end = RankEnd.read(rank, host, lost_at, self._run.rank_record(self._number, rank), death)
        if rank in self._silent and end.end == "died":
            return RankEnd(rank, host, "silent", lost_at, error=f"lost with its node {self._node_of(rank)}")
        return end

    def _why(self) -> Cause:
        """The newer attempt and the mark that ``clusterddp cancel`` leaves come before the controller's word.

        A controller that is away is asked until it answers: nothing is ever requeued blind, and at the end of the grace
        we are killed.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            if self.superseded():
                return Cause.SUPERSEDED
            if self._run.cancelled:
                return Cause.CANCELLED
            try:
                return self._controller.why(self.lead_s())
            except SlurmMissing:
                return Cause.UNKNOWN
            except SlurmUnavailable as error:
                print(f"clusterddp: asking again in {pause_s:g} s: {error}", flush=True)
                time.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            except SlurmError as error:
                print(f"clusterddp: {error}", flush=True)
                return Cause.UNKNOWN

    def _act(self, verdict: Verdict) -> int:
        if verdict.cause is Cause.SUPERSEDED or self.superseded():
            newest = self._run.newest_attempt()
            print(f"clusterddp: attempt {self._number} superseded by attempt {newest}; not writing", flush=True)
            return 1
        if verdict.first_failure is not None:
            self._tell_failure(verdict.first_failure, verdict.others)
        if verdict.action is Action.RESTART:
            return self._restart(verdict)
        if verdict.action is Action.AGAIN or (verdict.action is Action.LEAVE_TO_SLURM and self._ends_for_good()):
            return self._again(verdict)
        if verdict.action in (Action.LEAVE, Action.LEAVE_TO_SLURM):
            if verdict.cause in (Cause.UNKNOWN, Cause.ENDED_OTHERWISE):
                self._ask_watcher()
            then = "requeued by Slurm" if verdict.action is Action.LEAVE_TO_SLURM else "stopped"
            self._add_end("stopped", verdict, then=then)
            return self._controller.leave_code
        self._history.conclude(verdict.action.value, verdict.reason)
        return verdict.exit_code

    def _tell_failure(self, failure: RankEnd, others: Sequence[RankEnd]) -> None:
        """In the history, and as a box in the job's log."""
        step = self._history.saved()["step"]
        if self._hang is None:  # which is in the history already
            self._add_failure(failure, step)
        box = failure_box(self._run, self._number, failure, others, step, time.time())
        print(box, file=sys.stderr, flush=True)

    def _add_failure(self, failure: RankEnd, step: int | None) -> None:
        values: dict[str, Any] = {"rank": failure.rank, "host": failure.host, "error": failure.words()}
        if step is not None:
            values["step"] = step
        if failure.of_the_node and self._controller.resubmits:
            values["suspect"] = self._node_of(failure.rank)
        self._history.add("rank_failed", **values)

    def _ends_for_good(self) -> bool:
        """Whether Slurm, which has ended the job for a preemption, will not run it again."""
        try:
            return self._controller.ends_what_it_preempts()
        except SlurmError as error:
            print(f"clusterddp: cannot ask whether this partition requeues what it preempts: {error}", flush=True)
            return False

    def _restart(self, verdict: Verdict) -> int:
        """The run goes on here and now, from the newest checkpoint, as a new attempt of the same job.

        In a new job where a node of this one is to be left out: Slurm changes no nodes of a job that runs.
        """
        if self._bounded("restarted", verdict):
            return verdict.exit_code
        lost = self._node_of(min(self._silent)) if self._silent else None
        if lost is not None and not self._controller.starts_again:
            self._add_end("stopped", verdict)  # no step of this shape starts in what is left of the allocation
            return self._controller.leave_code
        if self._controller.resubmits and self._controller.starts_again:
            choice = self._choose_nodes(lost)
            if lost is not None:
                return self._resubmit(verdict, choice.nodes, node_lost=True)
            if {self._node_of(rank) for rank in range(self._job.world_size)} & set(choice.nodes):
                try:
                    return self._hand_over(verdict, self._controller.resubmit(choice.nodes))
                except SlurmError as error:
                    self._history.add("not_excluded", reason=f"no new job can be had ({error})")
        hung = self._hang and f"rank {self._hang[0].late[0]} ({self._hang[0].host}) hung"
        self._add_end("restarted", verdict, hung)
        return RESTART

    def _choose_nodes(self, lost: str | None) -> exclusion.Choice:
        """Which nodes the next job leaves out; says so where that is new, or cannot be."""
        events, now = self._run.events(), time.time()
        if lost is None and not set(exclusion.failed(events, now)) - set(exclusion.excluded(events, now)):
            return exclusion.Choice()
        usable = self._usable_nodes()
        if usable is None:
            return exclusion.Choice()
        choice = exclusion.choose(events, lost, usable, self._needed_nodes, now)
        if choice.refused:
            self._history.add("not_excluded", reason=choice.refused)
        if choice.new:
            times = [len(exclusion.failures(events, node, now)) for node in choice.new]
            self._history.add("excluded", nodes=list(choice.new), failures=times)
        return choice

    def _excluded(self) -> list[str]:
        """The nodes that a new job is to go without, as the ones before did: only as long as enough others work."""
        nodes = exclusion.excluded(self._run.events(), time.time())
        usable = self._usable_nodes() if nodes else None
        return nodes if usable is not None and len(set(usable) - set(nodes)) >= self._needed_nodes else []

    def _usable_nodes(self) -> list[str] | None:
        """Those that the job could be given; None when that cannot be told."""
        try:
            return self._controller.usable_nodes()
        except ClusterddpError as error:  # Slurm's silence, or the job's `exclude` names a file
            print(f"clusterddp: cannot tell which nodes there are, none is left out: {error}", flush=True)
            return None

    @property
    def _needed_nodes(self) -> int:
        return self._job.min_nodes or self._job.nodes

    def _bounded(self, event: str, verdict: Verdict) -> bool:
        """Ends the run as failed when it may not have another attempt; whether it did."""
        end = {"event": event, "attempt": self._number, "time": time.time(), "cause": verdict.cause.value}
        reason = exceeded(self._job, [*self._run.events(), end], time.time())
        if reason is not None:
            self._history.conclude(Action.FAIL.value, f"{verdict.reason}, and {reason}")
        return reason is not None

    def _again(self, verdict: Verdict) -> int:
        """The run goes on: by a requeue where that is possible and wanted, else in a new job."""
        if self._bounded("stopped", verdict):
            return 1
        if not self._controller.starts_again:
            self._add_end("stopped", verdict)
            return self._controller.leave_code
        wanted = self._job.policy != "resubmit" or not self._controller.resubmits
        if not (wanted and verdict.cause in (Cause.PREEMPTED, Cause.TIME_LIMIT)):
            return self._resubmit(verdict, self._excluded())
        try:
            window_s = self._requeue(verdict.cause)
        except _Changed as changed_to:
            return self._act(changed_to.verdict)
        except SlurmError as error:
            self._history.add("requeue_refused", error=str(error))
            return self._resubmit(verdict, self._excluded())
        self._add_end("requeued", verdict, window_s=window_s)
        return self._controller.again_code

    def _requeue(self, cause: Cause) -> float:
        """Requeues until the controller answers; each time it is asked just before whether that is still right.

        A request that got no answer may have been carried out all the same. Returns the seconds between the question
        and the requeue's answer: a scancel in there is undone, because Slurm requeues what is being cancelled, too.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            now = self._why()
            if now is not cause:
                raise _Changed(self._judge_anew(now))
            asked = time.monotonic()
            try:
                self._controller.requeue()
                return round(time.monotonic() - asked, 4)
            except SlurmMissing:
                raise
            except SlurmUnavailable as error:
                print(f"clusterddp: trying again in {pause_s:g} s: {error}", flush=True)
                time.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _judge_anew(self, cause: Cause) -> Verdict:
        return judge(self._ends(), 0, self._told, lambda: cause)

    def _resubmit(self, verdict: Verdict, without: Sequence[str] = (), node_lost: bool = False) -> int:
        """Continues the run in a new job; where that is refused, the run waits for someone to do so.

        Slurm may take minutes to end a job with a lost node: the new one does not wait for it.
        """
        if node_lost:
            holder.let_go(self._run, self._number)
        try:
            new = self._controller.resubmit(without, after_this=not node_lost)
        except SlurmError as error:
            if node_lost:
                holder.take(self._run, self._number, self._controller.holder())
            self._ask_watcher()
            self._add_end("stopped", verdict, f"{verdict.reason}; not resubmitted: {error}")
            return self._controller.leave_code
        return self._hand_over(verdict, new)

    def _hand_over(self, verdict: Verdict, new: str) -> int:
        """The run goes on in the job ``new``. scancel of this job at any moment up to here ends that one, too."""
        if self._why() in (Cause.CANCELLED, Cause.ENDED_IN_GRACE):
            slurm.cancel(new)
            self._history.conclude(Action.CANCEL.value, "cancelled while it was being resubmitted")
            return 1
        self._add_end("resubmitted", verdict, job=new)
        return self._controller.again_code

    def _ask_watcher(self) -> None:
        """Leaves a request for ``clusterddp watch``, which finds out whether the run should go on and resubmits it."""
        write_json(self._run.request_file, {"attempt": self._number, **self._controller.describe()}, mode=0o600)

    def _add_end(self, event: str, verdict: Verdict, reason: str | None = None, **values: Any) -> None:
        ended = {"reason": reason or verdict.reason, "cause": verdict.cause.value, **self._history.saved()}
        self._history.add(event, **ended, **values)


class _Changed(Exception):
    """What the controller says has changed while it was asked for something."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict
