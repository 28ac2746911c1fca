"""Runs on the test cluster that jobs in `high` and faults interrupt: submitted, preempted, powered off, observed."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.trainings import Training, lift_hold

T = TypeVar("T")

NOTICE_S = 15
"""Seconds before the time limit at which runs are stopped."""


class TooLong(Exception):
    """The condition did not become true in time."""


def until(condition: Callable[[], T | None], what: str, seconds: float, look_s: float = 0.02) -> T:
    """The condition's first value that is neither None nor False."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value is not None and value is not False:
            return value
        if time.monotonic() > deadline:
            raise TooLong(f"waited {seconds:g} s for {what}")
        time.sleep(look_s)


def submit_training(
    cluster: Cluster, folder: Path, *script: str, ranks_per_node: int = 1, policy: str | None = None
) -> Training:
    """tests/scripts/train.py on two nodes. Each start of its batch script first appends the time to FOLDER/starts."""
    training = Training(cluster, folder, RunDirectory(folder / "run"))
    train = cluster.source / "tests" / "scripts" / "train.py"
    setup = {"setup": [stamp_line(folder / "starts")], **({"policy": policy} if policy else {})}
    write_definition(folder, train, *script, gpus_per_node=ranks_per_node, **setup)
    submit(training)
    return training


def write_definition(folder: Path, script: Path, *args: str, **keys: Any) -> None:
    """FOLDER/job.yaml: two nodes on the CPU, a checkpoint every 20 steps."""
    definition = {
        "script": str(script),
        "args": [*args],
        "nodes": 2,
        "gpus_per_node": 1,
        "device": "cpu",
        "partition": "low",
        "timeouts": {"notice_s": NOTICE_S},
        "watchdog": {"step_s": 12},
        "checkpoint": {"every": "20 steps"},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump({**definition, **keys}))


def submit(training: Training) -> None:
    """Submits FOLDER/job.yaml, also once more; the job is the run's."""
    up, folder = training.cluster, training.folder
    command: list[str | Path] = [up.python, "-m", "clusterddp.submit", folder / "job.yaml"]
    training.job_id = up.run([*command, "--run-dir", training.run.path], cwd=up.source).stdout.strip()


def stamp_line(file: Path) -> str:
    """A shell line that appends the time."""
    return f"date +%s.%N >> {file}"


def stamps(file: Path) -> list[float]:
    """The times in a file, whole lines only."""
    try:
        return [float(line) for line in file.read_text().rpartition("\n")[0].splitlines()]
    except FileNotFoundError:
        return []


@dataclass(frozen=True)
class HighJob:
    """A job that takes nodes from `low` and writes down when it began and when it ended."""

    job_id: str
    file: Path

    @classmethod
    def submit(
        cls, cluster: Cluster, file: Path, seconds: float = 0.1, nodes: int | None = None, where: Sequence[str] = ()
    ) -> HighJob:
        """``where``: the nodes that it takes, all of them; else any."""
        size = [f"--nodes={len(where) or nodes or len(cluster.nodes)}", "--exclusive", "--output=/dev/null"]
        size += [f"--nodelist={','.join(where)}"] if where else []
        script = f"{stamp_line(file)}; sleep {seconds:g}; {stamp_line(file)}"
        command = ["sbatch", "--parsable", "--partition=high", *size, f"--wrap={script}"]
        return cls(cluster.run(command).stdout.strip(), file)

    def started(self) -> float | None:
        """When its first command ran: the nodes were free."""
        return next(iter(stamps(self.file)), None)

    def ended(self) -> float | None:
        return next(iter(stamps(self.file)[1:]), None)


def term_sent(cluster: Cluster, job_id: str, after: float = 0.0) -> float | None:
    """When the first TERM after a moment was sent to the ranks, by the word of the nodes' slurmds."""
    logs = cluster.conf.parents[1] / "log"
    texts = [(logs / f"slurmd-{node}.log").read_text(errors="replace") for node in cluster.nodes]
    times = [sent for text in texts for sent in signal_times(text, job_id) if sent >= after]
    return min(times, default=None)


def signal_times(log: str, job_id: str, number: int = 15) -> list[float]:
    """When slurmd signalled a numbered step of the job: ``[2026-01-31T12:00:00.123] [8.0] Sent signal 15 to ...``."""
    pattern = rf"^\[([\d-]+T[\d:]+)(\.\d+)\] .*Sent signal {number} to StepId={job_id}\.\d"
    return [
        time.mktime(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + float(fraction)
        for whole, fraction in re.findall(pattern, log, re.MULTILINE)
    ]


def lifting(up: Cluster, job_id: str, condition: Callable[[], T | None]) -> Callable[[], T | None]:
    """The condition, with a look at the job five times a second: Slurm's hold after a requeue is lifted."""
    due = 0.0

    def look() -> T | None:
        nonlocal due
        if time.monotonic() >= due:
            lift_hold(up, job_id)
            due = time.monotonic() + 0.2
        return condition()

    return look


def power_off(up: Cluster, node: str) -> None:
    """The cable first: the node closes no connection."""
    up.cut(node)
    up.kill_node(node)


def power_on(up: Cluster, node: str) -> None:
    up.heal(node)
    up.restart_slurmd(node)


def keep_files(folder: Path, kept: Path) -> None:
    """What a failed run has left, for a post-mortem: instead of what an earlier one left there."""
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder, kept, symlinks=True)


def keep(training: Training, kept: Path) -> None:
    """The same of one on the cluster, with its job, the processes that are left, and Slurm's logs."""
    up = training.cluster
    keep_files(training.folder, kept)
    (kept / "job.txt").write_text("\n".join(f"{key}={value}" for key, value in up.job(training.job_id).items()))
    processes = [process for node in up.nodes for process in up.processes(node)]
    (kept / "processes.txt").write_text("\n".join(f"{one.pid} {one.command()}" for one in processes))
    shutil.copytree(up.conf.parents[1] / "log", kept / "slurm-log")
