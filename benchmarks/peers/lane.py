"""A lane: some nodes of the cluster with a partition of their own, on which one cell runs after the other."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.cells import Line, figures, parse
from benchmarks.peers.peers import Peer
from benchmarks.peers.schedules import CELL_S, HIGH_S, Schedule
from benchmarks.runs import folder_for
from tests.cluster import Cluster
from tests.cluster.system import Process
from tests.interruptions import HighJob, TooLong, power_off, power_on, term_sent, until

#: A lane has a spare node for the one that dies.
NODES = 3
FILES_POLL_S, QUEUE_POLL_S = 0.1, 1.5
#: A run is over when so many looks in a row find no job: another may just be on its way.
LOOKS = 3
#: Powers and cables are the cluster's, and not made for several threads.
_POWER = threading.Lock()


@dataclass
class Lane:
    """Its cells never wait for those of other lanes; they share the CPUs."""

    up: Cluster
    number: int
    nodes: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = self.up.nodes[NODES * self.number : NODES * (self.number + 1)]
        values = [f"nodes={','.join(self.nodes)}", "prioritytier=1", "preemptmode=requeue", "state=up"]
        self.up.root(["scontrol", "create", f"partitionname={self.partition}", *values])

    @property
    def partition(self) -> str:
        return f"lane{self.number}"

    def jobs(self) -> list[tuple[str, str]]:
        """Its jobs and their states."""
        command = ["squeue", "--noheader", f"--partition={self.partition}", "--format=%A %T"]
        lines = self.up.root(command).stdout.splitlines()
        return [(line.split()[0], line.split()[1]) for line in lines]

    def begin(self, peer: Peer, schedule: Schedule, folder: Path, epochs: int) -> str:
        """Submits a cell's job."""
        self.up.root(["scontrol", "update", f"partitionname={self.partition}", f"gracetime={schedule.grace}"])
        scripts = self.up.source / "benchmarks" / "peers" / "scripts"
        environment = {
            "PEERS_LOG": str(folder),
            "PEERS_SCRIPTS": str(scripts),
            "PEERS_EPOCHS": str(epochs),
            "SBATCH_PARTITION": self.partition,
            "SBATCH_TIMELIMIT": schedule.time,
            "PYTHONPATH": str(scripts),  # submitit imports what it has pickled from there
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        command = peer.submission(scripts, self.up.python, folder, environment)
        return self.up.run(command, cwd=folder, env=environment).stdout.split()[-1]

    def clear(self) -> None:
        """Ends what is left on its nodes, and repairs them."""
        with _POWER:
            # Slurm would ask a node that has died and is back about its job again only minutes later.
            for node in self.nodes:
                if not any("slurmd" in process.command() for process in self.up.processes(node)):
                    power_on(self.up, node)
                    self._update(node, "down")
        deadline = time.monotonic() + 90
        while not self._idle():
            if time.monotonic() > deadline:
                raise TooLong(f"{self.partition} is not idle: {self.jobs()}")
            for node in self.nodes if time.monotonic() > deadline - 45 else []:
                self._update(node, "down")
            for node in self.nodes:
                self._update(node, "resume")
            time.sleep(1)

    def _update(self, node: str, state: str) -> None:
        self.up.root(["scontrol", "update", f"nodename={node}", f"state={state}", "reason=cleared"], check=False)

    def _idle(self) -> bool:
        jobs = [job for job, _ in self.jobs()]
        if jobs:
            self.up.root(["scancel", "--quiet", "--full", "--signal=KILL", *jobs], check=False)
            self.up.root(["scancel", "--quiet", *jobs], check=False)
        states = self.up.root(["sinfo", "-h", "-N", "-p", self.partition, "--format=%T"]).stdout.split()
        steps = [p for node in self.nodes for p in self.up.processes(node) if p.command().startswith("slurmstepd:")]
        return not jobs and set(states) == {"idle"} and not steps


class Cell:
    """One training of one peer under one schedule."""

    def __init__(self, lane: Lane, peer: Peer, schedule: Schedule, name: str, epochs: int) -> None:
        self.lane, self.peer, self.schedule = lane, peer, schedule
        self.folder = folder_for(lane.up, name)
        self.faults: list[dict[str, Any]] = []
        self.highs: list[HighJob] = []
        self.states: list[tuple[float, str, str]] = []
        self._epochs, self._job, self._missing = epochs, "", 0

    def run(self) -> dict[str, Any]:
        """Until it is done, no job of it is left, or its time is over."""
        self._job = self.lane.begin(self.peer, self.schedule, self.folder, self._epochs)
        submitted, deadline = time.time(), time.monotonic() + CELL_S
        end = ""
        looked = time.monotonic()
        while not end:
            time.sleep(FILES_POLL_S)
            end = self._look(deadline)
            if not end and time.monotonic() - looked > QUEUE_POLL_S:
                looked, end = time.monotonic(), self._look_at_slurm()
        final = self.folder / "final.bin"
        finished = final.stat().st_mtime if final.exists() else None
        handovers = [self._handover(fault, high) for fault, high in zip(self._preemptions(), self.highs, strict=True)]
        cell = {
            "peer": self.peer.name,
            "schedule": self.schedule.name,
            "submitted": submitted,
            "finished": finished,
            "end": end,
            "faults": self.faults,
            "handovers": handovers,
            "states": self.states,
            "slurm": self._last_state(),
        }
        return figures(cell, self.lines())

    def lines(self) -> list[Line]:
        file = self.folder / "steps"
        return parse(file.read_text()) if file.exists() else []

    def _look(self, deadline: float) -> str:
        """Makes a fault that is due; the cell's end, if it has come."""
        if (self.folder / "final.bin").exists():
            return "completed"
        if time.monotonic() > deadline:
            return f"not done after {CELL_S:g} s"
        first = self._first_step()
        if first is not None and self.schedule.due(len(self.faults), time.time() - first):
            self._make_fault()
        return ""

    def _first_step(self) -> float | None:
        try:
            with (self.folder / "steps").open() as file:
                line = file.readline()
            return float(line.split()[0]) if line.endswith("\n") else None
        except FileNotFoundError:
            return None

    def _look_at_slurm(self) -> str:
        """The job may be another one by now."""
        jobs = self.lane.jobs()
        for job, state in jobs:
            if (job, state) not in [before[1:] for before in self.states[-1:]]:
                self.states.append((round(time.time(), 1), job, state))
        if jobs:
            self._job, self._missing = jobs[-1][0], 0
            return ""
        self._missing += 1
        if self._missing < LOOKS:
            return ""
        return "completed" if (self.folder / "final.bin").exists() else "no job left"

    def _last_state(self) -> str:
        job = self.lane.up.job(self._job)
        return f"{job.get('JobState')} {job.get('ExitCode')} restarts={job.get('Restarts')}"

    def _preemptions(self) -> list[dict[str, Any]]:
        return [fault for fault in self.faults if fault["kind"] == "preempt"]

    # ---- faults

    def _make_fault(self) -> None:
        kinds: dict[str, Callable[[], bool]] = {
            "preempt": self._preempt,
            "kill": lambda: self._signal(signal.SIGKILL),
            "hang": lambda: self._signal(signal.SIGSTOP),
            "dead": self._power_off,
        }
        fault = {"kind": self.schedule.kind, "asked": time.time(), "made": False, "job": self._job}
        fault["made"] = kinds[self.schedule.kind]()
        self.faults.append(fault)

    def _preempt(self) -> bool:
        file = self.folder / f"high-{len(self.highs)}"
        self.highs.append(HighJob.submit(self.lane.up, file, HIGH_S, where=self.lane.nodes))
        return True

    def _handover(self, fault: dict[str, Any], high: HighJob) -> dict[str, float | None]:
        """Seconds from the signal, and from the preempting job's submission, to that job's first command."""
        try:
            started = until(high.started, "the job that preempts", 45)
        except TooLong:
            return {"from_signal_s": None, "from_submission_s": None}
        sent = term_sent(self.lane.up, fault["job"], fault["asked"] - 0.001)
        early = sent is not None and sent <= started
        signalled = round(started - sent, 3) if early and sent is not None else None
        return {"from_signal_s": signalled, "from_submission_s": round(started - fault["asked"], 3)}

    def _victim(self) -> tuple[Process, str] | None:
        """The last rank of the last node, never the batch host's, of those that have logged a step and are alive."""
        file = self.folder / "ranks"
        rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        alive = [(host, int(rank), Process.of(int(pid))) for _, rank, pid, host in rows]
        living = [(host, rank, process) for host, rank, process in alive if process is not None]
        if len({host for host, _, _ in living}) < 2:
            return None
        host, _, process = max(living, key=lambda row: row[:2])
        return process, host

    def _signal(self, number: signal.Signals) -> bool:
        victim = self._victim()
        if victim is None:
            return False
        victim[0].kill(number)
        return True

    def _power_off(self) -> bool:
        victim = self._victim()
        if victim is None:
            return False
        with _POWER:
            power_off(self.lane.up, victim[1])
        return True

    def keep(self, folder: Path) -> None:
        """What a post-mortem needs; the checkpoints are left out."""
        shutil.rmtree(folder, ignore_errors=True)
        leave = shutil.ignore_patterns("*.pt", "*.safetensors", "*.ckpt", "checkpoint-*", "step_*")
        shutil.copytree(self.folder, folder, symlinks=True, ignore=leave, ignore_dangling_symlinks=True)
        shutil.rmtree(self.folder)
