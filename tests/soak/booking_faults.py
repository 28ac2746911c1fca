"""The schedule of ``tests/soak/test_booking.py``: makes each interruption of one run, and notes when.

The run's processes and jobs are observed from outside. All is in the records of ``tests/soak/booking_truth.py``.
"""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterddp.hostlist import expand
from tests.cluster import Cluster
from tests.cluster.system import Process, processes
from tests.interruptions import NOTICE_S, HighJob, power_off, power_on, submit, until
from tests.soak.booking_judging import CAUSES
from tests.soak.booking_truth import Record
from tests.trainings import Training

WAIT_S = 240.0
#: Seconds between two scans of /proc.
SCAN_S = 0.05
SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "hang": signal.SIGSTOP}

#: In this order. ``controller`` restarts slurmctld, which interrupts nothing; nor does ``stall``; ``slow``: rank 1 is
#: slow, or no more.
SCHEDULE = (
    *("preemption", "kill", "stall", "long_preemption", "slow", "requeue", "slow", "preemption", "controller"),
    *("hang", "preemption_without_grace", "scontrol_requeue", "crash", "time_limit", "segv", "held_requeue"),
    *("dead_node", "preemption", "stop", "kill_all", "long_preemption", "controller", "scontrol_requeue"),
    *("slow", "preemption_without_grace", "slow", "hang", "dead_batch_host", "kill", "requeue"),
)


class Observer(threading.Thread):
    """Notes when each rank and each supervisor begins and ends, by looking at /proc."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._alive: dict[Any, tuple[float, str]] = {}
        self._over = threading.Event()
        self.records: list[Record] = []

    def run(self) -> None:
        while not self._over.wait(SCAN_S):
            self._look()

    def close(self) -> None:
        """Once the ends of all processes have been seen."""
        until(lambda: not self._alive, "the end of the run's processes", WAIT_S)
        self._over.set()
        self.join()

    def _look(self) -> None:
        now = time.time() - SCAN_S / 2
        found = {process: kind for process in processes() if (kind := _kind(process.command()))}
        for process in self._alive.keys() - found.keys():
            begun, kind = self._alive.pop(process)
            self.records.append((begun, "proc", kind, now))
        for process in found.keys() - self._alive.keys():
            self._alive[process] = (now, found[process])


def _kind(command: str) -> str | None:
    program = Path(command.partition(" ")[0]).name
    if not program.startswith("python"):
        return None
    return "supervisor" if "clusterddp.supervisor" in command else "rank" if "clusterddp.worker" in command else None


class Injector:
    """Makes the faults of the schedule, one per attempt."""

    def __init__(self, training: Training) -> None:
        self._up, self._training = training.cluster, training
        self._highs = 0
        self.jobs: list[str] = []
        self.records: list[Record] = []

    def submit(self) -> None:
        """The first time, or once more after an end."""
        submit(self._training)
        self.jobs.append(self._training.job_id)

    def make(self, kind: str, steps: int) -> None:
        """Once the newest attempt has made so many steps; ``slow`` from its start."""
        if kind == "slow":
            self._slow()
            return
        attempt = self._wait_for_steps(steps)
        self._follow()
        getattr(self, f"_{kind}", self._signal)(kind)
        if kind in CAUSES:
            newer = lambda: (self._training.run.newest_attempt() or 0) > attempt  # noqa: E731
            until(newer, f"what follows {kind}", WAIT_S, look_s=0.1)
        self._follow()

    def finish(self) -> None:
        """The run ends a little later."""
        steps = self._steps(self._wait_for_steps(10))
        (self._training.folder / "total").write_text(str(steps[-1] + 40))
        until(self._training.run.outcome, "the outcome", WAIT_S)

    def _note(self, kind: str) -> None:
        self.records.append((time.time(), "injector", kind, self._training.run.newest_attempt()))

    def _wait_for_steps(self, steps: int) -> int:
        """The number of the newest attempt, which has made so many steps."""

        def made() -> bool:
            newest = self._training.run.newest_attempt()
            return newest is not None and len(self._steps(newest)) >= steps

        until(made, f"{steps} steps", WAIT_S, look_s=0.1)
        newest = self._training.run.newest_attempt()
        assert newest is not None
        return newest

    def _steps(self, attempt: int) -> list[int]:
        try:
            text = (self._training.folder / "said" / f"{attempt}-0").read_text()
        except FileNotFoundError:
            return []
        return [int(step) for step in re.findall(r" step (\d+)$", text, re.MULTILINE)]

    def _follow(self) -> None:
        """The job that the run has now."""
        jobs = [str(event["job"]) for event in self._training.run.events() if "job" in event]
        self.jobs += [job for job in jobs[-1:] if job not in self.jobs]
        self._training.job_id = self.jobs[-1]

    def _nodes(self) -> list[str]:
        return expand(self._up.job(self._training.job_id)["NodeList"])

    # --- the faults

    def _ranks(self) -> list[Process]:
        return [rank for node in self._nodes() for rank in self._training.ranks_on(node)]

    def _signal(self, kind: str) -> None:
        rank = self._ranks()[self._highs % 2]
        self._note(kind)
        rank.kill(SIGNALS[kind])

    def _high(self, kind: str, seconds: float = 0.1) -> None:
        self._highs += 1
        self._note(kind)
        file = self._training.folder / f"high-{self._highs}"
        until(HighJob.submit(self._up, file, seconds).ended, "the job in high", WAIT_S)

    def _preemption(self, kind: str) -> None:
        self._high(kind)

    def _long_preemption(self, kind: str) -> None:
        self._high(kind, 22)

    def _preemption_without_grace(self, kind: str) -> None:
        self._up.set_grace(0)
        self._high(kind)
        self._up.set_grace(20)

    def _time_limit(self, kind: str) -> None:
        """The job's next starts have the old one again."""
        self._note(kind)
        job = self._training.job_id
        hours, minutes, seconds = map(int, self._up.job(job)["RunTime"].split(":"))
        limit = math.ceil((3600 * hours + 60 * minutes + seconds + NOTICE_S + 5) / 60)
        self._up.root(["scontrol", "update", f"JobId={job}", f"TimeLimit={limit}"])
        until(lambda: self._up.job(job)["JobState"] == "PENDING", "the requeue", WAIT_S)
        self._up.root(["scontrol", "update", f"JobId={job}", "TimeLimit=60"])

    def _kill_all(self, kind: str) -> None:
        ranks = self._ranks()
        self._note(kind)
        for rank in ranks:
            rank.kill(signal.SIGKILL)

    def _crash(self, kind: str) -> None:
        self._note(kind)
        (self._training.folder / "crash").touch()
        until(lambda: not (self._training.folder / "crash").exists(), "the crash", WAIT_S)

    def _submit_again(self) -> None:
        """A while after the run's end."""
        job = self._training.job_id
        until(lambda: self._up.job(job).get("JobState") in ("COMPLETED", "FAILED"), "the job's end", WAIT_S)
        time.sleep(8)
        self.submit()

    def _power(self, kind: str, node: str) -> None:
        """It is used again once the run trains elsewhere."""
        attempt = self._training.run.newest_attempt()
        self._note(kind)
        power_off(self._up, node)
        until(lambda: self._training.run.newest_attempt() != attempt, "the next attempt", WAIT_S, look_s=0.1)
        power_on(self._up, node)
        self._up.root(["scontrol", "update", f"nodename={node}", "state=down", "reason=soak"])
        self._up.root(["scontrol", "update", f"nodename={node}", "state=resume"])

    def _dead_node(self, kind: str) -> None:
        self._power(kind, self._nodes()[1])

    def _dead_batch_host(self, kind: str) -> None:
        self._power(kind, self._nodes()[0])

    def _command(self, *words: str) -> None:
        self._up.run([self._up.python, "-m", "clusterddp", *words], cwd=self._up.source, timeout=WAIT_S)

    def _requeue(self, kind: str) -> None:
        self._note(kind)
        self._command("requeue", str(self._training.run.path))

    def _held_requeue(self, kind: str) -> None:
        """The user holds the job for longer than Slurm does."""
        self._requeue(kind)
        job = self._training.job_id
        until(lambda: self._up.job(job)["JobState"] == "PENDING", "the requeue", WAIT_S)
        self._up.run(["scontrol", "hold", job])
        time.sleep(15)
        self._up.run(["scontrol", "release", job])

    def _scontrol_requeue(self, kind: str) -> None:
        self._note(kind)
        self._up.run(["scontrol", "requeue", self._training.job_id])

    def _stop(self, kind: str) -> None:
        self._note(kind)
        self._command("stop", str(self._training.run.path))
        self._submit_again()

    def _controller(self, _: str) -> None:
        self._up.stop_controller()
        time.sleep(2)
        self._up.start_controller()
        tell_requests(self._up)

    def _stall(self, _: str) -> None:
        """Rank 0 waits for its batch for a while."""
        mark = self._training.folder / "stall"
        mark.touch()
        until(lambda: not mark.exists(), "the end of the stall", WAIT_S)

    def _slow(self) -> None:
        """Rank 1 begins to be slow, or it ends."""
        mark = self._training.folder / "slow"
        mark.unlink() if mark.exists() else mark.touch()


