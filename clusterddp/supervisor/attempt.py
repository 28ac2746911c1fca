"""One attempt of a run: starts all ranks and handles their events until they have exited."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from clusterddp import protocol
from clusterddp.errors import ClusterddpError, SlurmError, SlurmUnavailable
from clusterddp.failures.exit_status import ExitStatus, in_order
from clusterddp.failures.hangs import Hang, Slow, Watch
from clusterddp.hostlist import expand
from clusterddp.jobdef.code_state import changed, code_state
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.secrets import secret_values
from clusterddp.reporter import say
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.control_server import ControlServer
from clusterddp.supervisor.controller import Controller, Stop
from clusterddp.supervisor.history import History
from clusterddp.supervisor.launcher import Launcher, rank_command
from clusterddp.supervisor.monitor import ASK_S, Monitor, stop_margin_s
from clusterddp.supervisor.recovery import Recovery
from clusterddp.supervisor.verdict import RankEnd, check_record
from clusterddp.worker.control_channel import SILENCE_S

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
        self._secrets = secret_values(job, os.environ)
        self._history = History(run, number, self._secrets)
        self._steps_before = self._steps_so_far()
        self._hosts: dict[int, str] = {}
        self._lost_at: dict[int, float] = {}
        self._left: dict[int, Mapping[str, Any]] = {}
        self._silent: set[int] = set()
        self._letting_go: threading.Timer | None = None
        self._recorded, self._gone = threading.Event(), threading.Event()
        #: Cleared from when all ranks stop, or are done, until rank 0 has saved, or is gone.
        self._saved = threading.Event()
        self._saved.set()
        self._told = self._heard = self._deaf = False
        #: Whether the newest loop has steps left; None: no loop has begun.
        self._unfinished: bool | None = None
        self._exit_code: int | None = None
        self._notices = 0
        self._watch = self._new_watch()
        self._hang: tuple[Hang, float] | None = None

    def _steps_so_far(self) -> int:
        """How many steps the run has made before this attempt."""
        try:
            return int((self._run.last_metrics() or {"step": -1})["step"]) + 1
        except OSError as error:
            say(f"cannot read the metrics ({error}): repeated steps will not be counted")
            return 0

    def _new_watch(self) -> Watch | None:
        if self._job.watchdog is None:
            return None
        return Watch(self._job.watchdog.beat_s, self._on_hang, self._on_slow, lambda: self._deaf)

    def supervise(self) -> int:
        """Runs the attempt to its end; returns this process's exit code, or RESTART."""
        exit_code = self._train()
        return Recovery(self._run, self._job, self._number, self._controller, self._history, self).after(exit_code)

    # --- while the ranks train

    def _train(self) -> int:
        token = secrets.token_hex(16)
        self._server = ControlServer(
            token, self._on_event, self._on_lost, self._launcher.supervisor_host, self._job.world_size
        )
        environment = {
            **os.environ,
            **self._job.env,
            protocol.RUN_DIR: str(self._run),
            protocol.ATTEMPT: str(self._number),
            protocol.DEVICE: self._job.device,
            protocol.LAUNCHER: self._launcher.name,
            protocol.SUPERVISOR: f"{self._launcher.supervisor_host}:{self._server.port}",
            protocol.TOKEN: token,
            protocol.USR2_NOTICE_S: str(self.stop_margin_s()),
            protocol.WATCHDOG: "on" if self._watch else "off",
        }
        logs = self._run.attempt_logs(self._number)
        self._launcher.start(rank_command(self._job, self._number), environment, logs)
        monitor = Monitor(self._controller, self)
        try:
            self._tell_notice()
            try:
                self._record_start()  # while the ranks import torch: it asks git, on a disk that may be slow
            except OSError as error:
                say(f"the attempt's start cannot be recorded ({error}); training goes on")
            self._recorded.set()
            self._exit_code = self._launcher.wait()
            return self._exit_code
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
            say(f"cannot ask what notice a preemption gives: {error}")

    def _record_start(self) -> None:
        if self._submission is not None:
            self._history.add("submitted", job=self._submission["job"], submitted=self._submission["time"])
        state = code_state(self._job)
        before = [event.get("code") or {} for event in self._history.events if event["event"] == "started"]
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
        if event == "rejoined":
            self._on_rejoined(rank)
        if event in ("stopping", "finishing"):
            self._saved.clear()
        if event == "progress":
            self._saved.set()
        if event in ("signal", "notified"):
            self._told = self._heard = True
        if event == "progress":
            self._unfinished = values["step"] < values["steps"]
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
            # One that exits with 0 may do so for a signal that only the controller knows of, and so will its peers.
            after_s = LET_GO_S + (ASK_S if values["end"] == "unfinished" else 0.0)
            self._let_go(f"rank {rank} ({values['host']}) failed", after_s)

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

    def _on_rejoined(self, rank: int) -> None:
        """Its connection alone broke: it was not lost. Others may be."""
        self._lost_at.pop(rank, None)
        if self._letting_go is not None:
            self._letting_go.cancel()
            self._letting_go = None
        for other in self._lost_at.keys() - self._silent:
            self._let_go(f"rank {other} ({self._hosts[other]}) is gone")
        if self._watch and not self._lost_at and not self._gone.is_set():
            self._watch.close()
            self._watch = self._new_watch()

    def _let_go(self, why: str, after_s: float = LET_GO_S) -> None:
        """Tells the other ranks to leave, soon; in a stop, and without a word of it, they may be saving."""
        if self._letting_go is None and not self._told:
            self._letting_go = threading.Timer(after_s, self._tell_to_leave, args=(why,))
            self._letting_go.daemon = True
            self._letting_go.start()

    def _tell_to_leave(self, why: str) -> None:
        if not self._told and self._saved.is_set():
            self._server.broadcast(leave=why)

    def _on_silence(self, rank: int) -> None:
        """A rank's node does not answer. It is lost, unless this one is cut off: the controller is out of reach then.

        srun would wait for it until Slurm gives the node up, and so would the ranks on other nodes.
        """
        waiting = False
        while not self._controller_answers():
            if not waiting:
                say(f"neither {self.node_of(rank)} nor the controller answers, waiting")
            waiting = True
            with suppress(OSError):  # cut off from the disk, too
                if self._gone.wait(SILENT_PAUSE_S) or self.superseded():
                    return
        self._recorded.wait()
        if self._gone.is_set():
            return
        lost = self.lost_nodes
        for node in lost:
            self._history.add("node_lost", node=node, suspect=node)
        self._saved.wait()  # all ranks have agreed to stop: rank 0 needs nobody any more, and time
        self._server.broadcast(leave=f"node {' and '.join(lost)} lost")
        self._launcher.abandon()

    def _controller_answers(self) -> bool:
        try:
            self._controller.notice()
        except SlurmUnavailable:
            return False
        except SlurmError:
            pass
        return True

    def _on_slow(self, slow: Slow) -> None:
        self._history.add("slow", **dataclasses.asdict(slow))

    def _on_hang(self, hang: Hang) -> None:
        """Ends all ranks: those that can leave by themselves do when they are told, and the launcher ends the rest."""
        if self._gone.is_set():
            return
        self._hang = hang, time.time()
        self._history.add("hung", rank=hang.late[0], **dataclasses.asdict(hang))
        self._server.broadcast(leave=hang.what)
        if not self._gone.wait(LEAVE_S):
            self._launcher.kill()

    # --- what the monitor asks and tells

    def superseded(self) -> bool:
        """Whether a newer attempt exists."""
        return self._run.superseded(self._number)

    def stop_margin_s(self) -> float:
        """How many seconds before the time limit to stop."""
        return stop_margin_s(self._job, self._history.last_save_s)

    def heard(self) -> bool:
        """Whether a rank has said that it was told to stop."""
        return self._heard

    def on_notice(self, stop: Stop, why: str) -> None:
        """Tells the ranks first: over their connections, and by a signal those that may not listen there.

        These have not joined, or have a Python function with a ``checkpoint()``, which waits for a signal. Under
        proctrack/linuxproc the signal goes to their children, too.
        """
        self._server.broadcast(stop=stop.value)
        self._notices += 1
        if self._notices > 1 or len(self._hosts) < self._job.world_size:
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

    def on_controller_missing(self, why: str) -> None:
        """Signals alone tell the ranks to stop then."""
        self._recorded.wait()
        self._history.add("controller_missing", error=why)

    def on_controller(self, away: str | None) -> None:
        """Training continues without it."""
        self._recorded.wait()
        if away is None:
            self._history.add("controller_back")
        else:
            self._history.add("controller_away", error=away)

    # --- what is asked when the ranks are gone

    @property
    def told(self) -> bool:
        """Whether the ranks were told to stop."""
        return self._told

    @property
    def hang(self) -> Hang | None:
        """The hang that the ranks were ended for."""
        return self._hang and self._hang[0]

    @property
    def lost_nodes(self) -> list[str]:
        """The nodes that were lost with their ranks."""
        return list(dict.fromkeys(self.node_of(rank) for rank in sorted(self._silent)))

    def node_of(self, rank: int) -> str:
        """The node that a rank is on: its host, where Slurm calls it so, else where the launcher puts that rank."""
        host = self._hosts.get(rank, "unknown")
        try:
            nodes = expand(self._controller.describe()["nodes"])
            return host if host in nodes else nodes[rank // self._job.ranks_per_node]
        except (ClusterddpError, IndexError):
            return host

    def ends(self) -> list[RankEnd]:
        """How every rank ended: by its last words, else its record, else what the launcher knows of its process.

        The one that hung comes first.
        """
        exit_statuses = (
            self._launcher.exit_statuses() if self._hang else in_order(self._launcher.exit_statuses())
        )  # all killed, for a hang
        ends = [self._end_of(rank, exit_statuses.get(rank)) for rank in range(self._job.world_size)]
        if self._hang is not None and ends[self._hang[0].late[0]].failed:
            hang, found_at = self._hang
            end = "hung" if self._job.watchdog and self._job.watchdog.on_hang == "restart" else "hung for good"
            ends[hang.late[0]] = RankEnd(hang.late[0], hang.host, end, found_at, hang.what, used_clusterddp=True)
        return [end.without(self._secrets) for end in ends]

    def _end_of(self, rank: int, death: ExitStatus | None) -> RankEnd:
        host, lost_at = self._hosts.get(rank) or self.node_of(rank), self._lost_at.get(rank, float("inf"))
        if rank in self._left:
            return RankEnd.from_record(rank, host, lost_at, self._left[rank])
        end = RankEnd.read(rank, host, lost_at, self._run.rank_record(self._number, rank), death)
        if end.end == "died" and self._exit_code == 0:
            return RankEnd.without_record(rank, host, lost_at, self._unfinished)
        if rank in self._silent and end.end == "died":
            return RankEnd(rank, host, "silent", lost_at, error=f"lost with its node {self.node_of(rank)}")
        return end
