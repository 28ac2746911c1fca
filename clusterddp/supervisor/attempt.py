"""One attempt of a run: starts all ranks and handles their events until they have exited.

The main thread reads events from one queue: reports of ranks and broken connections (from the control server's thread),
a newer attempt and the controller's answers (from the monitor's), the launcher's exit (from a thread that waits for
it), hung and slow ranks, and expired timers. ``decide.step`` decides what follows. A separate thread writes the
history, so that a slow disk does not delay answers to ranks. TERM, USR2 and CONT have no effect on the supervisor
itself (``main.prepare_process``).
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from clusterddp import protocol
from clusterddp.errors import ClusterddpError, SlurmError, SlurmUnavailable
from clusterddp.failures import exclusion, exit_status, node_memory
from clusterddp.failures.hangs import Watch
from clusterddp.failures.placement import Placement
from clusterddp.history.beginnings import NotRead, OwnCheckpointRead, Started, Submitted
from clusterddp.history.checkpoints import Checkpoint
from clusterddp.history.ends import Completed
from clusterddp.history.event import Event as Line
from clusterddp.history.failures import Moved
from clusterddp.history.steps import ChildStep, DeviceMemory, Progress, StepsSeen
from clusterddp.history.stops import Overdue
from clusterddp.hostlist import expand
from clusterddp.jobdef import code_snapshot
from clusterddp.jobdef.code_state import changed_code, code_state
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.secrets import secret_values
from clusterddp.messages.reports import End, Wrote
from clusterddp.process import RunningClock
from clusterddp.reporter import say
from clusterddp.rundir.claims import JobClaim
from clusterddp.rundir.control_address import Address, write_address
from clusterddp.rundir.files import HIDDEN_S, create_folder, exists, read_bytes, status, write_atomically
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import is_time
from clusterddp.rundir.timing import TimingFile, TimingLines
from clusterddp.supervisor import decide
from clusterddp.supervisor.attempt_progress import lost_steps
from clusterddp.supervisor.attempt_state import (
    Action,
    Answer,
    Broadcast,
    ConnectionLost,
    Do,
    Event,
    GpuFigures,
    Heartbeat,
    NodeNames,
    Notice,
    RankEvent,
    RankFailed,
    RanksExited,
    Record,
    Request,
    Say,
    SilentNodes,
    StartTimer,
    State,
    StepWaits,
    Stop,
    TermNotice,
    Timer,
)
from clusterddp.supervisor.control_server import ControlServer, Handlers
from clusterddp.supervisor.controller import Controller, Monitor
from clusterddp.supervisor.history import History
from clusterddp.supervisor.hook import Hook
from clusterddp.supervisor.launcher import Launcher, rank_command
from clusterddp.supervisor.recovery import RESTART, AttemptResult, Recovery
from clusterddp.supervisor.retry_limits import gpu_hours_end
from clusterddp.supervisor.script_checkpoints import LAST_SEARCH_S, ScriptCheckpoints
from clusterddp.supervisor.step_log import StepLog
from clusterddp.supervisor.verdict import RankEnd, end_of_file, rank_ends
from clusterddp.trackers.registry import TRACKERS
from clusterddp.worker.code_paths import mapped_variables

#: How often the main thread wakes while a timer runs, in seconds, so that it sees that it was stopped meanwhile.
TICK_S = 2.0


class Attempt:
    """Supervises an attempt whose number is already claimed. ``submission``: the claim of its job.

    ``placement``: which nodes of the job have ranks. None: all.
    """

    def __init__(
        self,
        run: RunDirectory,
        job: Job,
        number: int,
        launcher: Launcher,
        controller: Controller,
        submission: JobClaim | None = None,
        placement: Placement | None = None,
    ) -> None:
        self._run, self._job, self._number, self._submission = run, job, number, submission
        self._launcher, self._controller = launcher, controller
        self._history = History(run, number, secret_values(job, os.environ))
        self._hook = Hook(run, job, number, hurry=controller.resubmits)
        self._history.listener = self._on_event
        self._code = code_snapshot.present(run)
        before = last_line(run)
        #: When the run last completed a step, before this attempt; None if it never did.
        self._seen = before.get("time") if is_time(before.get("time")) else None
        placement = placement or Placement(nodes_of(controller), nodes_of(controller))
        nodes, steps = NodeNames(placement.nodes), before.get("step", -1) + 1
        history, idle_nodes = self._history.view, len(placement.spares) + len(placement.aside)
        self._state = State(
            *(job, nodes, steps, launcher.abandon_s, controller.starts_again, placement),
            made_before=lost_steps(history, number),
            gpu_hours_end=gpu_hours_end(job, history, time.time(), idle_nodes),
        )
        self._events: queue.SimpleQueue[tuple[float, Event | BaseException]] = queue.SimpleQueue()
        #: When each running timer expires, on a clock that stops with this process: the job may be suspended.
        self._timers = {Timer.STOP_CHECK: 0.0, Timer.WATCHDOG: 0.0}
        self._clock = RunningClock(TICK_S)
        self._watch = self._new_watch()
        began = time.time() if history.began is None else history.began
        self._script_checkpoints, self._ended = ScriptCheckpoints(run, job, number, history), threading.Event()
        self._timing, self._timing_file = TimingLines(number, job.world_size, began), TimingFile(run)
        #: Reads the steps of a script that does not use clusterddp, where the job says how.
        self._step_log: StepLog | None = None
        #: Work for the history thread. None ends it.
        self._writes: queue.Queue[Callable[[], Any] | None] = queue.Queue()

    def _on_event(self, event: Line) -> None:
        self._hook.notify(event)
        if self._job.node_memory:
            node_memory.remember(self._run, self._controller.describe().job, event)

    def _new_watch(self) -> Watch | None:
        watchdog = self._job.watchdog
        return Watch(watchdog.period_s(self._job.world_size)) if watchdog else None

    def supervise(self) -> int:
        """Runs the attempt to its end. Returns this process's exit code, or RESTART.

        Raises the error of a failed thread, because without that thread it would miss a stop or the end of a rank.
        """
        self._run_ranks()
        if self._state.removed:
            return 1
        with suppress(OSError):  # the script may have deleted it, and the next attempt's log goes there
            create_folder(self._run.logs, exist_ok=True)
        self._find_failed_nodes()
        self._find_lost_nodes()
        self._find_dead_nodes()
        self._await_records()
        code = Recovery(self._run, self._number, self._controller, self._history, self._result()).act()
        if code != RESTART:
            self._hook.finish()
        return code

    def _find_failed_nodes(self) -> None:
        """The nodes that srun reports as failed. It killed the ranks of the others, whose connections may end first."""
        state, failed = self._state, exit_status.failed_nodes(end_of_file(self._run.launcher_log(self._number)))
        ranks = [rank for rank in range(self._job.world_size) if state.node_of(rank) in failed]
        at = min([time.time(), *state.lost_at.values()])
        self._state = decide.lose(state, [rank for rank in ranks if rank not in state.ends], at)

    def _find_lost_nodes(self) -> None:
        """Asks Slurm which nodes the job still has, if ranks failed before they joined.

        If ranks restart on a node that still answered (``_find_dead_nodes``), or may have answered, srun waits until
        Slurm takes the node out of the job, and fails without naming it (seen on 22.05.8).
        """
        state = self._state
        joined = len(state.hosts.keys() | state.ends.keys())
        if not self._job.outlives_nodes or state.exit_code == 0 or joined == self._job.world_size:
            return
        try:
            notice = self._controller.notice()
        except SlurmError as error:
            say(f"could not ask Slurm which nodes the job still has: {error}")
            return
        self._state = decide.lose_unjoined(replace(state, notice=notice), time.time())

    def _find_dead_nodes(self) -> None:
        """Asks nodes directly whose ranks, all of them, have finished or reported no end, and have no exit status.

        srun reports a status for a process that died while its node lives. If a node is rebooted, its ranks'
        connections are closed, and Slurm needs SlurmdTimeout to notice the loss. A job that ends has no time for this.
        """
        state, ranks = self._state, dict[str, list[int]]()
        if state.exit_code == 0 or state.superseded or state.notice.stop is not None:
            return
        failed = {rank for rank, left in state.ends.items() if left.end is not End.DONE}
        known = failed | state.silent | self._launcher.exit_statuses().keys()
        for rank in range(self._job.world_size):
            ranks.setdefault(state.node_of(rank), []).append(rank)
        asked = [node for node in state.nodes if node in ranks and known.isdisjoint(ranks[node])]
        try:
            dead = self._controller.unanswering(asked) if asked else ()
        except SlurmError as error:
            say(f"could not look for nodes that do not respond: {error}")
            return
        self._state = decide.lose(state, [rank for node in dead for rank in ranks[node]], time.time())

    def _await_records(self) -> None:
        """Waits until the disk shows how ranks on other nodes ended whose last reports were lost with their connection.

        Without a record, a rank that had steps left counts as ended by ``os._exit(0)``, and the run fails. After a
        request to stop, its cause decides what follows.
        """
        state, here = self._state, nodes_of(self._controller)[:1]
        if state.exit_code != 0 or not state.unfinished or state.superseded or state.stops_sent or state.notice.stop:
            return
        joined = sorted(state.hosts.keys() - state.ends.keys())
        records = [self._run.rank_record(self._number, rank) for rank in joined if state.node_of(rank) not in here]
        deadline, told = time.monotonic() + HIDDEN_S, False
        while time.monotonic() < deadline:
            with suppress(OSError):
                if all(map(exists, records)):
                    return
            if not told:
                say(f"waiting up to {HIDDEN_S:.0f} s for the records of ranks whose last reports are missing")
                told = True
            time.sleep(1)

    def post(self, event: Event) -> None:
        """Adds an event to the queue. From any thread."""
        self._events.put((time.time(), event))

    # --- while the ranks run

    def _run_ranks(self) -> None:
        token = secrets.token_hex(16)
        handlers = Handlers(
            on_report=lambda rank, report: self.post(RankEvent(rank, report)),
            on_lost=lambda rank, silent: self.post(ConnectionLost(rank, silent)),
            on_request=lambda client, request: self.post(Request(client, request)),
            failed=self._fail,
        )
        self._server = ControlServer(token, handlers, self._launcher.supervisor_host, self._job.world_size)
        logs = self._run.attempt_logs(self._number)
        self._launched = time.time()
        self._launcher.failed = lambda rank: self.post(RankFailed(rank))
        self._launcher.record = self._record
        resumed = self._script_checkpoints.begin()
        self._launcher.start(
            rank_command(self._job, self._script_checkpoints.newest is not None, self._run.package_file),
            self._environment(token),
            logs,
        )
        self._start_timer(Timer.STEP, decide.STEP_S)
        margin_s = lambda: self._state.stop_margin_s  # noqa: E731
        self._monitor = Monitor(self._controller, self._run, self._number, self.post, margin_s, self._fail)
        for write in (
            partial(self._record_address, token),
            self._record_start,
            lambda: self._history.add(resumed) if resumed else None,
            lambda: self._start("launcher", self._wait),  # so that the start is recorded before the end
        ):
            self._writes.put(write)
        history = self._start("history", self._write)
        self._start("grace period", self._tell_notice)  # not in that one: a busy controller may take minutes
        if self._job.step_log is not None:
            self._step_log = StepLog(self._run, self._number, self._job.step_log, self.post)
        looks = self._start("own checkpoints", lambda: self._script_checkpoints.watch(self._ended, self._record))
        try:
            while self._state.exit_code is None:
                self._handle(*self._next_event())
        finally:
            self._monitor.close()
            self._server.close()
            if self._step_log is not None:
                self._step_log.close(read_rest=not self._state.superseded)
            late: Exception | None = None
            while not self._events.empty():  # the last reports of the ranks
                try:
                    self._handle(*self._events.get())
                except Exception as error:  # raised once the history is written
                    late = late or error
            self._write_timing(self._timing.interval)
            self._ended.set()
            looks.join(LAST_SEARCH_S)  # a requeue does not wait for a disk
            with suppress(OSError):
                if exists(self._run.child_step_file(self._number)):
                    self._record(ChildStep())
            self._writes.put(None)
            history.join()
            if late is not None:
                raise late
            self._tell_of_missing_steps()

    def _tell_of_missing_steps(self) -> None:
        """Reports that `steps: {log: ...}` matched no line, although rank 0 made steps or the script finished."""
        own = self._history.view.attempt(self._number)
        if self._step_log is not None and not self._step_log.has_matched and own.has(StepsSeen, Completed):
            say(
                f"no line of rank 0's output matched `steps: {{log: {self._job.step_log!r}}}` in attempt {self._number}"
                ". Correct the pattern, and submit the run again with --change"
            )

    def _environment(self, token: str) -> dict[str, str]:
        """The environment of the ranks."""
        environ = {**os.environ, **self._script_checkpoints.variables()}
        if self._code is not None:
            environ |= mapped_variables(environ, self._code.checkout, str(self._code.folder(self._run)))
        used = self._history.view.last(DeviceMemory)
        return {
            **environ,
            **self._script_trackers(),
            **({protocol.DEVICE_MEMORY: str(used.bytes)} if used else {}),
            **self._script_checkpoints.saved(),
            **self._committed(),
            **({protocol.STOP_SIGNAL: self._job.stop.signal} if self._job.stop.signal else {}),
            protocol.RUN_DIR: str(self._run),
            protocol.RUN_INODE: str(status(self._run.path).st_ino),
            protocol.ATTEMPT: str(self._number),
            protocol.FIRST_JOB: self._first_job(),
            protocol.DEVICE: self._job.device,
            protocol.LAUNCHER: self._launcher.name,
            protocol.SUPERVISOR: f"{self._launcher.supervisor_host}:{self._server.port}",
            protocol.TOKEN: token,
            protocol.USR2_NOTICE_S: str(self._state.stop_margin_s),
            protocol.WATCHDOG: "on" if self._watch else "off",
            protocol.PROTECT_SAVES: "on" if self._job.protect_saves else "off",
            protocol.SEE_STEPS: "on" if self._job.see_steps else "off",
            protocol.HYDRA: str(self._run_began()) if self._job.hydra else "",
            protocol.PREFLIGHT: "on" if self._job.preflight and self._on_new_nodes() else "off",
        }

    def _committed(self) -> dict[str, str]:
        """The last attempt's newest checkpoint, if ranks have moved to other nodes, where a shared disk may hide it."""
        before = self._history.view.attempt(self._number - 1)
        newest = before.last(Checkpoint)
        return {protocol.COMMITTED: str(newest.step)} if newest is not None and before.has(Moved) else {}

    def _first_job(self) -> str:
        """The run's name in `submitit.JobEnvironment()`: the same in all attempts, also after a resubmission."""
        first = self._history.view.first(Started)
        job = self._controller.describe().job if first is None else first.job
        return str(self._run.path.name if job is None else job)

    def _run_began(self) -> float:
        """The same moment in every attempt: that of the first event, which in the first attempt is its start."""
        began = self._history.view.began
        return self._launched if began is None else began

    def _script_trackers(self) -> dict[str, str]:
        """For trackers that the script itself uses, unless this run sends its metrics there."""
        variables: dict[str, str] = {protocol.TRACKERS: " ".join(sorted(TRACKERS.keys() - self._job.trackers.keys()))}
        try:
            return {**variables, protocol.RUN_ID: run_id(self._run)}
        except OSError as error:
            say(f"could not record an id ({error}). If the script uses W&B, each attempt starts a new W&B run")
            return variables

    def _on_new_nodes(self) -> bool:
        """Whether some of the nodes have not passed a preflight of this run, or are unknown."""
        nodes = self._state.nodes
        return not nodes or bool(exclusion.unchecked(self._history.view, nodes))

    def _start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Starts a thread. Its exception is raised in the main thread."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._fail(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _fail(self, error: BaseException) -> None:
        """Raises a thread's exception in the main thread."""
        self._events.put((time.time(), error))

    def _wait(self) -> None:
        self.post(RanksExited(self._launcher.wait()))

    def _ask_nodes(self, nodes: Sequence[str]) -> None:
        try:
            dead: Sequence[str] | None = self._controller.unanswering(nodes)
        except SlurmError as error:
            say(f"could not look for nodes that do not respond: {error}")
            dead = None if isinstance(error, SlurmUnavailable) else nodes  # Slurm may use other names
        self.post(SilentNodes(tuple(nodes), None if dead is None else tuple(dead)))

    def _ask_step(self) -> None:
        try:
            self.post(StepWaits(self._controller.waits_for_nodes(self._launcher.pid)))
        except SlurmError as error:
            say(f"could not ask Slurm whether the ranks' step was created: {error}")
            self.post(StepWaits(None))

    def _next_event(self) -> tuple[float, Event | BaseException]:
        """The next event and when it came. An expired timer goes before the queue."""
        if not self._timers:
            return self._events.get()
        timer, expires = min(self._timers.items(), key=itemgetter(1))
        self._clock.look()
        while (left_s := expires - self._clock.now) > 0:
            with suppress(queue.Empty):
                return self._events.get(timeout=min(left_s, TICK_S))
            self._clock.look()
        del self._timers[timer]
        return time.time(), timer

    def _start_timer(self, timer: Timer, seconds: float) -> None:
        self._clock.look()
        self._timers[timer] = self._clock.now + seconds

    def _handle(self, now: float, event: Event | BaseException) -> None:
        if isinstance(event, BaseException):
            raise event
        report = event.report if isinstance(event, RankEvent) else None
        if isinstance(report, Wrote):
            self._script_checkpoints.written = report.file
            return
        if isinstance(event, RankEvent) and isinstance(report, OwnCheckpointRead | NotRead):
            event = replace(event, report=replace(report, file=self._script_checkpoints.named(report.file)))
        self._tell_hook(now, event)
        if self._step_log is not None and isinstance(report, Progress):
            self._step_log.close()  # the script has a loop of clusterddp, which writes the metrics itself
            self._step_log = None
        self._state, actions = decide.step(self._state, event, now)
        failed: Exception | None = None
        for action in actions:  # all of them, because the new state counts on each
            try:
                self._carry_out(action, now)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _tell_hook(self, now: float, event: Event) -> None:
        """Calls the hook as soon as a preemption is certain, because later the nodes must be handed over."""
        if not self._hook or self._state.superseded:
            return
        if isinstance(event, Notice) and event.stop is Stop.PREEMPTION:
            start = {name: value for name, value in vars(self._controller.describe()).items() if value is not None}
            self._hook.call("preempted", {"time": now, "attempt": self._number, **start})

    def _carry_out(self, action: Action, now: float) -> None:
        """Carries out an action, without waiting for a disk, a rank or the controller."""
        match action:
            case Record(event):
                if isinstance(event, Overdue) and self._watch and (behind := self._watch.behind()):
                    event = replace(event, behind=behind)  # rank 0 reports it, and sees only its own place
                self._record(replace(event, time=now))
            case Say(text):
                self._writes.put(partial(say, text))
            case Broadcast(order, ranks):
                self._server.broadcast(order, ranks)
            case Answer(client, answer):
                self._server.answer(client, answer)
            case StartTimer(timer, seconds):
                self._start_timer(timer, seconds)
            case Heartbeat(rank, host, beat):
                if self._watch:
                    self._watch.update(rank, host, beat)
                self._timing.update(rank, beat, now)
                if self._timing.due(now):
                    self._write_timing(self._timing.interval)
            case GpuFigures(rank, figures):
                self._timing.update_gpus(rank, figures)
            case Do.ASK_CONTROLLER:
                self._monitor.ask()
            case Do.ASK_AGAIN:
                self._monitor.ask(often=False)
            case Do.ASK_NODES:
                self._start("nodes", partial(self._ask_nodes, self._state.lost_nodes))
            case Do.ASK_STEP:
                self._start("step", self._ask_step)
            case Do.NOTIFY_RANKS:
                self._launcher.notify()
            case Do.KILL_RANKS:
                self._launcher.kill()
            case Do.ABANDON_RANKS:
                self._launcher.abandon()
            case Do.RUN_WATCHDOG:
                # Time in which the disk blocks the history does not count, because ranks may wait for the same disk.
                counts, gone = self._writes.unfinished_tasks == 0, self._state.lost_at.keys()
                for found in self._watch.look(counts, gone) if self._watch else ():
                    self.post(found)
            case Do.RESET_WATCHDOG:
                self._watch = self._new_watch()
            case Do.FENCE:
                if self._step_log is not None:
                    self._step_log.close()
                self._history.close()
                self._timing_file.close()
                self._server.close()

    def _record(self, event: Line) -> None:
        self._writes.put(partial(self._history.add, event))

    def _write_timing(self, lines: Callable[[float, Sequence[str]], list[dict[str, Any]]]) -> None:
        hosts = [self._state.node_of(rank) for rank in range(self._job.world_size)]
        self._writes.put(partial(self._timing_file.append, lines(time.time(), hosts)))

    # --- in the thread of the history

    def _write(self) -> None:
        while (write := self._writes.get()) is not None:
            write()
            self._writes.task_done()

    def _record_address(self, token: str) -> None:
        """Records where the user's requests reach this process."""
        host = self._launcher.supervisor_host or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        try:
            job_id = os.environ.get("SLURM_JOB_ID")
            write_address(self._run, self._number, Address(host, self._server.port, token, job_id))
        except OSError as error:
            say(
                f"could not record the supervisor's address ({error}). Commands such as `clusterddp stop` cannot reach "
                "this attempt"
            )

    def _tell_notice(self) -> None:
        """While the ranks start, sends them how long after a TERM they are killed, unless Slurm gives no answer."""
        try:
            seconds = self._controller.term_notice_s()
            self._server.tell(term_notice_s=seconds)
            if seconds is not None:
                self.post(TermNotice(seconds))
        except SlurmError as error:
            say(f"could not determine the grace period of a preemption: {error}")

    def _record_start(self) -> None:
        """While the ranks import torch: this runs git, on a disk that may be slow."""
        try:
            submission = self._submission
            if submission is not None and submission.time is not None:
                self._history.add(Submitted(time=self._launched, job=submission.job, submitted=submission.time))
            state = code_state(self._job, self._code.state() if self._code else None)
            before = self._history.view.last(Started)
            differences = changed_code(before.code, state) if before is not None else []
            start, placement = self._controller.describe(), self._state.placement
            idle = placement.spares or placement.aside
            started = Started(
                time=self._launched,
                job=start.job,
                restarts=start.restarts,
                pid=start.pid,
                nodes=",".join(self._state.nodes) if idle else start.nodes,
                ranks=self._job.world_size,
                spares=placement.spares,
                aside=placement.aside,
                code=state,
                changed=differences,
                seen=self._seen,
            )
            self._history.add(started)
        except OSError as error:
            say(f"could not record the attempt's start ({error}). Training continues")

    # --- once the ranks have exited

    def _result(self) -> AttemptResult:
        state, statuses = self._state, self._launcher.exit_statuses()
        ends = rank_ends(self._run, self._number, state, statuses)
        if self._launcher.failure is not None:
            ends = [RankEnd.of_launch(self._launcher.failure)]
        seen = state.ended_well | statuses.keys()
        unseen = [state.node_of(rank) for rank in sorted(state.hosts.keys() - seen)] if state.exit_code else []
        ends = [end.without(self._history.secrets) for end in ends]
        return AttemptResult(state, tuple(ends), self._timing.made, tuple(dict.fromkeys(unseen)))


def last_line(run: RunDirectory) -> Mapping[str, Any]:
    """The metrics of a run's last step. Empty if there is none."""
    try:
        return run.last_metrics() or {}
    except OSError as error:
        say(f"could not read the metrics ({error}). Repeated steps will not be counted")
        return {}


def run_id(run: RunDirectory) -> str:
    """The run's id in trackers. It is random, because an earlier run may have had the same run directory, and it is
    recorded at the first call. Only the run's supervisor calls this. Raises OSError."""
    with suppress(FileNotFoundError):
        return read_bytes(run.tracker_id_file).decode().strip()
    write_atomically(run.tracker_id_file, f"{secrets.token_hex(4)}\n", mode=0o600)
    return read_bytes(run.tracker_id_file).decode().strip()


def nodes_of(controller: Controller) -> tuple[str, ...]:
    """The nodes of the job in Slurm's order. Empty if they are unknown."""
    try:
        return tuple(expand(controller.describe().nodes))
    except ClusterddpError:
        return ()
