"""Job arrays: how large one may be, which refusals a smaller one may pass, and which job a script was submitted as."""

from __future__ import annotations

import re

from clusterddp.errors import SlurmError
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.preemption_policy import fields

#: In sbatch's message, if a smaller array may pass: the limits on submitted jobs of a QOS, an account or a user, and
#: max_array_tasks of SchedulerParameters.
_TOO_MANY = re.compile(r"Submit\w*Limit|job submit limit|Invalid job array specification")


def jobs_by_script(ended: bool = True) -> dict[str, str]:
    """The id of the job, or array, that each batch script was submitted as: the user's jobs that Slurm still knows.

    ``ended``: whether jobs that have ended count, too.
    """
    states = ["--states=all"] if ended else []
    return parse_scripts(slurm.run("squeue", "--noheader", "--me", *states, "--format=%F|%o"))


def parse_scripts(text: str) -> dict[str, str]:
    """Reads lines ``41|/sweep/arrays/0/array.sbatch``."""
    rows = (line.partition("|") for line in text.splitlines())
    return {script: job for job, _, script in rows if job.isdecimal()}


def largest_array() -> int:
    """The number of tasks that an array may have; SlurmError if this cluster has no arrays."""
    text = slurm.run("scontrol", "show", "config")
    with slurm.understood("scontrol", text):
        most = int(fields(text)["MaxArraySize"])
    if most < 2:
        raise SlurmError(f"this cluster has no job arrays (MaxArraySize is {most}): submit the runs one by one")
    return most


def smaller_may_pass(error: SlurmError) -> bool:
    """Whether sbatch refused an array for the number of its tasks."""
    return _TOO_MANY.search(str(error)) is not None
