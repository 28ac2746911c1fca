"""TACC Vista. Whole nodes with one GPU each, of which Slurm does not know.

Sources: docs.tacc.utexas.edu/hpc/vista, "Common sbatch Options" and the example for MPS.
"""

from tests.sites.slurm import Options

COMMAND = "train.py --nodes 2 --time 1:00:00"
EXPECTED = "-A AST12345 -p gh -N 2 --ntasks-per-node=1 -t 0-01:00:00"
ACCEPTED = "-J mps_gpu_job -t 01:00:00 -N 2 -n 8 -p gh -A your_project"
REFUSED = "-t 01:00:00 -N 2 -n 8 -p gh -A your_project --gres=gpu:1"


def refusal(options: Options) -> str | None:
    """Options that the table of options calls unsupported, and those that it calls required."""
    for name in ("gres", "gpus-per-task", "mem"):
        if name in options:
            return f"--{name} is not supported"
    if not {"nodes", "time"} <= options.keys() or not {"ntasks", "ntasks-per-node"} & options.keys():
        return "-N, -t, and -n or --ntasks-per-node are required"
    return None
