"""Waiting for a run on the cluster until it is over, whatever its jobs do in between."""

from __future__ import annotations

import sys
import time

from clusterddp.errors import SlurmError
from clusterddp.launch import slurm
from clusterddp.launch.progress import Progress
from clusterddp.rundir import RunDirectory, read_json

LOOK_S = 0.5
ASK_S = 5.0


def wait(run: RunDirectory, steps: int | None, follow: bool) -> int:
    """Shows the run's history as it grows; returns 0 when it completes, 1 when it ends otherwise."""
    last_asked, last_words = 0.0, ""
    with Progress(run, steps, output=follow) as progress:
        while (outcome := run.outcome()) is None:
            progress.update()
            if time.monotonic() - last_asked > ASK_S:
                words, over = job_words(run)
                last_asked = time.monotonic()
                if words != last_words:
                    print(words, file=sys.stderr, flush=True)
                    last_words = words
                if over and run.outcome() is None:
                    return 1
            time.sleep(LOOK_S)
    return 0 if outcome["state"] == "completed" else 1


def job_words(run: RunDirectory) -> tuple[str, bool]:
    """What the controller says of the run's job, in a sentence, and whether it is over without an outcome."""
    holder = read_json(run.private / "holder.json")
    if holder is None or holder["kind"] != "slurm":
        return "no Slurm job holds the run", True
    try:
        job = slurm.show_job(holder["job"])
    except SlurmError as error:
        return f"the controller cannot be asked: {error}", False
    if job is None:
        return f"job {holder['job']} is gone and left no outcome", True
    why = f" ({job.reason})" if job.reason not in ("None", "") else ""
    where = f" on {job.nodes}" if job.nodes else ""
    if job.live:
        return f"job {job.job_id}: {job.state}{where}{why}", False
    return f"job {job.job_id} ended: {job.state}{why}; the run is not over, and can be continued", True
