"""A real supervisor without Slurm: ``python -m benchmarks.scale.supervised RUN RANKS``.

Its launcher starts nothing and its controller knows no job: the ranks are simulated (``stubs.py``). Requests are JSON
lines on stdin, answers JSON lines on stdout; the log is on stderr.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from clusterddp.failures.exit_status import ExitStatus
from clusterddp.failures.placement import JobStart
from clusterddp.jobdef.job import Job
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor import main
from clusterddp.supervisor.attempt import Attempt
from clusterddp.supervisor.attempt_state import Notice, Stop
from clusterddp.supervisor.recovery import RESTART
from tests.fake_slurm import FakeController, NoRanks

answers = sys.stdout


def answer(**values: Any) -> None:
    """One line for the driver."""
    print(json.dumps(values), file=answers, flush=True)


class Controller(FakeController):
    """A job whose nodes stay; ``stop``: a preemption."""

    resubmits = busy = False

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self._nodes = f"n[00000-{nodes - 1:05}]"
        self.stop: Stop | None = None

    def describe(self) -> JobStart:
        return JobStart(self._nodes, job="41")

    def notice(self) -> Notice:
        return Notice(None, self.stop)

    def why(self, notice_s: float) -> Cause:
        return Cause.PREEMPTED_WITHOUT_GRACE if self.stop else Cause.NONE

    def term_notice_s(self) -> float | None:
        return 60.0


class Launcher(NoRanks):
    """Tells the driver when ranks are wanted; the driver tells how they ended."""

    abandon_s = 5.0

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._failed: dict[int, ExitStatus] = {}

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
        port = int(environment["CLUSTERDDP_SUPERVISOR"].rpartition(":")[2])
        answer(start={"port": port, "token": environment["CLUSTERDDP_TOKEN"], "time": time.time()})

    def ended(self, exit_code: int, killed: int | None = None) -> None:
        """All ranks have exited."""
        self._ends.put({"exit_code": exit_code, "killed": killed})

    def wait(self) -> int:
        end = self._ends.get()
        if end["killed"] is not None:
            self._failed[end["killed"]] = ExitStatus(signal=9, first=True)
        return int(end["exit_code"])

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        return self._failed


class Supervised:
    """Runs attempts in the main thread; a thread carries out the driver's requests."""

    def __init__(self, path: str, ranks: int) -> None:
        self._run, self._ranks = RunDirectory(path), ranks
        self._nodes, self._per_node = max(1, ranks // 8), min(8, ranks)
        self._launcher, self._controller = Launcher(), Controller(self._nodes)
        self._attempt: Attempt | None = None

    def supervise(self) -> None:
        """Attempt after attempt, until one does not restart in place."""
        job = Job(name="x", module="x", nodes=self._nodes, gpus_per_node=self._per_node, device="cpu")
        code = RESTART
        while code == RESTART:
            self._launcher = Launcher()
            number = self._run.create_attempt()
            self._attempt = Attempt(self._run, job, number, self._launcher, self._controller)
            code = self._attempt.supervise()
            answer(over={"code": code, "attempt": number, "time": time.time()})

    def serve(self) -> None:
        """The driver's requests."""
        for line in sys.stdin:
            ((name, values),) = json.loads(line).items()
            if name == "ended":
                self._launcher.ended(**values)
            elif name == "preempt":
                self._controller.stop = Stop.PREEMPTION
            elif name == "usage":
                answer(usage=self._usage())

    def _usage(self) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        state = self._attempt._state if self._attempt else None
        status = Path("/proc/self/status").read_text().splitlines()
        of = {line.partition(":")[0]: line.partition(":")[2].split() for line in status}
        return {
            "cpu_s": used.ru_utime + used.ru_stime,
            "rss_mb": int(of["VmRSS"][0]) / 1024,
            "threads": of["Threads"],
            "joined": len(state.hosts) if state else 0,
            "files": len(os.listdir("/proc/self/fd")),
            "lost": len(state.lost_at) if state else 0,
            "queued": self._attempt._events.qsize() if self._attempt else 0,
        }


if __name__ == "__main__":
    main.prepare_process()
    supervised = Supervised(sys.argv[1], int(sys.argv[2]))
    serving = threading.Thread(target=supervised.serve, daemon=True)
    serving.start()
    with redirect_stdout(sys.stderr):
        supervised.supervise()
    serving.join()  # until the driver has asked for everything
