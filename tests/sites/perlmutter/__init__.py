"""NERSC Perlmutter. The QOS is the queue, a constraint chooses the kind of node, and a plugin the partition.

Sources: docs.nersc.gov/jobs/policy/, github.com/NERSC/nersc-dl-multigpu.
"""

from tests.sites.slurm import Options

COMMAND = "train.py --nodes 2 --gpus 4"
EXPECTED = "-A m1234 -C gpu -q regular -N 2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=32"
REFUSED = "-t 00:10:00 -A nstaff -q debug --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=32"
#: Those of submit_batch_modules.sh.
ACCEPTED = f"-C gpu {REFUSED}"


def refusal(options: Options) -> str | None:
    """A partition, or no constraint."""
    if "partition" in options:
        return "Job request does not match any supported policy."
    kinds = options.get("constraint", "").split("&")
    return None if {"cpu", "gpu"} & set(kinds) else "No architecture specified, cannot estimate job costs."


def route(options: Options) -> str:
    """By the constraint."""
    return "gpu_ss11" if "gpu" in options["constraint"] else "regular_milan_ss11"
