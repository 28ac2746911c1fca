"""A real Slurm of 64 nodes on this machine, with 8 ranks without torch on each.

Each time stands beside that of ``srun true`` or ``srun python -c pass`` with as many tasks on the same nodes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.runs import HighJob, cluster, folder_for, term_sent, until
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig

NODES, RANKS_PER_NODE, WAIT_S, BEATS_S = 64, 8, 240.0, 20.0


def measure(nodes: int = NODES) -> dict[str, Any]:
    """All phases, once each."""
    config = ClusterConfig(nodes=nodes, gpus=0, cpus=RANKS_PER_NODE, slurmdbd=False, slurmd_timeout=120, grace=60)
    with cluster(config) as up:
        folder = folder_for(up, "scale")
        found: dict[str, Any] = {"slurm": up.version, "nodes": nodes, "ranks": nodes * RANKS_PER_NODE}
        found["controls"] = controls(up, folder, nodes)
        run = Run(up, folder, nodes)
        try:
            run.phases(found)
        except BaseException:
            print(json.dumps(found), run.story(), read(folder / "controls.err"), sep="\n", file=sys.stderr)
            raise
        up.drain_jobs()
    return found


def controls(up: Cluster, folder: Path, nodes: int) -> dict[str, float]:
    """Seconds of srun with as many tasks as the run has ranks, in one job: ``true``, Python, a rank's imports."""
    size = f"--nodes={nodes} --ntasks-per-node={RANKS_PER_NODE} --cpus-per-task=1"
    imports = f"{up.python} -c 'import clusterddp.worker.rank'"
    words = {"true": "/bin/true", "python": f"{up.python} -c pass", "imports": imports}
    lines = [f"s=$(date +%s.%N); srun {size} {word} && echo {name} $s $(date +%s.%N)" for name, word in words.items()]
    script = folder / "controls.sbatch"
    script.write_text("\n".join(["#!/bin/bash", *lines, *lines]) + "\n")
    log = folder / "controls.log"
    errors = log.with_suffix(".err")
    up.run(["sbatch", "--parsable", "--partition=off", f"--output={log}", f"--error={errors}", *size.split(), script])
    until(lambda: read(log).count("\n") >= 2 * len(words), "the controls", WAIT_S)
    times: dict[str, list[float]] = {}
    for line in read(log).splitlines():
        name, began, ended = line.split()
        times.setdefault(name, []).append(float(ended) - float(began))
    (folder / "controls.txt").write_text(read(errors))
    up.drain_jobs()
    return {name: round(min(values), 2) for name, values in times.items()}


def read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


