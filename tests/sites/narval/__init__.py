"""Narval of the Digital Research Alliance of Canada. The partition follows from the resources and the time.

Sources: docs.alliancecan.ca "Running jobs" and "Using GPUs with Slurm"; a script of a user.
"""

from tests.sites.slurm import Options

COMMAND = "train.py --nodes 2 --time 3:00:00"
EXPECTED = "-A def-someuser --gpus-per-node=a100:4 -N 2 --ntasks-per-node=4 --cpus-per-task=12 --mem=510000M"
ACCEPTED = "--account=def-someuser --nodes=1 --gpus-per-node=a100:4 --cpus-per-task=12 --mem=64000M --time=00-00:05"
REFUSED = "--nodes=1 --gpus-per-node=a100:4 --cpus-per-task=12 --mem=64000M --time=00-00:05"


def refusal(options: Options) -> str | None:
    """A user has several accounts, and names one."""
    return None if options.get("account") else "You are associated with multiple accounts. Please specify one"


def route(options: Options) -> str:
    """GPU nodes for jobs with GPUs."""
    gpus = {"gres", "gpus-per-node"} & options.keys()
    return options.get("partition") or ("gpubase_bynode_b1" if gpus else "cpubase_bycore_b1")
