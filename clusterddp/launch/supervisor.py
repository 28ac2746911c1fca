"""The supervisor: ``python -m clusterddp.launch.supervisor RUN_DIRECTORY``, one process per attempt, no torch.

In a Slurm job it is the batch step: it starts the ranks with srun, hears their events, and when they are gone asks why,
requeues or writes the outcome, and ends at once, because a batch step that lingers keeps the nodes. Under ``--local`` a
loop starts the same program once per attempt. What differs are two objects: the launcher (start, wait) and the
controller (why, again).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from clusterddp.environment import scrub
from clusterddp.errors import ClusterddpError, RunDirectoryError, SlurmError, SlurmMissing
from clusterddp.job import Job, load_resolved
from clusterddp.launch import holder, slurm
from clusterddp.launch.cause import Cause
from clusterddp.launch.code_state import changed, code_state
from clusterddp.launch.controller import Controller, LocalController, SlurmController
from clusterddp.launch.launcher import Launcher, LocalLauncher, SlurmLauncher, rank_command
from clusterddp.launch.limits import exceeded
from clusterddp.launch.monitor import Monitor, lead_s
from clusterddp.launch.narration import failure_box, sentence
from clusterddp.launch.verdict import Action, RankEnd, Verdict, judge
from clusterddp.link import ADDRESS_VARIABLE, TOKEN_VARIABLE, LinkServer
from clusterddp.process import die_with_parent
from clusterddp.rundir import RunDirectory, append_line, drop_torn_line, read_json, read_lines, write_json


class History:
    """The run's events, appended by this process alone, and told on standard output as sentences."""

    def __init__(self, run: RunDirectory, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._lock = threading.Lock()
        self.newest_step = 0
        self.newest_checkpoint: int | None = None
        self.last_save_s = 0.0
        self._closed = False
        drop_torn_line(run.events_file)

    def add(self, event: str, **values: Any) -> None:
        """Appends one event."""
        line = {"time": time.time(), "attempt": self._attempt, "event": event, **values}
        with self._lock:
            if self._closed:
                return
            append_line(self._run.events_file, line)
            self.newest_step = max(self.newest_step, values.get("step") or 0)
            if event == "checkpoint":
                self.newest_checkpoint, self.last_save_s = values["step"], values["durable_s"]
        words = sentence(line)
        if words:
            print(words, flush=True)

    def close(self) -> None:
        """Nothing is written any more: a newer attempt's supervisor is the file's writer now."""
        with self._lock:
            self._closed = True


class Supervisor:
    """One attempt of one run."""

    def __init__(self, run: RunDirectory, job: Job, launcher: Launcher, controller: Controller) -> None:
        self._run, self._job = run, job
        self._launcher, self._controller = launcher, controller
        self._attempt = run.create_attempt()
        self._history = History(run, self._attempt)
        self._steps_done_before = max((line["step"] + 1 for line in read_lines(run.metrics_file)), default=None)
        self._hosts: dict[int, str] = {}
        self._lost_at: dict[int, float] = {}
        self._told = False

    def supervise(self) -> int:
        """Runs the attempt to its end; returns this process's exit code."""
        write_json(self._run.holder_file, self._controller.holder(), mode=0o600)
        self._history.add("started", **self._controller.describe(), **self._code_state())
        exit_code = self._train()
        return self._act(judge(self._ends(), exit_code, self._told, self._why))

    # --- while the ranks train

    def _train(self) -> int:
        token = secrets.token_hex(16)
        self._server = LinkServer(token, self._on_event, self._on_lost, host=self._launcher.supervisor_host)
        environment = {
            **os.environ,
            **self._job.env,
            "CLUSTERDDP_RUN_DIR": str(self._run),
            "CLUSTERDDP_ATTEMPT": str(self._attempt),
            "CLUSTERDDP_DEVICE": self._job.device,
            "CLUSTERDDP_LAUNCHER": self._launcher.name,
            ADDRESS_VARIABLE: f"{self._launcher.supervisor_host}:{self._server.port}",
            TOKEN_VARIABLE: token,
        }
        logs = self._run.attempt_logs(self._attempt)
        self._launcher.start(rank_command(self._job, self._attempt), environment, logs)
        monitor = Monitor(self._controller, self._lead_s, self._superseded, self._on_time_limit, self._on_superseded)
        try:
            return self._launcher.wait()
        finally:
            monitor.close()
            self._server.close()

    def _lead_s(self) -> float:
        return lead_s(self._job, self._history.last_save_s)

    def _superseded(self) -> bool:
        return self._run.newest_attempt() != self._attempt

    def _on_event(self, rank: int, event: str, values: Mapping[str, Any]) -> None:
        if event == "joined":
            self._hosts[rank] = values["host"]
            return
        values = {"rank": rank, **values}
        self._told = self._told or event == "signal"
        if event == "resumed" and self._steps_done_before is not None:
            values["redone"] = max(0, self._steps_done_before - values["step"])
        self._history.add(event, **values)

    def _on_lost(self, rank: int) -> None:
        self._lost_at[rank] = time.time()

    def _on_time_limit(self) -> None:
        self._told = True
        self._history.add("time_limit_near", notice_s=round(self._lead_s()))
        self._launcher.notify()

    def _on_superseded(self) -> None:
        """A newer attempt trains the run: the ranks notice it when their line breaks, and leave by themselves.

        srun may wait for ever for a node that it cannot reach any more.
        """
        self._history.close()
        self._server.close()
        self._launcher.abandon()

    # --- when they are gone

    def _ends(self) -> list[RankEnd]:
        """How every rank ended, from its own record where it could write one."""
        return [
            RankEnd.from_record(
                rank,
                self._hosts.get(rank, "host unknown"),
                self._lost_at.get(rank, float("inf")),
                read_json(self._run.rank_record(self._attempt, rank)),
            )
            for rank in range(self._job.world_size)
        ]

    def _why(self) -> Cause:
        """The newer attempt and the mark that ``clusterddp cancel`` leaves come before the controller's word.

        The controller is asked until it answers: nothing is ever requeued blind, and at the end of the grace we are
        killed.
        """
        pause_s = 0.5
        while True:
            if self._superseded():
                return Cause.SUPERSEDED
            if self._run.cancelled:
                return Cause.CANCELLED
            try:
                return self._controller.why()
            except SlurmMissing:
                return Cause.UNKNOWN
            except SlurmError as error:
                print(f"clusterddp: asking again in {pause_s:.0f} s: {error}", flush=True)
                time.sleep(pause_s)
                pause_s = min(30.0, 2 * pause_s)

    def _act(self, verdict: Verdict) -> int:
        if verdict.cause is Cause.SUPERSEDED or self._superseded():
            newest = self._run.newest_attempt()
            print(f"clusterddp: attempt {self._attempt} superseded by attempt {newest}; not writing", flush=True)
            return 1
        if verdict.action is Action.LEAVE_TO_SLURM:
            verdict = self._left_to_slurm(verdict)
        if verdict.action is Action.AGAIN:
            return self._again(verdict)
        if verdict.action in (Action.LEAVE, Action.LEAVE_TO_SLURM):
            if verdict.cause is Cause.UNKNOWN:
                self._ask_watcher()
            self._history.add("stopped", reason=verdict.reason, cause=verdict.cause.value, **self._saved())
            return self._controller.leave_code
        if verdict.first_failure is not None:
            failure = verdict.first_failure
            self._history.add("rank_failed", rank=failure.rank, host=failure.host, error=failure.error)
            print(failure_box(self._run, self._attempt, failure), file=sys.stderr, flush=True)
        conclude(self._run, self._history, verdict.action, verdict.reason)
        return verdict.exit_code

    def _left_to_slurm(self, verdict: Verdict) -> Verdict:
        """Slurm requeues what it preempts without grace, unless the partition cancels it."""
        try:
            ends = self._controller.ends_what_it_preempts()
        except SlurmError as error:
            print(f"clusterddp: cannot ask whether this partition requeues what it preempts: {error}", flush=True)
            return verdict
        return dataclasses.replace(verdict, action=Action.AGAIN) if ends else verdict

    def _again(self, verdict: Verdict) -> int:
        reason = exceeded(self._job, self._run.events(), time.time())
        if reason is not None:
            conclude(self._run, self._history, Action.FAIL, f"{verdict.reason}, and {reason}")
            return 1
        if self._job.policy != "resubmit" and verdict.cause in (Cause.PREEMPTED, Cause.TIME_LIMIT):
            self._history.add("requeued", reason=verdict.reason, cause=verdict.cause.value, **self._saved())
            try:
                self._controller.requeue()
                return self._controller.again_code
            except SlurmError as error:
                self._history.add("requeue_refused", error=str(error))
        return self._resubmit(verdict)

    def _resubmit(self, verdict: Verdict) -> int:
        """Continues the run in a new job. scancel of this job at any moment up to here ends the new one, too."""
        try:
            new = self._controller.resubmit()
        except SlurmError as error:
            self._history.add(
                "stopped", reason=f"{verdict.reason}; not resubmitted: {error}", cause=verdict.cause.value
            )
            self._ask_watcher()
            return self._controller.leave_code
        if self._why() in (Cause.CANCELLED, Cause.ENDED_IN_GRACE):
            slurm.cancel(new)
            conclude(self._run, self._history, Action.CANCEL, "cancelled while it was being resubmitted")
            return 1
        self._history.add("resubmitted", job=new, reason=verdict.reason, cause=verdict.cause.value, **self._saved())
        return self._controller.again_code

    def _ask_watcher(self) -> None:
        """Leaves a request for ``clusterddp watch``, which finds out whether the run should go on and resubmits it."""
        write_json(self._run.request_file, {"attempt": self._attempt, **self._controller.describe()}, mode=0o600)

    def _saved(self) -> dict[str, Any]:
        """What is safe: the newest step, and the newest checkpoint of this attempt (None: it made none)."""
        checkpoint = self._history.newest_checkpoint
        return {"step": None if checkpoint is None else self._history.newest_step, "checkpoint": checkpoint}

    def _code_state(self) -> Mapping[str, Any]:
        state = code_state(self._job)
        before = [event["code"] for event in self._run.events() if event["event"] == "started"]
        return {"code": state, "changed": changed(before[-1], state) if before else []}


def conclude(run: RunDirectory, history: History, action: Action, reason: str) -> None:
    """Writes the outcome, once: the run is over."""
    attempts = len(run.attempts())
    outcome = {"state": action.value, "step": history.newest_step, "attempts": attempts, "reason": reason}
    history.add(action.value, step=history.newest_step, attempts=attempts, reason=reason)
    write_json(run.outcome_file, outcome)


def finished(run: RunDirectory, controller: Controller) -> int | None:
    """The exit code for a start that finds the run over; None when it may go on, as a failure may by someone's wish.

    Slurm 24.11 starts a job once more that had been requeued within a grace, however it ended then: nobody wished that.
    """
    outcome = run.outcome() or {}
    if outcome.get("state") == Action.COMPLETE.value:
        print(f"{run}: completed at step {outcome['step']} already; nothing to do", flush=True)
        return 0
    if outcome.get("state") == Action.FAIL.value and read_json(run.holder_file) == controller.holder():
        print(f"{run}: failed at step {outcome['step']} in this very job: not started again by a requeue", flush=True)
        return 1
    if run.cancelled or outcome.get("state") == Action.CANCEL.value:
        print(f"{run} was cancelled; it never runs again", flush=True)
        return 1
    return None


def prepare_signals() -> None:
    """TERM is ignored, here and by srun, which inherits it: the ranks need the supervisor while they save.

    USR2 and CONT, which submitit and the time-limit warning may bring, do nothing here; being handled rather than
    ignored, they keep their meaning for srun.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for signum in (signal.SIGUSR2, signal.SIGCONT):
        signal.signal(signum, lambda *_: None)


def supervise_slurm(run_directory: str) -> int:
    """Runs one attempt in the batch step of a Slurm job. Also what submitit's pickle names."""
    prepare_signals()
    run = RunDirectory(run_directory)
    job = load_resolved(run.job_file)
    controller = SlurmController(os.environ, run, job)
    return _supervise(run, job, SlurmLauncher(job), controller)


def supervise_local(run_directory: str, debug_rank: int | None) -> int:
    """Runs one attempt as processes of this machine."""
    die_with_parent()
    prepare_signals()
    if debug_rank is not None:
        signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the debugged rank's
    run = RunDirectory(run_directory)
    job = load_resolved(run.job_file)
    for name in set(os.environ) - set(scrub(os.environ)):
        del os.environ[name]
    return _supervise(run, job, LocalLauncher(job, debug_rank), LocalController(run))


def _supervise(run: RunDirectory, job: Job, launcher: Launcher, controller: Controller) -> int:
    code = finished(run, controller)
    if code is not None:
        return code
    held = holder.held_by_other(run, controller.holder())
    if held:
        raise RunDirectoryError(f"{run} is {held}; two jobs must not train one run")
    run.outcome_file.unlink(missing_ok=True)  # a failure: whoever starts the run again has seen it
    return Supervisor(run, job, launcher, controller).supervise()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m clusterddp.launch.supervisor")
    parser.add_argument("run_directory")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--debug", type=int, default=None)
    arguments = parser.parse_args()
    try:
        if arguments.local:
            code = supervise_local(arguments.run_directory, arguments.debug)
        else:
            code = supervise_slurm(arguments.run_directory)
    except ClusterddpError as error:
        print(f"clusterddp: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
