"""OLCF Frontier. Core specialization leaves 56 cores to a job, which scontrol does not show.

Sources: docs.olcf.ornl.gov: systems/frontier_user_guide, software/analytics/pytorch_frontier.
"""

from tests.sites.slurm import Options

COMMAND = "train.py --nodes 2 --gpus 8 --time 1:00:00"
EXPECTED = "-A ABC123 -p batch -N 2 --ntasks-per-node=8 --cpus-per-task=7 --network=disable_rdzv_get"
ACCEPTED = "-A PROJECT_ID -J ddp_test -t 00:05:00 -p batch -N 2 --network=disable_rdzv_get"
#: `-S 8`, the default, leaves 7 cores per GPU.
REFUSED = f"{ACCEPTED} --ntasks-per-node=8 -c 8 --gpus-per-node=8"


def refusal(options: Options) -> str | None:
    """An account and a time are required. --cpus-per-task counts cores, as --threads-per-core is 1 unless set."""
    cores = int(options.get("ntasks-per-node", "1")) * int(options.get("cpus-per-task", "1"))
    if cores > 64 - int(options.get("core-spec", "8")):
        return "Requested node configuration is not available"
    return None if {"account", "time"} <= options.keys() else "An account and a time limit are required"
