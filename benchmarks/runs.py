"""What the benchmarks on the test cluster share: the cluster itself, folders, and the control, an empty DDP script."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks import common
from tests.cluster import Cluster, ClusterConfig, ClusterError
from tests.interruptions import stamp_line, stamps, until

T = TypeVar("T")


@contextmanager
def cluster(config: ClusterConfig, patience_s: float = 3600) -> Iterator[Cluster]:
    """The test cluster, once nobody else has it. It goes down with the block, also when this process is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with _bring_up(config, time.monotonic() + patience_s) as up:
        yield up


def _bring_up(config: ClusterConfig, deadline: float) -> Cluster:
    said = False
    while True:
        try:
            return Cluster.up(config)
        except ClusterError as error:
            taken = "is held by" in str(error) or "was left up" in str(error)
            if not taken or time.monotonic() > deadline:
                raise
            if not said:
                common.say(f"waiting: {error}")
            said = True
            time.sleep(1)


def folder_for(cluster: Cluster, name: str) -> Path:
    """A new folder of the user's, the same on all nodes."""
    folder = cluster.scratch / name
    folder.mkdir(mode=0o755)
    os.chown(folder, cluster.uid, -1)
    return folder


def in_folders(up: Cluster, kinds: Mapping[str, Callable[[Cluster, Path], T]]) -> dict[str, Callable[[], T]]:
    """For ``sides.in_turns``: each call in a new folder, without jobs that an earlier one has left."""

    def call(kind: str, number: Iterator[int]) -> T:
        up.drain_jobs()
        common.say(kind)
        return kinds[kind](up, folder_for(up, f"{kind}-{next(number)}"))

    return {kind: partial(call, kind, itertools.count()) for kind in kinds}


def srun_script(up: Cluster, name: str, *arguments: object) -> str:
    """The line of a batch script that runs one of benchmarks/scripts, a task on each node with all its CPUs."""
    words = [f"srun --cpus-per-task={up.config.cpus}", up.python, "-u", up.source / "benchmarks" / "scripts" / name]
    return " ".join(map(str, [*words, *arguments]))


def submit_empty_ddp(up: Cluster, folder: Path, before: str = "") -> str:
    """The empty DDP script on two nodes: the control. ``before``: what else its batch script does. Returns the job id.

    The script's first line writes the time to FOLDER/starts, the only step writes it to FOLDER/stepped.
    """
    script = folder / "empty.sbatch"
    script.write_text(
        f"""#!/bin/bash
{stamp_line(folder / "starts")}
export OMP_NUM_THREADS={up.config.cpus}
{before}
{srun_script(up, "empty_ddp.py", folder / "stepped")}
"""
    )
    size = ["--nodes=2", "--ntasks-per-node=1", f"--cpus-per-task={up.config.cpus}"]
    log = f"--output={script.with_suffix('.log')}"
    return up.run(["sbatch", "--parsable", "--requeue", "--partition=low", log, *size, script]).stdout.strip()


def empty_ddp_start(up: Cluster, folder: Path) -> float:
    """Seconds that the empty DDP script takes from its batch script's first line to its step."""
    submit_empty_ddp(up, folder)
    stepped = until(lambda: next(iter(stamps(folder / "stepped")), None), "the empty script's step", 180)
    up.drain_jobs()
    return stepped - stamps(folder / "starts")[0]
