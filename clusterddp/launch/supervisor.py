"""The supervisor: ``python -m clusterddp.launch.supervisor RUN_DIRECTORY``, one process per attempt, no torch.

In a Slurm job it is the batch step: it starts the ranks with srun, hears their events, and when they are gone asks why,
requeues or writes the outcome, and ends at once, because a batch step that lingers keeps the nodes. Under ``--local`` a
loop starts the same program once per attempt. What differs are two objects: the launcher (start, wait) and the
controller (why, again).
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from clusterddp.environment import scrub
from clusterddp.errors import ClusterddpError, RunDirectoryError
from clusterddp.job import Job, load_resolved
from clusterddp.launch import holder
from clusterddp.launch.cause import Cause
from clusterddp.launch.code_state import changed, code_state
from clusterddp.launch.controller import Controller, LocalController, SlurmController
from clusterddp.launch.launcher import Launcher, LocalLauncher, SlurmLauncher, rank_command
from clusterddp.launch.narration import failure_box, sentence
from clusterddp.launch.verdict import Action, RankEnd, Verdict, judge
from clusterddp.link import ADDRESS_VARIABLE, TOKEN_VARIABLE, LinkServer
from clusterddp.process import die_with_parent
from clusterddp.rundir import RunDirectory, append_line, drop_torn_line, read_json, read_lines, write_json

#: The exit code that asks the local loop for another attempt (EX_TEMPFAIL, sysexits.h).
AGAIN = 75


class History:
    """The run's events, appended by this process alone, and told on standard output as sentences."""

    def __init__(self, run: RunDirectory, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._lock = threading.Lock()
        self.newest_step = 0
        self.newest_checkpoint: int | None = None
        drop_torn_line(run.events_file)

    def add(self, event: str, **values: Any) -> None:
        """Appends one event."""
        line = {"time": time.time(), "attempt": self._attempt, "event": event, **values}
        with self._lock:
            append_line(self._run.events_file, line)
            self.newest_step = max(self.newest_step, values.get("step") or 0)
            if event == "checkpoint":
                self.newest_checkpoint = values["step"]
        words = sentence(line)
        if words:
            print(words, flush=True)


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

    def supervise(self) -> int:
        """Runs the attempt to its end; returns this process's exit code."""
        holder.take(self._run, self._controller.holder())
        self._history.add("started", **self._controller.describe(), **self._code_state())
        exit_code = self._train()
        return self._act(judge(self._ends(), exit_code, self._why))

    def _why(self) -> Cause:
        """The mark that ``clusterddp cancel`` leaves before it cancels comes before the controller's word."""
        return Cause.CANCELLED if self._run.cancelled else self._controller.why()

    def _code_state(self) -> Mapping[str, Any]:
        state = code_state(self._job)
        before = [event["code"] for event in self._run.events() if event["event"] == "started"]
        return {"code": state, "changed": changed(before[-1], state) if before else []}

    def _train(self) -> int:
        token = secrets.token_hex(16)
        server = LinkServer(token, self._on_event, self._on_lost, host=self._launcher.supervisor_host)
        environment = {
            **os.environ,
            **self._job.env,
            "CLUSTERDDP_RUN_DIR": str(self._run),
            "CLUSTERDDP_ATTEMPT": str(self._attempt),
            "CLUSTERDDP_DEVICE": self._job.device,
            "CLUSTERDDP_LAUNCHER": self._launcher.name,
            ADDRESS_VARIABLE: f"{self._launcher.supervisor_host}:{server.port}",
            TOKEN_VARIABLE: token,
        }
        try:
            logs = self._run.attempt_logs(self._attempt)
            self._launcher.start(rank_command(self._job, self._attempt), environment, logs)
            return self._launcher.wait()
        finally:
            server.close()

    def _on_event(self, rank: int, event: str, values: Mapping[str, Any]) -> None:
        if event == "joined":
            self._hosts[rank] = values["host"]
        elif event == "resumed" and self._steps_done_before is not None:
            redone = max(0, self._steps_done_before - values["step"])
            self._history.add(event, **{"rank": rank, "redone": redone, **values})
        else:
            self._history.add(event, **{"rank": rank, **values})

    def _on_lost(self, rank: int) -> None:
        self._lost_at[rank] = time.time()

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

    def _act(self, verdict: Verdict) -> int:
        if verdict.action is Action.REQUEUE:
            return self._requeue(verdict)
        if verdict.action is Action.LEAVE:
            self._history.add("stopped", reason=verdict.reason)
            return self._controller.leave_code
        if verdict.first_failure is not None:
            failure = verdict.first_failure
            self._history.add("rank_failed", rank=failure.rank, host=failure.host, error=failure.error)
            print(failure_box(self._run, self._attempt, failure), file=sys.stderr, flush=True)
        conclude(self._run, self._history, verdict.action, verdict.reason)
        return verdict.exit_code

    def _requeue(self, verdict: Verdict) -> int:
        if self._run.newest_attempt() != self._attempt:
            self._history.add("superseded", by=self._run.newest_attempt())
            return 1
        checkpoint = self._history.newest_checkpoint
        step = None if checkpoint is None else self._history.newest_step
        self._history.add("requeued", reason=verdict.reason, step=step, checkpoint=checkpoint)
        return self._controller.again()


def conclude(run: RunDirectory, history: History, action: Action, reason: str) -> None:
    """Writes the outcome, once: the run is over."""
    attempts = len(run.attempts())
    outcome = {"state": action.value, "step": history.newest_step, "attempts": attempts, "reason": reason}
    history.add(action.value, step=history.newest_step, attempts=attempts, reason=reason)
    write_json(run.outcome_file, outcome)


def finished(run: RunDirectory) -> int | None:
    """The exit code for a start that finds the run completed or cancelled; None when it may go on.

    Slurm 24.11 starts a job once more that had been requeued within the grace and then ended well.
    """
    outcome = run.outcome() or {}
    if outcome.get("state") == Action.COMPLETE.value:
        print(f"{run}: completed at step {outcome['step']} already; nothing to do", flush=True)
        return 0
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
    controller = SlurmController(os.environ, job.timeouts.notice_s)
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
    code = finished(run)
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
