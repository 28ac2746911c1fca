"""LUMI-G. One core of each of the eight groups of cores is reserved.

Sources: docs.lumi-supercomputer.eu: runjobs/scheduled-jobs/lumig-job, software/packages/pytorch.
"""

from tests.sites.slurm import Options

COMMAND = "train.py --nodes 2 --gpus 8"
EXPECTED = "-A project_462000001 -p standard-g --gpus-per-node=8 -N 2 --ntasks-per-node=8 --cpus-per-task=7"
ACCEPTED = "-A project_1 -p standard-g --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --time=1-12:00:00"
#: Of the 64 cores of a node, 56 are for jobs.
REFUSED = f"{ACCEPTED} --cpus-per-task=8 --hint=nomultithread"


def refusal(options: Options) -> str | None:
    """There is no default partition, and no default account."""
    return None if {"partition", "account"} <= options.keys() else "No partition or account specified"
