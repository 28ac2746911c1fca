"""The tiny job of ``clusterddp drill``: its batch step and, with ``--rank``, each of its ranks. Standard library."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from clusterddp.errors import SlurmError
from clusterddp.process import module_command
from clusterddp.rundir.files import write_json
from clusterddp.slurm import commands as slurm

RANK_S = 60.0
#: What a run needs on its nodes.
COMMANDS = ("srun", "scontrol", "sbatch", "scancel")


def rank(folder: Path) -> None:
    """Waits for TERM and notes when it came."""
    name = os.environ["SLURM_PROCID"]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    (folder / f"ready-{name}").touch()
    if signal.sigtimedwait({signal.SIGTERM}, RANK_S) is not None:
        write_json(folder / f"signalled-{name}.json", {"time": time.time()})


def first_start(folder: Path, job_id: str) -> None:
    """Signals a step of ranks as a preemption does, notes what arrived, and requeues the job."""
    ranks = int(os.environ["SLURM_JOB_NUM_NODES"])
    command = [
        "srun",
        "--ntasks-per-node=1",
        *module_command("clusterddp.cli.drill_job"),
        "--rank",
        str(folder),
    ]
    step = subprocess.Popen(command)
    _await(lambda: len(list(folder.glob("ready-*"))) == ranks)
    sent = time.time()
    subprocess.run(["scancel", "--signal=TERM", f"{job_id}.0"], check=False)
    _await(lambda: len(list(folder.glob("signalled-*.json"))) == ranks)
    seconds = time.time() - sent
    step.kill()
    found = {
        "ranks": ranks,
        "signalled": len(list(folder.glob("signalled-*.json"))),
        "seconds": seconds,
        "missing": [name for name in COMMANDS if shutil.which(name) is None],
    }
    write_json(folder / "first.json", found)
    try:
        slurm.requeue(job_id)
    except SlurmError as error:
        write_json(folder / "first.json", {**found, "requeue_error": str(error)})


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RANK_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def main() -> None:
    """The batch step, on its first and second start, or a rank."""
    folder = Path(sys.argv[-1])
    if "--rank" in sys.argv:
        rank(folder)
    elif "SLURM_RESTART_COUNT" in os.environ:
        write_json(folder / "second.json", {"time": time.time()})
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        first_start(folder, os.environ["SLURM_JOB_ID"])


if __name__ == "__main__":
    main()
