"""IDRIS Jean Zay. The partition follows from a constraint and the account. Memory follows from the CPUs.

Sources: idris.fr "GPU Partitions"; a multi-GPU script of a user for ``-C h100``.
"""

from tests.sites.slurm import Options

COMMAND = "train.py --nodes 2 --gpus 8 --on a100"
EXPECTED = "-A abc@a100 -C a100 --gres=gpu:8 -N 2 --ntasks-per-node=8 --cpus-per-task=8 --hint=nomultithread"
ACCEPTED = (
    "--job-name=test -C h100 --account=ABC@h100 --gres=gpu:4 --ntasks-per-node=4 --cpus-per-task=24 "
    "--hint=nomultithread --time=1:00:00"
)
REFUSED = "-C h100 --account=ABC@a100 --gres=gpu:4 --ntasks-per-node=4 --cpus-per-task=24 --hint=nomultithread"
_PARTITIONS = {"a100": "gpu_p5", "h100": "gpu_p6"}


def refusal(options: Options) -> str | None:
    """GPU hours belong to one kind of GPU."""
    constraint, hours = options.get("constraint", "v100"), options.get("account", "").partition("@")[2]
    if "mem" in options:
        return "--mem is not available. Memory follows from --cpus-per-task"
    return None if constraint.startswith(hours or "?") else "Invalid account or account/partition combination specified"


def route(options: Options) -> str:
    """The default is a partition of V100 GPUs."""
    return options.get("partition") or _PARTITIONS.get(options.get("constraint", ""), "gpu_p13")