def tell_requests(up: Cluster) -> None:
    """From now on slurmctld's log has every request."""
    up.root(["scontrol", "setdebug", "debug2"])


# --- afterwards


def said(folder: Path) -> Iterator[Record]:
    """What the ranks wrote."""
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            at, what, *value = line.split()
            yield float(at), file.name, what, int(value[0]) if value else None


def by_slurm(up: Cluster, jobs: list[str]) -> Iterator[Record]:
    """When the jobs were submitted, started and requeued: from slurmctld's log, in milliseconds. When each start was
    eligible: from sacct, whole seconds."""
    pattern = re.compile(r"^\[([\d-]+T[\d:]+)(\.\d+)\] (.*)", re.MULTILINE)
    log = (up.conf.parents[1] / "log" / "slurmctld.log").read_text(errors="replace")
    failed = False
    for moment, fraction, text in pattern.findall(log):
        at = _seconds(moment) + float(fraction)
        if "RPC: REQUEST_JOB_REQUEUE" in text:
            yield at, "slurm", "requeue", None
        if not any(re.search(rf"JobId={job}\b", text) for job in jobs):
            continue
        if "_slurm_rpc_submit_batch_job: " in text:
            yield at, "slurm", "submitted", None
        elif "_start_job: Started " in text or "Allocate " in text:
            yield at, "slurm", "started", _eligible(up, jobs, at)
        elif "due to failure of node" in text:
            failed = True
        elif failed and text.startswith("Requeuing "):
            failed = False
            yield at, "slurm", "requeued_after_failure", None


def _eligible(up: Cluster, jobs: list[str], started: float) -> float | None:
    command = ["sacct", "-D", "-X", "-n", "-P", "-j", ",".join(jobs), "--format=Eligible,Start"]
    for line in up.root(command).stdout.splitlines():
        eligible, start = line.split("|")
        if start[:1].isdigit() and eligible[:1].isdigit() and abs(_seconds(start) + 0.5 - started) < 1.5:
            return _seconds(eligible)
    return None


def _seconds(moment: str) -> float:
    return time.mktime(time.strptime(moment, "%Y-%m-%dT%H:%M:%S"))
