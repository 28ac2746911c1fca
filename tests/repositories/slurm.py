"""The same preemptions on the test cluster's real Slurm: a job of higher priority takes the node."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

from clusterddp.process import descendants
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.ddp import REPOSITORY
from tests.repositories.disturbances import (
    LIMIT_S,
    Result,
    environment,
    log_of,
    outcome_of,
    ranks_of,
    working_folder,
    write_job,
)
from tests.repositories.entries import Copy
from tests.trainings import Training
from tests.waiting import wait_until

CONFIG = ClusterConfig(nodes=1, gpus=2, cpus=4, slurmdbd=False)


def run(copy: Copy, cell: str, python: Path, cluster: Cluster, kept: Path) -> Result:
    """One run as a job of the cluster's user, preempted at the moment. ``kept`` becomes a copy of its run directory."""
    folder = copy.root / cell
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    definition = write_job(copy, python, {"partition": "low", "snapshot": False})
    here = working_folder(copy, folder)
    for path in (copy.root, *copy.root.rglob("*")):
        os.chown(path, cluster.uid, -1, follow_symlinks=False)
    directory = RunDirectory(folder / "run")
    variables = {name: value for name, value in environment(copy).items() if _is_passed_on(name)}
    variables["PYTHONPATH"] = variables["PYTHONPATH"].replace(str(REPOSITORY), str(cluster.source))
    began = time.monotonic()
    submit = [python, "-m", "clusterddp", "submit", definition, "--run-dir", directory.path]
    job_id = cluster.run(submit, cwd=here, env=variables).stdout.strip()
    training = Training(cluster, folder, directory, job_id)
    moment = getattr(copy.repository.moments, cell.removeprefix("slurm-"))
    reached = lambda: re.search(moment, log_of(directory, 0), re.MULTILINE) or directory.outcome()  # noqa: E731
    try:
        wait_until(reached, f"{moment!r} in the log of {copy.repository.name}", LIMIT_S)
        disturbed = _preempt(training)
        training.wait(directory.outcome, "the run to be over", LIMIT_S)
    finally:
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(directory.path, kept, symlinks=True, ignore_dangling_symlinks=True)
    found = outcome_of(copy, directory, cell, time.monotonic() - began)
    return Result(**{**found, "disturbed": disturbed})


def _preempt(training: Training) -> bool:
    """Stops the ranks until the job is told to end, as some make all their steps in less time than that takes.

    Returns False if the run was over before.
    """
    processes = [pid for rank in ranks_of(training.run) for pid in (rank, *descendants(rank))]
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    if training.run.outcome():
        return False
    try:
        training.preempt()
        training.wait(lambda: any(event["event"] == "notice" for event in training.run.events()), "the notice", 20)
    finally:
        for pid in filter(_is_stopped, processes):
            os.kill(pid, signal.SIGCONT)
    return True


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    except OSError:
        return False


def _is_passed_on(name: str) -> bool:
    """Whether the job's environment gets it: what the harness sets, and where libraries are."""
    return name in ("PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME", "OMP_NUM_THREADS") or name.startswith(
        ("STANDIN_", "HF_", "WANDB_", "TOKENIZERS_")
    )
