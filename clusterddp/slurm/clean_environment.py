"""Environments for Slurm's commands: without what a surrounding job set."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: SLURM_* that a job does not set: who has them exported them on purpose.
_KEPT = {
    *("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_ACCOUNT", "SLURM_PARTITION", "SLURM_QOS", "SLURM_RESERVATION"),
    *("SLURM_WCKEY", "SLURM_JWT", "SLURM_TIME_FORMAT"),
}
_SET_BY_A_JOB = re.compile(
    r"(SLURM|SLURMD|SRUN|TORCHELASTIC|OMPI_COMM_WORLD)_.*|PMIX_(NAMESPACE|RANK)|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|(GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|CLUSTERDDP_(RUN_DIR|ATTEMPT|SUPERVISOR|TOKEN|LAUNCHER)",
    re.DOTALL,
)
_CHANGES_OUTPUT = re.compile(r"(SQUEUE|SACCT|SINFO|SCONTROL)_.*|SLURM_TIME_FORMAT", re.DOTALL)


def scrub(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy without what a surrounding job set: in a new submission it would leak, or make sbatch refuse it."""
    return {name: value for name, value in environ.items() if name in _KEPT or not _SET_BY_A_JOB.fullmatch(name)}


def for_parsing(environ: Mapping[str, str]) -> dict[str, str]:
    """``scrub``, and without what changes the form of squeue's, sacct's, sinfo's and scontrol's output."""
    return {name: value for name, value in scrub(environ).items() if not _CHANGES_OUTPUT.fullmatch(name)}
