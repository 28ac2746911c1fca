"""The variables ``SBATCH_*``, from which sbatch takes options.

For sbatch, they override the `#SBATCH` lines of a script (and its command line overrides them). Here, what the job
definition states overrides them: sbatch does not see a variable whose option the script states. The others apply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from clusterddp.rundir.files import read_bytes

#: The option that a variable stands for, if its name does not say it: those of 22.05 to 26.05 (src/sbatch/opt.c).
_OPTIONS = {
    "ARRAY_INX": "array",
    "BURST_BUFFER": "bb",
    "CPU_FREQ_REQ": "cpu-freq",
    "DEBUG": "verbose",
    "MEM_PER_NODE": "mem",
    "REQ_SWITCH": "switches",
    "SEGMENT_SIZE": "segment",
    "TIMELIMIT": "time",
    "WAIT4SWITCH": "switches",
}
#: Options that ask for the same in different ways. sbatch refuses some of these combinations, and adds up others.
SAME = (
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "tres-per-task"},
    {"cpus-per-task", "cpus-per-gpu", "tres-per-task"},
    {"requeue", "no-requeue"},
)
#: A run has one job, whose id sbatch must print at once.
_NEVER = {"array", "wait"}


def options_in(script: str) -> set[str]:
    """The options that the `#SBATCH` lines of a batch script state, such as ``ntasks-per-node``."""
    return set(re.findall(r"^#SBATCH --([a-z0-9-]+)", script, re.MULTILINE))


def overridden(environ: Iterable[str], script: str) -> set[str]:
    """The variables that sbatch must not see, because this script states their options."""
    stated = options_in(script)
    closed = stated.union(_NEVER, *(same for same in SAME if same & stated))
    return {name for name in environ if name.startswith("SBATCH_") and _option(name) in closed}


def without_overridden(environ: Mapping[str, str], script: Path) -> dict[str, str]:
    """The environment in which sbatch is to read this script."""
    if not any(name.startswith("SBATCH_") for name in environ):
        return dict(environ)
    removed = overridden(environ, read_bytes(script).decode(errors="replace"))
    return {name: value for name, value in environ.items() if name not in removed}


def _option(variable: str) -> str:
    name = variable.removeprefix("SBATCH_")
    return _OPTIONS.get(name, name.lower().replace("_", "-"))