class Run:
    """The run, and what its files and processes show."""

    def __init__(self, up: Cluster, folder: Path, nodes: int) -> None:
        self._up, self._folder, self._ranks = up, folder, nodes * RANKS_PER_NODE
        self.run = RunDirectory(folder / "run")
        script = up.source / "benchmarks" / "scripts" / "stub_rank.py"
        shape = f"--nodes {nodes} --gpus {RANKS_PER_NODE} --device cpu --partition low --set cpus_per_task=1".split()
        self._submit = [up.python, "-m", "clusterddp.submit", script, "--run-dir", self.run.path, *shape]

    def phases(self, found: dict[str, Any]) -> None:
        up = self._up
        job = up.run(self._submit, cwd=up.source).stdout.strip()
        found["start"] = self._started(0)
        found["heartbeats"] = self._beats()
        found["stacks"] = self._command("stacks")
        found["status"] = self._command("status")
        found["logs"] = self._command("logs", "--rank", "all")
        found["failure"] = self._failure()
        found["handover"] = self._handover(job)
        history = self.run.events_file.read_bytes()
        logs = [len(list(self.run.attempt_logs(number).iterdir())) for number in self.run.attempts()]
        found["files"] = {"history_lines": history.count(b"\n"), "history_bytes": len(history), "logs": logs}
        found["files"]["records"] = len(list(self.run.attempt_private(0).iterdir()))

    def story(self) -> str:
        """What to show if a phase fails: the history's end, the job's log, srun's messages."""
        files = [self.run.events_file, *self.run.logs.glob("*.log"), *self.run.logs.glob("*/srun.err")]
        return "\n".join(f"{file}:\n{read(file)[-1500:]}" for file in files)

    def _stamps(self, word: str, attempt: int) -> dict[int, tuple[int, float]]:
        """The process and the time of each rank that has printed a word."""
        found = {}
        for file in self.run.attempt_logs(attempt).glob("rank-*.out"):
            if match := re.search(rf"^{word} (\d+) ([\d.]+)$", read(file), re.MULTILINE):
                found[int(file.stem.partition("-")[2])] = int(match[1]), float(match[2])
        return found

    def _all(self, word: str, attempt: int) -> list[float]:
        until(lambda: len(self._stamps(word, attempt)) == self._ranks, f"all ranks: {word}", WAIT_S, 0.5)
        return [at for _, at in self._stamps(word, attempt).values()]

    def _event(self, name: str, attempt: int) -> dict[str, Any]:
        events = lambda: (e for e in self.run.events() if e["event"] == name and e["attempt"] == attempt)  # noqa: E731
        return until(lambda: next(events(), None), f"{name} of attempt {attempt}", WAIT_S)

    def _started(self, attempt: int) -> dict[str, float]:
        began = self._event("started", attempt)["time"]
        runs = self._all("runs", attempt)
        return {"first_s": round(min(runs) - began, 2), "all_s": round(max(runs) - began, 2)}

    def _supervisor(self) -> int:
        for process in self._up.processes(self._up.nodes[0]):
            if "clusterddp.supervisor" in process.command() and "slurmstepd" not in process.command():
                pid = process.pid
        return int(pid)

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._supervisor()}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _beats(self) -> dict[str, Any]:
        before = self._cpu_s()
        began = time.monotonic()
        while time.monotonic() - began < BEATS_S:
            time.sleep(0.5)
        used = self._cpu_s() - before
        status = Path(f"/proc/{self._supervisor()}/status").read_text()
        memory = re.search(r"VmHWM:\s+(\d+)", status)
        files = len(os.listdir(f"/proc/{self._supervisor()}/fd"))
        peak_mb = round(int(memory[1]) / 1024, 1) if memory else None
        return {"per_s": self._ranks / 2, "cpu_share": round(used / BEATS_S, 4), "peak_mb": peak_mb, "files": files}

    def _command(self, *words: str) -> dict[str, Any]:
        """A command of the user's, on the login node."""
        began = time.monotonic()
        command = [self._up.python, "-m", "clusterddp", words[0], self.run.path, *words[1:]]
        done = self._up.run(command, check=False, timeout=120)
        (self._folder / f"{words[0]}.txt").write_text(done.stdout + done.stderr)
        seconds = round(time.monotonic() - began, 2)
        first = (done.stdout + done.stderr).strip().splitlines()[:1]
        return {"seconds": seconds, "code": done.returncode, "lines": done.stdout.count("\n"), "first": first}

    def _failure(self) -> dict[str, Any]:
        """A rank is killed: named, and all ranks run again in place."""
        victim = self._ranks // 2 + 1
        pid, _ = self._stamps("runs", 0)[victim]
        at = time.time()
        for process in self._processes(pid):
            os.kill(process, signal.SIGKILL)
        named = self._event("rank_failed", 0)
        assert named["rank"] == victim, named
        restarted = self._event("restarted", 0)["time"]
        again = self._started(1)
        began = self._event("started", 1)["time"]
        figures = {"named_s": named["time"] - at, "restarted_s": restarted - at, "all_s": began + again["all_s"] - at}
        return {name: round(value, 2) for name, value in figures.items()} | {"again": again}

    def _processes(self, pid: int) -> Iterator[int]:
        """The rank's process: nodes share this machine's process ids."""
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"stub_rank" in command, command
        yield pid

    def _handover(self, job: str) -> dict[str, Any]:
        """A job of a higher partition takes all nodes."""
        sent_after = time.time()
        high = HighJob.submit(self._up, self._folder / "high")
        started = until(high.started, "the nodes to be free", WAIT_S)
        sent = until(lambda: term_sent(self._up, job, sent_after), "slurmd's word on a TERM", 10)
        told = self._all("told", 1)
        requeued = self._event("requeued", 1)["time"]
        seconds = {"all_told_s": max(told) - sent, "requeued_s": requeued - sent, "nodes_free_s": started - sent}
        return {name: round(value, 2) for name, value in seconds.items()}
