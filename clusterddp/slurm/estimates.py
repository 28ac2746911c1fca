"""When Slurm expects to start a job: ``sbatch --test-only``, for each partition and time limit that it may have.

An estimate is a rough bound. Slurm assumes that each job runs until its time limit, and that nobody submits another.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import SlurmError, SlurmUnavailable
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.slurm_kinds import time_text
from clusterddp.slurm import commands as slurm

#: Seconds between two questions: slurmctld plans a start for each.
PAUSE_S = 1.0


@dataclass(frozen=True)
class Estimate:
    """For one partition and limit. ``start``: unix seconds, or None if Slurm refuses the job (``refusal``)."""

    partition: str
    limit: str
    start: float | None
    nodes: str = ""
    refusal: str = ""


def estimates(job: Job, script: str, sleep: Callable[[float], None] = time.sleep) -> Iterator[Estimate]:
    """Each as soon as Slurm has answered. ``script``: the job's batch script. Raises SlurmUnavailable."""
    limits = [*dict.fromkeys(filter(None, map(time_text, (job.time_s, job.time_min_s))))] or [""]
    questions = [(partition, limit) for partition in (job.partition or "").split(",") for limit in limits]
    with tempfile.NamedTemporaryFile("w", prefix="clusterddp-", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        for number, (partition, limit) in enumerate(questions):
            if number:
                sleep(PAUSE_S)
            yield _ask(Path(file.name), partition, limit)


def _ask(script: Path, partition: str, limit: str) -> Estimate:
    given = {"partition": partition, "time": limit}
    options = [f"--{name}={value}" for name, value in given.items() if value]
    try:
        start, nodes, chosen = parse_estimate(slurm.errors_of("sbatch", "--test-only", *options, str(script)))
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        return Estimate(partition, limit, None, refusal=str(error))
    return Estimate(chosen, limit, start, nodes)


def parse_estimate(text: str) -> tuple[float, str, str]:
    """Time, nodes and partition in ``sbatch: Job 41 to start at 2026-01-31T12:00:00 using 4 processors on nodes n[1-2]
    in partition low``."""
    found = re.search(r"to start at (\S+) using \d+ processors on nodes (\S+) in partition (\S+)", text)
    with slurm.understood("sbatch --test-only", text):
        if found is None or (start := slurm.unix_time(found[1])) is None:
            raise ValueError("no start")
    return start, found[2], found[3]
