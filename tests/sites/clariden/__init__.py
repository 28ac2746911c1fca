"""CSCS Clariden, Alps. Ranks run in the container engine, by an option of srun.

Sources: docs.cscs.ch: software/ml/pytorch, running/slurm.
"""

from tests.sites.slurm import Options

COMMAND = "train.py --nodes 2 --time 1:00:00"
EXPECTED = "-A g123 --gpus-per-node=4 -N 2 --ntasks-per-node=4 --cpus-per-task=72"
ACCEPTED = "--account=g123 --job-name=dist-train-ddp --time=01:00:00 --nodes=2 --ntasks-per-node=4"
#: A node has four GH200.
REFUSED = f"{ACCEPTED} --gpus-per-node=8"


def refusal(options: Options) -> str | None:
    """Nothing that Slurm does not refuse itself."""
    return None
